#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "allocator/ledger.h"
#include "allocator/memory.h"
#include "engine/layout/layout.h"
#include "engine/layout/state_format.h"
#include "engine/memory/backing.h"
#include "engine/memory/compute_region.h"

namespace sluice::engine {

// The optimizer state of every trainable unit, resident or in a backing, in the same layout (StateFormat):
// the arrays of a chunk are adjacent, so that a chunk is one fetch and one store. Thread rule: as Backing.
class StateStore {
 public:
  // tiers: by unit; state on the tier of its update is resident. gpu: null where the CPU computes all; else
  // by_cpu names the units that the CPU updates. backings and gpu outlive it.
  StateStore(const Layout& layout, StateFormat format, const std::vector<allocator::Tier>& tiers,
             Backings& backings, DeviceWork* gpu = nullptr, std::vector<bool> by_cpu = {});
  void start(allocator::Ledger& ledger);  // takes the memory of resident state

  // A change of plan. State that ceases to be resident gets a backing first; then leave_memory() writes what
  // leaves, and enter_memory() reads what enters. REQUIRES: no transfer is in flight, and every unit has been
  // written. define_backing() returns false where a backing exists or none is needed. REQUIRES: before
  // Backings::allocate().
  bool define_backing(UnitId unit, allocator::Tier tier);
  void forget_backing(UnitId unit);  // drops a backing that could not be allocated
  // `moved` is called after each unit.
  void leave_memory(const std::vector<allocator::Tier>& tiers, const std::function<void()>& moved);
  void enter_memory(const std::vector<allocator::Tier>& tiers, const std::function<void()>& moved);

  // Gives back the memory. REQUIRES: nothing is read or written afterwards.
  void drop() { memory_ = {}; }
  std::size_t resident_bytes() const { return memory_.size(); }

  const StateFormat& format() const { return format_; }
  bool has_master(UnitId unit) const { return format_.has_master(unit); }
  std::size_t arrays(UnitId unit) const { return layout_.trainable(unit) ? format_.arrays() : 0; }
  // Whether the CPU updates the unit, where a GPU computes with it.
  bool by_cpu(UnitId unit) const { return gpu_ != nullptr && !by_cpu_.empty() && by_cpu_[unit]; }
  bool resident(UnitId unit) const { return units_[unit].resident; }  // true also where it has no bytes
  std::byte* chunk_data(UnitId unit, std::size_t chunk) const;        // REQUIRES: resident
  // The address of the unit's state for the CPU; null where it is in GPU memory or on disk.
  std::byte* cpu_data(UnitId unit) const;
  // Call before filling in a unit's state. Returns whether all of it is still zero, as the system gave the
  // memory.
  bool begin_filling(UnitId unit);
  Backing& backing(UnitId unit) const { return *units_[unit].backing; }  // REQUIRES: not resident

 private:
  struct UnitState {
    bool resident = true;
    std::size_t offset = 0;  // in memory_ or cpu_memory_
    bool is_filled = false;
    std::unique_ptr<Backing> backing;  // an earlier plan's may remain while it is resident
  };
  allocator::Tier updated_on(UnitId unit) const { return by_cpu(unit) ? kCpuTier : tier_of(gpu_); }
  std::byte* data(UnitId unit) const {
    return (by_cpu(unit) ? cpu_memory_ : memory_).data() + units_[unit].offset;
  }
  void transfer_all(UnitId unit, bool write);

  const Layout& layout_;
  StateFormat format_;
  DeviceWork* const gpu_;
  const std::vector<bool> by_cpu_;
  std::size_t resident_bytes_ = 0, cpu_bytes_ = 0;
  std::vector<UnitState> units_;
  ComputeRegion memory_;
  ComputeRegion cpu_memory_;  // host memory, for units that the CPU updates and a GPU computes with
  Backings& backings_;
};

}  // namespace sluice::engine
