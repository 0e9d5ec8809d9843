#include "bindings/c/sluice_files.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>

#include "bindings/c/status.h"
#include "core/error.h"
#include "core/json.h"
#include "engine/checkpoint/best_checkpoint.h"
#include "engine/checkpoint/safetensors.h"

using sluice::ErrorCode;
using sluice::fail;
using sluice::Json;
using namespace sluice::c;  // NOLINT: what follows is of this room
namespace engine = sluice::engine;

namespace {

engine::SafetensorsHeader header_of(const std::string& path) {
  const std::filesystem::file_status status = std::filesystem::status(path);
  if (!std::filesystem::exists(status)) fail(ErrorCode::kNotFound, "there is no file '{}'", path);
  // Opening a pipe would wait for its other end.
  if (!std::filesystem::is_regular_file(status))
    fail(ErrorCode::kInvalidArgument, "'{}' is not a file", path);
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  const std::streamoff bytes = file.tellg();
  if (bytes < 0) fail(ErrorCode::kIo, "cannot read '{}': {}", path, sluice::errno_text(errno));
  std::array<char, engine::SafetensorsHeader::kPrefix> prefix = {};
  file.seekg(0).read(prefix.data(), std::min<std::streamoff>(bytes, prefix.size()));
  const auto size = static_cast<std::uint64_t>(bytes);
  std::string text(engine::SafetensorsHeader::text_bytes(std::as_bytes(std::span(prefix)), size, path), '\0');
  if (!file.read(text.data(), static_cast<std::streamsize>(text.size())))
    fail(ErrorCode::kIo, "cannot read the header of '{}': {}", path, sluice::errno_text(errno));
  return engine::SafetensorsHeader::parse(text, size, path);
}

}  // namespace

sluice_status sluice_safetensors_tensors(const char* path, char** json) {
  return guarded([&] {
    const engine::SafetensorsHeader header = header_of(&required(path, "path"));
    Json tensors = Json::array();
    for (const engine::StoredTensor& tensor : header.tensors())
      tensors.push_back({{"name", tensor.name},
                         {"dtype", tensor.type},
                         {"shape", tensor.shape},
                         {"begin", header.payload_offset() + tensor.begin}});
    required(json, "json") = new_text(tensors.dump());
  });
}

sluice_status sluice_checkpoints(const char* folder, char** json) {
  return guarded([&] {
    const engine::CheckpointList list = engine::list_checkpoints(&required(folder, "folder"));
    Json found = {{"steps", Json::array()}, {"best", nullptr}};
    for (const auto& whole : list.whole) found["steps"].push_back(whole.step);
    if (const auto best = engine::best_checkpoint(list))
      found["best"] = {{"step", best->step}, {"validation_loss", best->validation_loss}};
    required(json, "json") = new_text(found.dump());
  });
}
