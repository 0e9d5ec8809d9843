#pragma once
#include "engine/layout/layout.h"
#include "engine/memory/device_work.h"
#include "engine/memory/host_records.h"
#include "engine/memory/state_store.h"

namespace sluice::engine {

// Lets the CPU fill in or read a chunk of a unit whose values and state a GPU has: it gives the state itself
// where that is in host memory, else a buffer of registered host memory. State on disk passes through a slot
// on the GPU. Thread rule: one thread.
class HostStaging {
 public:
  HostStaging(StateStore& states, DeviceWork& gpu);
  static std::size_t bytes(const StateFormat& format);
  // Takes the memory. slot: GPU memory for the state of a chunk, which nobody else uses while this class
  // does; null where no state is on disk.
  void start(allocator::Ledger& ledger, std::byte* slot);

  // The buffer for a chunk's state; or the state itself, where it is in host memory.
  std::byte* state(UnitId unit, std::size_t chunk) const {
    return is_here(unit) ? states_.cpu_data(unit) + states_.format().chunk_offset(unit, chunk)
                         : memory_.data();
  }
  Array values(Dtype type) const { return {memory_.data() + values_, type}; }
  float* scratch() const { return reinterpret_cast<float*>(memory_.data() + scratch_); }

  void begin(UnitId unit, std::size_t chunk);  // waits until the caller may fill in state() and values()
  void begin_values();                         // the same for values() alone
  // Waits until the state buffer is free, for state that the GPU does not get.
  std::byte* room();
  // Queue copies of what the caller has filled in: the state of a chunk, or n elements of values.
  void store_state(UnitId unit, std::size_t chunk);
  void store_values(Array to, std::size_t n);
  // Bring a chunk's state, or n values, and wait until the caller may read them (and write the state).
  std::byte* bring_state(UnitId unit, std::size_t chunk);
  ConstArray bring_values(ConstArray from, std::size_t n);

 private:
  bool is_here(UnitId unit) const { return states_.cpu_data(unit) != nullptr; }
  void wait_for_state(UnitId unit, std::size_t chunk) const;
  DeviceWork::Memory place_of(UnitId unit, std::size_t chunk) const;
  template <class Transfer>
  void transfer(UnitId unit, std::size_t chunk, const Transfer& begin);

  StateStore& states_;
  DeviceWork& gpu_;
  const std::size_t scratch_, values_;  // their offsets in memory_
  RegisteredRegion memory_;
  std::byte* slot_ = nullptr;
};

}  // namespace sluice::engine
