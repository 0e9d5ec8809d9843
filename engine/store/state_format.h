#pragma once
#include <algorithm>
#include <cstddef>
#include <vector>

#include "core/bytes.h"
#include "core/dtype.h"
#include "engine/layout.h"
#include "offload/records.h"
#include "optim/optimizer.h"

namespace sluice::engine {

// What is kept for the elements of a trainable unit beside its parameters: the master, where the parameters'
// type is narrower and the optimizer keeps one, then the optimizer's arrays as it describes them. The arrays
// of a chunk lie side by side, codes followed by their scales; see docs/formats/swap.md. Elements are counted
// in multiples of kShardAlignment.
class StateFormat {
 public:
  StateFormat(const optim::Optimizer& optimizer, Dtype parameters) {
    if (parameters != Dtype::kF32 && optimizer.keeps_master()) arrays_.push_back({"master"});
    masters_ = arrays_.size();
    for (optim::StateArray& array : optimizer.state()) arrays_.push_back(std::move(array));
  }

  bool has_master() const { return masters_ > 0; }  // it is array 0 then
  std::size_t masters() const { return masters_; }  // 0 or 1: the first of the optimizer's arrays
  std::size_t arrays() const { return arrays_.size(); }
  const optim::StateArray& array(std::size_t index) const { return arrays_[index]; }

  // Of one chunk, or of consecutive ones of which all but the last have multiples of kChunkGrain.
  std::size_t bytes(std::size_t elements) const {
    return round_up(array_offset(elements, arrays_.size()), kDiskBlock);
  }
  double element_bytes() const {
    return static_cast<double>(array_offset(kChunkGrain, arrays_.size())) / static_cast<double>(kChunkGrain);
  }
  // Of the record: every chunk but the last of its unit is then a whole number of blocks.
  std::size_t block_bytes() const {
    std::size_t block = bytes(kChunkGrain);
    if (block % offload::RecordStore::kBlock == 0) return offload::RecordStore::kBlock;
    while (block / 2 >= offload::RecordStore::kBlock && block / 2 % kDiskBlock == 0) block /= 2;
    return block;
  }
  // An array's part from an element of a chunk on. first: where it has codes, a multiple of kScaleBlock.
  optim::StatePart part(std::byte* chunk, std::size_t elements, std::size_t index,
                        std::size_t first = 0) const {
    std::byte* const begin = chunk + array_offset(elements, index);
    optim::StatePart part = {Array{begin, arrays_[index].type}.at(first)};
    if (arrays_[index].type == Dtype::kU8)
      part.scales = reinterpret_cast<float*>(begin + elements) + first / optim::kScaleBlock;
    return part;
  }

 private:
  static std::size_t array_bytes(const optim::StateArray& array, std::size_t elements) {
    const std::size_t scales = array.type == Dtype::kU8 ? elements / optim::kScaleBlock : 0;
    return elements * size_of(array.type) + scales * sizeof(float);
  }
  std::size_t array_offset(std::size_t elements, std::size_t index) const {
    std::size_t offset = 0;
    for (std::size_t i = 0; i < index; ++i) offset += array_bytes(arrays_[i], elements);
    return offset;
  }

  std::vector<optim::StateArray> arrays_;
  std::size_t masters_ = 0;
};

// The formats of a model's units, whose parameters may be of several types.
class StateFormats {
 public:
  StateFormats(const Layout& layout, const optim::Optimizer& optimizer) {
    for (UnitId unit = 0; unit < layout.units().size(); ++unit) {
      formats_.emplace_back(optimizer, layout.dtype(unit));
      if (layout.trainable(unit)) any_master_ |= formats_.back().has_master();
    }
  }
  const StateFormat& of(UnitId unit) const { return formats_[unit]; }
  bool any_master() const { return any_master_; }
  // Of a chunk of any unit.
  std::size_t most_bytes(std::size_t elements) const {
    std::size_t most = 0;
    for (const StateFormat& format : formats_) most = std::max(most, format.bytes(elements));
    return most;
  }

 private:
  std::vector<StateFormat> formats_;
  bool any_master_ = false;
};

}  // namespace sluice::engine
