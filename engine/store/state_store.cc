#include "engine/store/state_store.h"

#include <utility>

namespace sluice::engine {

StateStore::StateStore(const Layout& layout, StateFormat format, const std::vector<bool>& resident,
                       offload::RecordStore* disk)
    : layout_(layout), format_(std::move(format)) {
  for (UnitId unit = 0; unit < layout.units().size(); ++unit) {
    const std::size_t bytes = format_.bytes(unit);
    Unit entry{bytes == 0 || resident[unit], resident_bytes_, 0};
    if (entry.resident)
      resident_bytes_ += bytes;
    else
      entry.record = disk->define("optimizer state of " + layout.units()[unit].name, bytes,
                                  allocator::Purpose::kOptimizerState, format_.block_bytes(unit));
    units_.push_back(entry);
  }
}

void StateStore::start(allocator::Ledger& ledger) {
  memory_ = allocator::Region(ledger, allocator::Purpose::kOptimizerState, resident_bytes_);
}

std::byte* StateStore::chunk_data(UnitId unit, std::size_t chunk) const {
  return memory_.data() + units_[unit].offset + format_.chunk_offset(unit, chunk);
}

}  // namespace sluice::engine
