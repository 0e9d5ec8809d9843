#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/bytes.h"
#include "core/checksum.h"

namespace sluice::engine {

// Files of a checkpoint are read, and have checksums, in blocks of this length.
inline constexpr std::size_t kStreamBlock = 4 * kMiB;

// What a file of a checkpoint holds, for comparison: see docs/formats/checkpoint.md.
struct FileSum {
  std::uint64_t bytes = 0;
  std::vector<std::uint64_t> blocks;  // XXH3 of each kStreamBlock bytes, the last block may be shorter
  std::uint64_t checksum() const;     // XXH3 of the block checksums
  bool operator==(const FileSum&) const = default;
};

// The FileSum of a file whose blocks come in any order, and the bytes of a block one after another.
class FileSummer {
 public:
  void add(std::span<const std::byte> bytes);  // at the position, which goes on
  std::uint64_t position() const { return position_; }
  // The position is another block's first byte from now on. REQUIRES: it is now at a block's first byte, or
  // at the file's end.
  void go_to(std::uint64_t first_byte);
  std::uint64_t first_missing() const;  // the first byte that was not added
  // The sum of everything added; begins anew. REQUIRES: no byte is missing before the last one.
  FileSum finish();

 private:
  std::uint64_t position_ = 0, bytes_ = 0;  // bytes_: up to the last one that was added
  std::vector<std::optional<std::uint64_t>> blocks_;
  Checksum block_;  // of the position's block, up to the position
};

std::string to_hex(std::uint64_t value);  // 16 digits

}  // namespace sluice::engine
