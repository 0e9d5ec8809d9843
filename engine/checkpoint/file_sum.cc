#include "engine/checkpoint/file_sum.h"

#include <fmt/core.h>

#include <algorithm>
#include <bit>
#include <utility>

namespace sluice::engine {

static_assert(std::endian::native == std::endian::little, "the formats are little-endian");

std::uint64_t FileSum::checksum() const { return sluice::checksum(std::as_bytes(std::span(blocks))); }

void FileSummer::add(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const std::size_t room = kStreamBlock - sum_.bytes % kStreamBlock;
    const auto piece = bytes.first(std::min(bytes.size(), room));
    block_.add(piece);
    sum_.bytes += piece.size();
    if (piece.size() == room) end_block();
    bytes = bytes.subspan(piece.size());
  }
}

void FileSummer::end_block() {
  sum_.blocks.push_back(block_.value());
  block_ = Checksum();
}

FileSum FileSummer::finish() {
  if (sum_.bytes % kStreamBlock != 0) end_block();
  return std::exchange(sum_, {});
}

std::string to_hex(std::uint64_t value) { return fmt::format("{:016x}", value); }

}  // namespace sluice::engine
