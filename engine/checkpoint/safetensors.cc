#include "engine/checkpoint/safetensors.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <utility>

#include "core/descriptor.h"
#include "core/error.h"
#include "core/json.h"
#include "engine/checkpoint/safetensors_types.h"

namespace sluice::engine {

std::uint64_t StoredTensor::elements() const {
  std::uint64_t product = 1;
  for (const std::uint64_t n : shape) product *= n;
  return product;
}

std::optional<Dtype> StoredTensor::dtype() const { return safetensors_dtype(type); }

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

SafetensorsWriter::SafetensorsWriter(offload::IoService& io, allocator::Ledger& ledger,
                                     const std::string& path, SafetensorsHeader header,
                                     std::size_t buffer_bytes)
    : path_(path), header_(std::move(header)), file_(io.open(path, offload::OpenMode::kCreate)) {
  file_->allocate(round_up(header_.file_bytes(), kDiskBlock));
  buffer_ = allocator::Region(ledger, allocator::Purpose::kCheckpoint, buffer_bytes);
  behind_.emplace(*file_, buffer_.bytes().first(buffer_bytes));
  const std::string start = header_.bytes();
  append(std::as_bytes(std::span(start)));
}

SafetensorsWriter::~SafetensorsWriter() = default;

// The bytes stay in the processor's cache between the summing and the copying.
void SafetensorsWriter::append(std::span<const std::byte> bytes) {
  constexpr std::size_t kCached = 64 * kKiB;
  failed_ = true;  // until everything below is done
  while (!bytes.empty()) {
    const auto piece = bytes.first(std::min(bytes.size(), kCached));
    summer_.add(piece);
    behind_->add(piece);
    bytes = bytes.subspan(piece.size());
  }
  failed_ = false;
}

void SafetensorsWriter::write(const StoredTensor& tensor, std::uint64_t first_byte,
                              std::span<const std::byte> bytes) {
  if (failed_ || sum_)
    fail(ErrorCode::kState, "'{}' is written to after it {}", path_, failed_ ? "failed" : "was finished");
  if (first_byte > tensor.bytes() || bytes.size() > tensor.bytes() - first_byte)
    fail(ErrorCode::kInvalidArgument, "{} bytes at {} of tensor '{}' of '{}' were given, and it has {}",
         bytes.size(), first_byte, tensor.name, path_, tensor.bytes());
  go_to(header_.payload_offset() + tensor.begin + first_byte);
  append(bytes);
}

void SafetensorsWriter::go_to(std::uint64_t offset) {
  const std::uint64_t position = summer_.position();
  if (summer_.has_block(offset))
    fail(ErrorCode::kInvalidArgument, "the block at {} of '{}' was given a second time; each is written once",
         offset, path_);
  if (offset == position) return;
  const bool is_end = position % kStreamBlock == 0 || position == header_.file_bytes();
  if (offset % kStreamBlock != 0 || !is_end)
    fail(
        ErrorCode::kInvalidArgument,
        "bytes at {} of '{}' were given after those up to {}: the {} bytes of a block come one after another",
        offset, path_, position, kStreamBlock);
  behind_->go_to(offset);
  summer_.go_to(offset);
}

const FileSum& SafetensorsWriter::finish() {
  if (sum_) return *sum_;
  if (failed_) fail(ErrorCode::kState, "'{}' cannot be finished: writing it failed", path_);
  const std::uint64_t written = summer_.first_missing() - header_.payload_offset();
  for (const StoredTensor& tensor : header_.tensors())
    if (tensor.end > written)
      fail(ErrorCode::kState, "'{}' cannot be finished: tensor '{}' has {} of its {} bytes", path_,
           tensor.name, written > tensor.begin ? written - tensor.begin : 0, tensor.bytes());
  failed_ = true;  // until everything below is done
  behind_->finish();
  behind_.reset();
  const Descriptor file = open_file(path_, O_WRONLY);
  if (::ftruncate(file.get(), static_cast<off_t>(header_.file_bytes())) != 0) fail_system("finish", path_);
  buffer_ = {};
  failed_ = false;
  return sum_.emplace(summer_.finish());
}

}  // namespace sluice::engine
