#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "allocator/ledger.h"
#include "allocator/memory.h"
#include "engine/layout.h"
#include "engine/store/backing.h"
#include "engine/store/state_format.h"

namespace sluice::engine {

// The optimizer's state of every unit, resident or in a backing, in chunks: the arrays of a chunk (master,
// then the optimizer's own) lie side by side, so that a chunk is one fetch and one store. A frozen unit has
// none. StateFormat says where. The same layout in memory and in a backing. Thread rule: as Backing.
class StateStore {
 public:
  // tiers: of each unit. backings outlive it.
  StateStore(const Layout& layout, StateFormat format, const std::vector<allocator::Tier>& tiers,
             Backings& backings);
  void start(allocator::Ledger& ledger);  // takes the memory of what is resident

  // Another plan: what is to be no longer resident has a backing before. First all that leaves memory, then
  // what enters it. REQUIRES: nothing is under way; every unit has been written.
  // false: it has one, or needs none. Before Backings::allocate()
  bool define_backing(UnitId unit, allocator::Tier tier);
  void forget_backing(UnitId unit);  // which could not be allocated
  void leave_memory(const std::vector<allocator::Tier>& tiers);
  void enter_memory(const std::vector<allocator::Tier>& tiers);

  // Gives that back, for good; nothing is read or written afterwards.
  void drop() { memory_ = {}; }
  std::size_t resident_bytes() const { return memory_.size(); }

  const StateFormat& format() const { return format_; }
  bool has_master(UnitId unit) const { return format_.has_master(unit); }
  std::size_t arrays(UnitId unit) const { return layout_.trainable(unit) ? format_.arrays() : 0; }
  bool resident(UnitId unit) const { return units_[unit].resident; }     // also where it has no bytes
  std::byte* chunk_data(UnitId unit, std::size_t chunk) const;           // REQUIRES: resident
  Backing& backing(UnitId unit) const { return *units_[unit].backing; }  // REQUIRES: not resident

 private:
  struct Unit {
    bool resident = true;
    std::size_t offset = 0;            // in memory
    std::unique_ptr<Backing> backing;  // of a resident one: from a plan before this one
  };
  void transfer_all(UnitId unit, bool write);

  const Layout& layout_;
  StateFormat format_;
  std::size_t resident_bytes_ = 0;
  std::vector<Unit> units_;
  allocator::Region memory_;
  Backings& backings_;
};

}  // namespace sluice::engine
