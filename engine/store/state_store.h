#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
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
// StateFormat says where. The same layout in memory and on disk. Thread rule: as RecordStore.
class StateStore {
 public:
  StateStore(const Layout& layout, StateFormat format, const std::vector<bool>& resident,
             offload::RecordStore* disk);
  void start(allocator::Ledger& ledger);  // takes the memory of what is resident

  // Another plan: what is to be no longer in memory has a record before. First all that leaves memory, then
  // what enters it. REQUIRES: nothing is under way; every unit has been written.
  bool define_record(UnitId unit);  // false: it has one, or needs none. Before RecordStore::allocate()
  void forget_record(UnitId unit);  // which could not be allocated
  void leave_memory(const std::vector<bool>& resident);
  void enter_memory(const std::vector<bool>& resident);

  // Gives that back, for good; nothing is read or written afterwards.
  void drop() { memory_ = {}; }
  std::size_t resident_bytes() const { return memory_.size(); }

  const StateFormat& format() const { return format_; }
  bool has_master(UnitId unit) const { return format_.has_master(unit); }
  std::size_t arrays(UnitId unit) const { return layout_.trainable(unit) ? format_.arrays() : 0; }
  bool resident(UnitId unit) const { return units_[unit].resident; }            // also where it has no bytes
  std::byte* chunk_data(UnitId unit, std::size_t chunk) const;                  // REQUIRES: resident
  offload::RecordId record(UnitId unit) const { return *units_[unit].record; }  // REQUIRES: not resident

 private:
  struct Unit {
    bool resident = true;
    std::size_t offset = 0;                   // in memory
    std::optional<offload::RecordId> record;  // of a resident one: from a plan before this one
  };
  void transfer_all(UnitId unit, bool write);

  const Layout& layout_;
  StateFormat format_;
  std::size_t resident_bytes_ = 0;
  std::vector<Unit> units_;
  allocator::Region memory_;
  offload::RecordStore* disk_;
};

}  // namespace sluice::engine
