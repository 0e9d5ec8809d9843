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

// Files of a checkpoint are read in blocks of this size, and each block has a checksum.
inline constexpr std::size_t kStreamBlock = 4 * kMiB;

// The checksums of a checkpoint's file: see docs/formats/checkpoint.md.
struct FileSum {
  std::uint64_t bytes = 0;
  std::vector<std::uint64_t> blocks;  // XXH3 of each block; the last block may be shorter
  std::uint64_t checksum() const;     // XXH3 of the checksums of the blocks
  bool operator==(const FileSum&) const = default;
};

// Computes the FileSum of a file. Blocks come in any order, and the bytes of each block one after another.
class FileSummer {
 public:
  void add(std::span<const std::byte> bytes);  // adds bytes at the position, and advances it
  std::uint64_t position() const { return position_; }
  // Whether the block that begins at this byte has a sum.
  bool has_block(std::uint64_t first_byte) const;
  // Moves the position to the first byte of another block. REQUIRES: the position is at the first byte of a
  // block, or at the end of the file, and the other block has no sum yet.
  void go_to(std::uint64_t first_byte);
  std::uint64_t first_missing() const;  // the first byte that was not added
  // Returns the sum of everything added, and begins anew. REQUIRES: no byte before the last one is missing.
  FileSum finish();

 private:
  std::uint64_t position_ = 0, bytes_ = 0;  // bytes_: the end of what was added
  std::vector<std::optional<std::uint64_t>> blocks_;
  Checksum block_;  // of the block at the position, up to the position
};

std::string to_hex(std::uint64_t value);  // 16 digits

}  // namespace sluice::engine
