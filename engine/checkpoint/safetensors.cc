#include "engine/checkpoint/safetensors.h"

#include <array>
#include <utility>

#include "core/error.h"
#include "core/json.h"

namespace sluice::engine {

SafetensorsReader::SafetensorsReader(offload::IoService& io, const std::string& path, ReadAhead& ahead,
                                     std::optional<FileSum> expected)
    : ahead_(ahead), file_(io, path, std::move(expected)), header_(read_header()) {}

SafetensorsReader::~SafetensorsReader() { ahead_.forget(file_); }

SafetensorsHeader SafetensorsReader::read_header() {
  try {
    std::array<std::byte, SafetensorsHeader::kPrefix> prefix = {};
    if (file_.size() >= prefix.size()) ahead_.read(file_, 0, prefix);
    std::string text(SafetensorsHeader::text_bytes(prefix, file_.size(), file_.path()), '\0');
    ahead_.read(file_, prefix.size(), std::as_writable_bytes(std::span(text)));
    return SafetensorsHeader::parse(text, file_.size(), file_.path());
  } catch (...) {
    ahead_.forget(file_);
    throw;
  }
}

const StoredTensor& SafetensorsReader::tensor(std::string_view name) const {
  if (const StoredTensor* found = header_.find(name)) return *found;
  std::vector<std::string> known;
  for (const StoredTensor& tensor : header_.tensors()) known.push_back(tensor.name);
  const std::string near = nearest_word(name, known);
  fail(ErrorCode::kNotFound, "'{}' holds no tensor '{}' among its {}{}", path(), name, known.size(),
       near.empty() ? "" : fmt::format("; the nearest is '{}'", near));
}

void SafetensorsReader::read(const StoredTensor& tensor, std::uint64_t first_byte, std::span<std::byte> out) {
  if (first_byte > tensor.bytes() || out.size() > tensor.bytes() - first_byte)
    fail(ErrorCode::kInvalidArgument, "{} bytes at {} of tensor '{}' of '{}' were asked for, and it has {}",
         out.size(), first_byte, tensor.name, path(), tensor.bytes());
  ahead_.read(file_, header_.payload_offset() + tensor.begin + first_byte, out);
}

}  // namespace sluice::engine
