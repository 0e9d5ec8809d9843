#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "allocator/ledger.h"
#include "allocator/memory.h"
#include "engine/layout.h"
#include "engine/store/state_format.h"
#include "offload/records.h"

namespace sluice::engine {

// The optimizer's state of every unit, in memory or on disk, in chunks: the arrays of a chunk (master, then
// the optimizer's own) lie side by side, so that a chunk is one read and one write. A frozen unit has none.
//   chunk c: [array 0: n elements][array 1: n elements]..., n = chunk_elements, fewer in the last chunk;
//   an array in codes: [n codes][n / kScaleBlock scales]
// The same layout in memory and on disk. Thread rule: as RecordStore.
class StateStore {
 public:
  StateStore(const Layout& layout, StateFormats formats, std::size_t chunk_elements,
             const std::vector<bool>& resident, offload::RecordStore* disk);
  void start(allocator::Ledger& ledger);  // takes the memory of what is resident

  // Gives that back, for good; nothing is read or written afterwards.
  void drop() { memory_ = {}; }
  std::size_t resident_bytes() const { return memory_.size(); }

  const StateFormats& formats() const { return formats_; }
  const StateFormat& format(UnitId unit) const { return formats_.of(unit); }
  std::size_t arrays(UnitId unit) const { return layout_.trainable(unit) ? format(unit).arrays() : 0; }
  // Whether its values are held in f32 beside its parameters.
  bool has_master(UnitId unit) const { return layout_.trainable(unit) && format(unit).has_master(); }
  std::size_t chunk_elements() const { return chunk_elements_; }
  std::size_t chunks(UnitId unit) const;
  std::size_t chunk_size(UnitId unit, std::size_t chunk) const;  // elements
  std::size_t chunk_bytes(UnitId unit, std::size_t chunk) const {
    return layout_.trainable(unit) ? format(unit).bytes(chunk_size(unit, chunk)) : 0;
  }
  std::size_t chunk_offset(UnitId unit, std::size_t chunk) const {
    return format(unit).bytes(chunk * chunk_elements_);
  }
  bool resident(UnitId unit) const { return units_[unit].resident; }           // also where it has no bytes
  std::byte* chunk_data(UnitId unit, std::size_t chunk) const;                 // REQUIRES: resident
  offload::RecordId record(UnitId unit) const { return units_[unit].record; }  // REQUIRES: not resident

 private:
  struct Unit {
    bool resident = true;
    std::size_t offset = 0;  // in memory
    offload::RecordId record = 0;
  };
  const Layout& layout_;
  StateFormats formats_;
  std::size_t chunk_elements_, resident_bytes_ = 0;
  std::vector<Unit> units_;
  allocator::Region memory_;
};

}  // namespace sluice::engine
