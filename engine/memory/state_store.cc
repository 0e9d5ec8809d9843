#include "engine/memory/state_store.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <utility>

#include "core/error.h"

namespace sluice::engine {

StateStore::StateStore(const Layout& layout, StateFormat format, const std::vector<allocator::Tier>& tiers,
                       Backings& backings, DeviceWork* gpu, std::vector<bool> by_cpu)
    : layout_(layout),
      format_(std::move(format)),
      gpu_(gpu),
      by_cpu_(std::move(by_cpu)),
      backings_(backings) {
  for (UnitId unit = 0; unit < layout.units().size(); ++unit) {
    const std::size_t bytes = format_.bytes(unit);
    std::size_t& end = this->by_cpu(unit) ? cpu_bytes_ : resident_bytes_;
    units_.push_back({bytes == 0 || tiers[unit] == updated_on(unit), end, false, {}});
    if (units_.back().resident)
      end += bytes;
    else
      define_backing(unit, tiers[unit]);
  }
}

void StateStore::start(allocator::Ledger& ledger) {
  // The most bytes that a later plan may keep in memory.
  std::size_t most = 0;
  for (UnitId unit = 0; unit < units_.size(); ++unit) most += format_.bytes(unit);
  memory_ = ComputeRegion(ledger, gpu_, allocator::Purpose::kOptimizerState, resident_bytes_, most);
  cpu_memory_ = ComputeRegion(ledger, nullptr, allocator::Purpose::kOptimizerState, cpu_bytes_);
  for (UnitId unit = 0; gpu_ != nullptr && unit < units_.size(); ++unit)
    if (units_[unit].resident && format_.bytes(unit) > 0 && !by_cpu(unit))
      gpu_->add({data(unit), format_.bytes(unit)}, format_.bytes(unit));
}

bool StateStore::define_backing(UnitId unit, allocator::Tier tier) {
  if (units_[unit].backing || format_.bytes(unit) == 0 || tier == updated_on(unit)) return false;
  units_[unit].backing = backings_.make({.tier = tier,
                                         .name = "optimizer state of " + layout_.units()[unit].name,
                                         .bytes = format_.bytes(unit),
                                         .purpose = allocator::Purpose::kOptimizerState,
                                         .block_bytes = format_.block_bytes(unit),
                                         .for_cpu = by_cpu(unit)});
  return true;
}

void StateStore::forget_backing(UnitId unit) { units_[unit].backing.reset(); }

void StateStore::transfer_all(UnitId unit, bool write) {
  const std::span<std::byte> bytes = {data(unit), format_.bytes(unit)};
  TransferGroup transfer;
  if (write)
    backing(unit).store(0, bytes, transfer.add());
  else
    backing(unit).fetch(0, bytes, transfer.add());
  transfer.wait();
}

// Compacts what stays, in the order of its offsets.
void StateStore::leave_memory(const std::vector<allocator::Tier>& tiers, const std::function<void()>& moved) {
  std::vector<UnitId> staying;
  for (UnitId unit = 0; unit < units_.size(); ++unit) {
    if (format_.bytes(unit) == 0 || !units_[unit].resident) continue;
    units_[unit].resident = tiers[unit] == tier_of(gpu_);
    if (units_[unit].resident) {
      staying.push_back(unit);
      continue;
    }
    transfer_all(unit, true);
    moved();
  }
  std::sort(staying.begin(), staying.end(),
            [&](UnitId a, UnitId b) { return units_[a].offset < units_[b].offset; });
  resident_bytes_ = 0;
  for (const UnitId unit : staying) {
    std::byte* const to = memory_.data() + resident_bytes_;
    std::memmove(to, memory_.data() + units_[unit].offset, format_.bytes(unit));
    units_[unit].offset = resident_bytes_;
    resident_bytes_ += format_.bytes(unit);
  }
  memory_.resize(resident_bytes_);
}

void StateStore::enter_memory(const std::vector<allocator::Tier>& tiers, const std::function<void()>& moved) {
  std::vector<UnitId> entering;
  for (UnitId unit = 0; unit < units_.size(); ++unit) {
    if (tiers[unit] != tier_of(gpu_) || units_[unit].resident) continue;
    units_[unit].offset = resident_bytes_;
    resident_bytes_ += format_.bytes(unit);
    entering.push_back(unit);
  }
  memory_.resize(resident_bytes_);
  for (const UnitId unit : entering) {
    transfer_all(unit, false);
    units_[unit].resident = true;
    moved();
  }
}

std::byte* StateStore::cpu_data(UnitId unit) const {
  if (!units_[unit].resident) return backing(unit).for_cpu().data;
  return updated_on(unit) == kCpuTier ? data(unit) : nullptr;
}

bool StateStore::begin_filling(UnitId unit) {
  return !std::exchange(units_[unit].is_filled, true) && cpu_data(unit) != nullptr;
}

std::byte* StateStore::chunk_data(UnitId unit, std::size_t chunk) const {
  return data(unit) + format_.chunk_offset(unit, chunk);
}

}  // namespace sluice::engine
