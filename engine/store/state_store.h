#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "allocator/ledger.h"
#include "allocator/memory.h"
#include "engine/layout.h"
#include "offload/records.h"

namespace sluice::engine {

// The optimizer's state of every unit, in memory or on disk, in chunks: the arrays of a chunk (master, then
// the optimizer's own) lie side by side, so that a chunk is one read and one write. All arrays are f32. A
// frozen unit has none.
//   chunk c: [array 0: n elements][array 1: n elements]..., n = chunk_elements, fewer in the last chunk
// The same layout in memory and on disk. Thread rule: as RecordStore.
class StateStore {
 public:
  StateStore(const Layout& layout, std::size_t arrays, std::size_t chunk_elements,
             const std::vector<bool>& resident, offload::RecordStore* disk);
  void start(allocator::Ledger& ledger);  // takes the memory of what is resident

  std::size_t arrays() const { return arrays_; }  // of a trainable unit; a frozen one has none
  std::size_t arrays(UnitId unit) const { return layout_.trainable(unit) ? arrays_ : 0; }
  std::size_t chunk_elements() const { return chunk_elements_; }
  std::size_t chunks(UnitId unit) const;
  std::size_t chunk_size(UnitId unit, std::size_t chunk) const;  // elements
  std::size_t chunk_bytes(UnitId unit, std::size_t chunk) const {
    return chunk_size(unit, chunk) * arrays(unit) * sizeof(float);
  }
  std::size_t chunk_offset(std::size_t chunk) const {
    return chunk * chunk_elements_ * arrays_ * sizeof(float);
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
  std::size_t arrays_, chunk_elements_, resident_bytes_ = 0;
  std::vector<Unit> units_;
  allocator::Region memory_;
};

}  // namespace sluice::engine
