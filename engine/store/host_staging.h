#pragma once
#include "engine/layout.h"
#include "engine/store/device_work.h"
#include "engine/store/host_records.h"
#include "engine/store/state_store.h"

namespace sluice::engine {

// Where the CPU fills in, or sees, a chunk of a unit whose values and state a GPU has: registered memory of
// the host. State that is not on the GPU passes through a slot there. Thread rule: one thread.
class HostStaging {
 public:
  HostStaging(StateStore& states, DeviceWork& gpu);
  static std::size_t bytes(const StateFormat& format);
  // Takes the memory. slot: room for the state of a chunk on the GPU, which others do not use while this
  // class does; null where all state is there.
  void start(allocator::Ledger& ledger, std::byte* slot);

  // Room for a chunk's state; or that state itself, where it is in the CPU's own memory.
  std::byte* state(UnitId unit, std::size_t chunk) const {
    return is_here(unit) ? states_.chunk_data(unit, chunk) : memory_.data();
  }
  Array values(Dtype type) const { return {memory_.data() + values_, type}; }
  float* scratch() const { return reinterpret_cast<float*>(memory_.data() + scratch_); }

  void begin();  // waits until the caller may fill in state() and values()
  // Queue copies of what the caller has filled in: the state of a chunk, and n elements of values.
  void store_state(UnitId unit, std::size_t chunk);
  void store_values(Array to, std::size_t n);
  // Bring these, and wait until the caller may read them.
  std::byte* bring_state(UnitId unit, std::size_t chunk);
  ConstArray bring_values(ConstArray from, std::size_t n);

 private:
  bool is_here(UnitId unit) const { return states_.by_cpu(unit) && states_.resident(unit); }
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
