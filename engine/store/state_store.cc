#include "engine/store/state_store.h"

#include <algorithm>
#include <utility>

#include "core/bytes.h"

namespace sluice::engine {

StateStore::StateStore(const Layout& layout, StateFormats formats, std::size_t chunk_elements,
                       const std::vector<bool>& resident, offload::RecordStore* disk)
    : layout_(layout), formats_(std::move(formats)), chunk_elements_(chunk_elements) {
  for (UnitId unit = 0; unit < layout.units().size(); ++unit) {
    const std::size_t bytes = layout.trainable(unit) ? format(unit).bytes(layout.unit_elements(unit)) : 0;
    Unit entry{bytes == 0 || resident[unit], resident_bytes_, 0};
    if (entry.resident)
      resident_bytes_ += bytes;
    else
      entry.record = disk->define("optimizer state of " + layout.units()[unit].name, bytes,
                                  allocator::Purpose::kOptimizerState, format(unit).block_bytes());
    units_.push_back(entry);
  }
}

void StateStore::start(allocator::Ledger& ledger) {
  memory_ = allocator::Region(ledger, allocator::Purpose::kOptimizerState, resident_bytes_);
}

std::size_t StateStore::chunks(UnitId unit) const {
  return divide_up(layout_.unit_elements(unit), chunk_elements_);
}

std::size_t StateStore::chunk_size(UnitId unit, std::size_t chunk) const {
  return std::min(chunk_elements_, layout_.unit_elements(unit) - chunk * chunk_elements_);
}

std::byte* StateStore::chunk_data(UnitId unit, std::size_t chunk) const {
  return memory_.data() + units_[unit].offset + chunk_offset(unit, chunk);
}

}  // namespace sluice::engine
