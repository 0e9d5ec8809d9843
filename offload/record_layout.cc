#include "offload/record_layout.h"

#include <algorithm>

#include "core/bytes.h"

namespace sluice::offload {

std::size_t RecordExtents::blocks() const { return divide_up(bytes, block_bytes); }

RecordExtents::BlockExtent RecordExtents::block(std::size_t index) const {
  const std::size_t files = offsets.size();
  const std::size_t file = (first_file + index) % files;
  const std::uint64_t begin = std::uint64_t{index} * block_bytes;
  return {file, offsets[file] + index / files * block_bytes,
          static_cast<std::size_t>(std::min<std::uint64_t>(block_bytes, bytes - begin))};
}

RecordExtents RecordLayout::add(std::uint64_t bytes, std::size_t block_bytes) {
  RecordExtents result{bytes, block_bytes, next_file_, taken_};
  for (std::size_t i = 0; i < result.blocks(); ++i) {
    const RecordExtents::BlockExtent block = result.block(i);
    taken_[block.file] += block.bytes;
  }
  next_file_ = (next_file_ + result.blocks()) % taken_.size();  // so that small records spread, too
  return result;
}

}  // namespace sluice::offload
