#pragma once
#include "engine/layout/layout.h"
#include "engine/memory/device_work.h"
#include "engine/memory/host_records.h"
#include "engine/memory/state_store.h"

namespace sluice::engine {

// Where the CPU fills in, or sees, a chunk of a unit whose values and state a GPU has: the state itself where
// that is in the host's memory, else registered memory of the host. State on disk passes through a slot on
// the GPU. Thread rule: one thread.
class HostStaging {
 public:
  HostStaging(StateStore& states, DeviceWork& gpu);
  static std::size_t bytes(const StateFormat& format);
  // Takes the memory. slot: room for the state of a chunk on the GPU, which others do not use while this
  // class does; null where all state is there.
  void start(allocator::Ledger& ledger, std::byte* slot);

  // Room for a chunk's state; or that state itself, where it is in the host's memory.
  std::byte* state(UnitId unit, std::size_t chunk) const {
    return is_here(unit) ? states_.cpu_data(unit) + states_.format().chunk_offset(unit, chunk)
                         : memory_.data();
  }
  Array values(Dtype type) const { return {memory_.data() + values_, type}; }
  float* scratch() const { return reinterpret_cast<float*>(memory_.data() + scratch_); }

  void begin(UnitId unit, std::size_t chunk);  // waits until the caller may fill in state() and values()
  void begin_values();                         // the same for values() alone
  // Waits until there is room for a chunk's state that the GPU does not get.
  std::byte* room();
  // Queue copies of what the caller has filled in: the state of a chunk, and n elements of values.
  void store_state(UnitId unit, std::size_t chunk);
  void store_values(Array to, std::size_t n);
  // Bring these, and wait until the caller may read them, and write the state.
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
  const std::size_t scratch_, values_;  // where they begin
  RegisteredRegion memory_;
  std::byte* slot_ = nullptr;
};

}  // namespace sluice::engine
