#include "engine/store/state_store.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <utility>

#include "core/error.h"

namespace sluice::engine {

StateStore::StateStore(const Layout& layout, StateFormat format, const std::vector<bool>& resident,
                       offload::RecordStore* disk)
    : layout_(layout), format_(std::move(format)), disk_(disk) {
  for (UnitId unit = 0; unit < layout.units().size(); ++unit) {
    const std::size_t bytes = format_.bytes(unit);
    units_.push_back({bytes == 0 || resident[unit], resident_bytes_, {}});
    if (units_.back().resident)
      resident_bytes_ += bytes;
    else
      define_record(unit);
  }
}

void StateStore::start(allocator::Ledger& ledger) {
  std::size_t most = 0;  // that another plan may ask for
  for (UnitId unit = 0; unit < units_.size(); ++unit) most += format_.bytes(unit);
  memory_ = allocator::Region(ledger, allocator::Purpose::kOptimizerState, resident_bytes_, most);
}

bool StateStore::define_record(UnitId unit) {
  if (units_[unit].record || format_.bytes(unit) == 0) return false;
  ensure(disk_ != nullptr, "the plan puts the state of '{}' on disk, and there is no disk tier",
         layout_.units()[unit].name);
  units_[unit].record = disk_->define("optimizer state of " + layout_.units()[unit].name, format_.bytes(unit),
                                      allocator::Purpose::kOptimizerState, format_.block_bytes(unit));
  return true;
}

void StateStore::forget_record(UnitId unit) { units_[unit].record.reset(); }

void StateStore::transfer_all(UnitId unit, bool write) {
  const std::span<std::byte> bytes = {memory_.data() + units_[unit].offset, format_.bytes(unit)};
  offload::Batch batch;
  write ? disk_->write(record(unit), 0, bytes, batch.add())
        : disk_->read(record(unit), 0, bytes, batch.add());
  batch.wait();
}

// Those that stay close up, in the order in which they lie.
void StateStore::leave_memory(const std::vector<bool>& resident) {
  std::vector<UnitId> staying;
  for (UnitId unit = 0; unit < units_.size(); ++unit) {
    if (format_.bytes(unit) == 0 || !units_[unit].resident) continue;
    if (resident[unit])
      staying.push_back(unit);
    else
      transfer_all(unit, true);
    units_[unit].resident = resident[unit];
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

void StateStore::enter_memory(const std::vector<bool>& resident) {
  std::vector<UnitId> entering;
  for (UnitId unit = 0; unit < units_.size(); ++unit) {
    if (!resident[unit] || units_[unit].resident) continue;
    units_[unit].offset = resident_bytes_;
    resident_bytes_ += format_.bytes(unit);
    entering.push_back(unit);
  }
  memory_.resize(resident_bytes_);
  for (const UnitId unit : entering) {
    transfer_all(unit, false);
    units_[unit].resident = true;
  }
}

std::byte* StateStore::chunk_data(UnitId unit, std::size_t chunk) const {
  return memory_.data() + units_[unit].offset + format_.chunk_offset(unit, chunk);
}

}  // namespace sluice::engine
