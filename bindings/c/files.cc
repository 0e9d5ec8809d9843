#include "bindings/c/sluice_files.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <span>
#include <string>
#include <utility>

#include "bindings/c/status.h"
#include "core/error.h"
#include "core/json.h"
#include "core/printable.h"
#include "engine/checkpoint/best_checkpoint.h"
#include "engine/checkpoint/safetensors.h"
#include "engine/checkpoint/safetensors_index.h"

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

Json described(const std::string& path, const engine::SafetensorsHeader& header,
               const engine::StoredTensor& tensor) {
  return {{"name", tensor.name},
          {"file", std::filesystem::path(path).filename().string()},
          {"dtype", tensor.type},
          {"shape", tensor.shape},
          {"begin", header.payload_offset() + tensor.begin}};
}

Json tensors_of_file(const std::string& path) {
  const engine::SafetensorsHeader header = header_of(path);
  Json tensors = Json::array();
  for (const engine::StoredTensor& tensor : header.tensors())
    tensors.push_back(described(path, header, tensor));
  return tensors;
}

Json tensors_of_index(const std::string& index) {
  std::map<std::string, engine::SafetensorsHeader> headers;  // by path
  Json tensors = Json::array();
  for (const auto& [name, path] : engine::read_safetensors_index(index)) {
    auto header = headers.find(path);
    if (header == headers.end()) header = headers.emplace(path, header_of(path)).first;
    const engine::StoredTensor* tensor = header->second.find(name);
    if (tensor == nullptr)
      fail(ErrorCode::kCorrupt, "'{}' puts tensor '{}' in '{}', which does not hold it", index,
           sluice::printable(name), path);
    tensors.push_back(described(path, header->second, *tensor));
  }
  return tensors;
}

Json tensors_of_all(const std::filesystem::path& folder) {
  std::set<std::string> paths;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    if (entry.path().extension() == ".safetensors") paths.insert(entry.path());
  if (paths.empty())
    fail(ErrorCode::kNotFound, "'{}' has no file *.safetensors; save the model there with save_pretrained()",
         folder.string());
  std::map<std::string, std::string> files;  // by the tensors' names
  Json tensors = Json::array();
  for (const std::string& path : paths)
    for (Json& tensor : tensors_of_file(path)) {
      const auto [first, is_new] = files.emplace(tensor.at("name").get<std::string>(), path);
      if (!is_new)
        fail(ErrorCode::kInvalidArgument,
             "'{}' is in '{}' and in '{}'; leave one of the files there, or give the folder a "
             "model.safetensors.index.json, which says which counts",
             sluice::printable(first->first), first->second, path);
      tensors.push_back(std::move(tensor));
    }
  return tensors;
}

}  // namespace

sluice_status sluice_safetensors_tensors(const char* path, char** json) {
  return guarded([&] {
    const std::filesystem::path given = &required(path, "path");
    const auto single = given / "model.safetensors", index = given / "model.safetensors.index.json";
    const Json tensors = !std::filesystem::is_directory(given) ? tensors_of_file(given)
                         : std::filesystem::exists(single)     ? tensors_of_file(single)
                         : std::filesystem::exists(index)      ? tensors_of_index(index)
                                                               : tensors_of_all(given);
    // The names of files need not be UTF-8.
    required(json, "json") = new_text(tensors.dump(-1, ' ', false, Json::error_handler_t::replace));
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
