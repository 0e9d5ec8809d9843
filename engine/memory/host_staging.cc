#include "engine/memory/host_staging.h"

#include "core/bytes.h"

namespace sluice::engine {
namespace {

std::size_t scratch_bytes(const StateFormat& format) {
  return round_up(format.shards().chunk_elements() * sizeof(float), kDiskBlock);
}
std::size_t state_bytes(const StateFormat& format) { return round_up(format.most_chunk_bytes(), kDiskBlock); }

}  // namespace

HostStaging::HostStaging(StateStore& states, DeviceWork& gpu)
    : states_(states),
      gpu_(gpu),
      scratch_(state_bytes(states.format())),
      values_(scratch_ + scratch_bytes(states.format())) {}

// Values have at most the size of the scratch memory, which is f32.
std::size_t HostStaging::bytes(const StateFormat& format) {
  return state_bytes(format) + 2 * scratch_bytes(format);
}

void HostStaging::start(allocator::Ledger& ledger, std::byte* slot) {
  slot_ = slot;
  const std::size_t size = bytes(states_.format());
  memory_ = RegisteredRegion(ledger, gpu_.device(), allocator::Purpose::kStaging, size);
  if (scratch_ > 0) gpu_.add({memory_.data(), scratch_}, scratch_);
  gpu_.add({memory_.data() + values_, size - values_}, size - values_);
}

// The GPU may still be copying the buffer's former contents, perhaps of another unit.
void HostStaging::wait_for_state(UnitId unit, std::size_t chunk) const {
  const bool is_cpus = states_.by_cpu(unit) && states_.resident(unit);  // the GPU never uses such state
  if (const std::size_t bytes = states_.format().chunk_bytes(unit, chunk); bytes > 0 && !is_cpus)
    gpu_.wait({state(unit, chunk), bytes}, DeviceWork::Use::kWrite);
}

void HostStaging::begin(UnitId unit, std::size_t chunk) {
  wait_for_state(unit, chunk);
  begin_values();
}

std::byte* HostStaging::room() {
  if (scratch_ > 0) gpu_.wait({memory_.data(), scratch_}, DeviceWork::Use::kWrite);
  return memory_.data();
}

void HostStaging::begin_values() { gpu_.wait({memory_.data() + values_, 1}, DeviceWork::Use::kWrite); }

DeviceWork::Memory HostStaging::place_of(UnitId unit, std::size_t chunk) const {
  std::byte* const passing = states_.by_cpu(unit) ? memory_.data() : slot_;
  return {states_.resident(unit) ? states_.chunk_data(unit, chunk) : passing,
          states_.format().chunk_bytes(unit, chunk)};
}

template <class Transfer>
void HostStaging::transfer(UnitId unit, std::size_t chunk, const Transfer& begin) {
  if (states_.resident(unit)) return;
  TransferGroup group;
  begin(states_.backing(unit), states_.format().chunk_offset(unit, chunk), group.add());
  group.wait();
}

void HostStaging::store_state(UnitId unit, std::size_t chunk) {
  if (states_.format().chunk_bytes(unit, chunk) == 0 || is_here(unit)) return;
  const DeviceWork::Memory to = place_of(unit, chunk);
  if (to.data() != memory_.data())
    gpu_.copy_in(const_cast<std::byte*>(to.data()), {memory_.data(), to.size()});
  transfer(unit, chunk, [&](Backing& backing, std::size_t offset, Done done) {
    backing.store(offset, to, std::move(done));
  });
}

void HostStaging::store_values(Array to, std::size_t n) {
  gpu_.copy_in(static_cast<std::byte*>(to.data), {memory_.data() + values_, n * size_of(to.type)});
}

std::byte* HostStaging::bring_state(UnitId unit, std::size_t chunk) {
  wait_for_state(unit, chunk);
  if (states_.format().chunk_bytes(unit, chunk) == 0 || is_here(unit)) return state(unit, chunk);
  const DeviceWork::Memory from = place_of(unit, chunk);
  transfer(unit, chunk, [&](Backing& backing, std::size_t offset, Done done) {
    backing.fetch(offset, {const_cast<std::byte*>(from.data()), from.size()}, std::move(done));
  });
  if (from.data() == memory_.data()) return memory_.data();
  gpu_.copy_out(memory_.data(), from);
  gpu_.wait({memory_.data(), from.size()}, DeviceWork::Use::kRead);
  return memory_.data();
}

ConstArray HostStaging::bring_values(ConstArray from, std::size_t n) {
  const DeviceWork::Memory bytes{static_cast<const std::byte*>(from.data), n * size_of(from.type)};
  gpu_.copy_out(memory_.data() + values_, bytes);
  gpu_.wait({memory_.data() + values_, bytes.size()}, DeviceWork::Use::kRead);
  return {memory_.data() + values_, from.type};
}

}  // namespace sluice::engine
