#pragma once
#include <cstddef>
#include <cstdint>
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

// Computes the FileSum of a file, whose bytes come one after another.
class FileSummer {
 public:
  void add(std::span<const std::byte> bytes);
  FileSum finish();  // returns the sum of everything added, and begins anew

 private:
  void end_block();

  FileSum sum_;
  Checksum block_;  // of the bytes of the last block so far
};

std::string to_hex(std::uint64_t value);  // 16 digits

}  // namespace sluice::engine
