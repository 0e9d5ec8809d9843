#include <filesystem>
#include <utility>

#include "core/error.h"
#include "core/json.h"
#include "core/printable.h"
#include "core/text_file.h"
#include "engine/checkpoint/safetensors.h"
#include "engine/checkpoint/safetensors_index.h"

namespace sluice::engine {
namespace {

constexpr const char* kSingle = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";

bool exists(const std::string& path) {
  std::error_code error;
  return std::filesystem::exists(path, error);
}

std::map<std::string, std::string> read_weight_map(const std::string& index) {
  try {
    return json_field<std::map<std::string, std::string>>(read_json_file(index), "weight_map", index);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kInvalidArgument) throw;
    throw Error(ErrorCode::kCorrupt, error.what());
  }
}

}  // namespace

std::map<std::string, std::string> read_safetensors_index(const std::string& index) {
  std::map<std::string, std::string> paths = read_weight_map(index);
  const std::string folder = std::filesystem::path(index).parent_path();
  for (auto& [name, file] : paths) {
    if (!is_plain_file_name(file) || printable(file) != file)
      fail(ErrorCode::kCorrupt, "'{}' puts tensor '{}' in '{}', which is not a plain file name", index,
           printable(name), printable(file));
    file = path_in(folder, file);
    if (!exists(file))
      fail(ErrorCode::kNotFound, "'{}' is missing; '{}' puts tensor '{}' in it", file, index,
           printable(name));
  }
  return paths;
}

SafetensorsFolder::SafetensorsFolder(offload::IoService& io, const std::string& path, ReadAhead& ahead)
    : path_(path) {
  const bool is_file = exists(path) && !std::filesystem::is_directory(path);
  const std::string single = is_file ? path : path_in(path, kSingle), index = path_in(path, kIndex);
  if (exists(single)) {
    auto& file = files_[single] = std::make_unique<SafetensorsReader>(io, single, ahead);
    for (const StoredTensor& tensor : file->header().tensors()) tensors_[tensor.name] = {file.get(), &tensor};
  } else if (exists(index)) {
    open_index(io, ahead, index);
  } else {
    fail(ErrorCode::kNotFound, "'{}' {}", path,
         exists(path) ? fmt::format("holds neither {} nor {}", kSingle, kIndex) : "does not exist");
  }
}

void SafetensorsFolder::open_index(offload::IoService& io, ReadAhead& ahead, const std::string& index) {
  for (const auto& [name, path] : read_safetensors_index(index)) {
    auto& reader = files_[path];
    if (reader == nullptr) reader = std::make_unique<SafetensorsReader>(io, path, ahead);
    const StoredTensor* tensor = reader->header().find(name);
    if (tensor == nullptr)
      fail(ErrorCode::kCorrupt, "'{}' puts tensor '{}' in '{}', which does not hold it", index, name, path);
    tensors_[name] = {reader.get(), tensor};
  }
}

std::vector<std::string> SafetensorsFolder::names() const {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : tensors_) names.push_back(name);
  return names;
}

const StoredTensor* SafetensorsFolder::find(std::string_view name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : found->second.tensor;
}

const SafetensorsFolder::FileTensor& SafetensorsFolder::at(std::string_view name) const {
  const auto found = tensors_.find(name);
  if (found != tensors_.end()) return found->second;
  const std::string near = nearest_word(name, names());
  fail(ErrorCode::kNotFound, "'{}' holds no tensor '{}' among its {}{}", path_, name, tensors_.size(),
       near.empty() ? "" : fmt::format("; the nearest is '{}'", near));
}

const StoredTensor& SafetensorsFolder::tensor(std::string_view name) const { return *at(name).tensor; }
SafetensorsReader& SafetensorsFolder::file_of(std::string_view name) const { return *at(name).file; }

void SafetensorsFolder::read(std::string_view name, std::uint64_t first_byte, std::span<std::byte> out) {
  const FileTensor& found = at(name);
  found.file->read(*found.tensor, first_byte, out);
}

}  // namespace sluice::engine
