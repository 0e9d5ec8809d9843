#include "engine/checkpoint/file_sum.h"

#include <fmt/core.h>

#include <algorithm>
#include <bit>
#include <utility>

#include "core/error.h"

namespace sluice::engine {

static_assert(std::endian::native == std::endian::little, "the formats are little-endian");

std::uint64_t FileSum::checksum() const { return sluice::checksum(std::as_bytes(std::span(blocks))); }

void FileSummer::add(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const std::size_t room = kStreamBlock - position_ % kStreamBlock;
    const auto piece = bytes.first(std::min(bytes.size(), room));
    block_.add(piece);
    const std::size_t block = position_ / kStreamBlock;
    if (blocks_.size() <= block) blocks_.resize(block + 1);
    position_ += piece.size();
    bytes_ = std::max(bytes_, position_);
    // The last block of a file may end anywhere, so its sum so far counts.
    if (piece.size() == room || position_ == bytes_) blocks_[block] = block_.value();
    if (piece.size() == room) block_ = Checksum();
    bytes = bytes.subspan(piece.size());
  }
}

bool FileSummer::has_block(std::uint64_t first_byte) const {
  const std::size_t block = first_byte / kStreamBlock;
  return first_byte % kStreamBlock == 0 && block < blocks_.size() && blocks_[block].has_value();
}

void FileSummer::go_to(std::uint64_t first_byte) {
  ensure((position_ % kStreamBlock == 0 || position_ == bytes_) && first_byte % kStreamBlock == 0,
         "a checksum moves from byte {} to byte {}, which is within a block", position_, first_byte);
  ensure(!has_block(first_byte), "the block at byte {} is summed a second time", first_byte);
  position_ = first_byte;
  block_ = Checksum();
}

std::uint64_t FileSummer::first_missing() const {
  const auto missing = std::ranges::find_if(blocks_, [](const auto& block) { return !block.has_value(); });
  return missing == blocks_.end() ? bytes_
                                  : static_cast<std::uint64_t>(missing - blocks_.begin()) * kStreamBlock;
}

FileSum FileSummer::finish() {
  ensure(first_missing() == bytes_, "a checksum is finished without the block at byte {}", first_missing());
  FileSum sum{bytes_, {}};
  for (const auto& block : blocks_) sum.blocks.push_back(*block);
  *this = {};
  return sum;
}

std::string to_hex(std::uint64_t value) { return fmt::format("{:016x}", value); }

}  // namespace sluice::engine
