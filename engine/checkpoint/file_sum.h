#pragma once
#include <cstddef>
#include <cstdint>
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

// The FileSum of bytes that come in pieces.
class FileSummer {
 public:
  void add(std::span<const std::byte> bytes);
  FileSum finish();  // the sum of everything added; begins anew

 private:
  FileSum sum_;
  Checksum block_;
};

std::string to_hex(std::uint64_t value);  // 16 digits

}  // namespace sluice::engine
