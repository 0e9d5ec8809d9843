#include <array>
#include <utility>

#include "core/bytes.h"
#include "core/error.h"
#include "engine/memory/holding.h"
#include "engine/memory/pager.h"

// What the pager takes before its first access: frames, homes and the memory of packed holdings.
namespace sluice::engine {

void Pager::make_homes() {
  std::vector<Holding*> group;  // holdings whose homes adjoin
  const auto make_group = [&] {
    std::vector<allocator::Home::Part> parts;
    for (const Holding* holding : group) parts.push_back({holding->spec.name, holding->spec.bytes});
    if (group.empty()) return;
    std::vector<allocator::Home> homes = allocator::Home::adjoining(parts);
    for (std::size_t i = 0; i < group.size(); ++i) group[i]->home = std::move(homes[i]);
    group.clear();
  };
  if (gpu_ != nullptr) return make_device_homes();
  for (const auto& holding : holdings_) {
    if (holding->in_region()) continue;
    if (!holding->spec.adjoins) make_group();
    group.push_back(holding.get());
    if (holding->spec.exposed) holding->hidden = allocator::Home(holding->spec.name, holding->spec.bytes);
  }
  make_group();
}

void Pager::start(std::size_t extent_bytes, std::size_t extents) {
  std::size_t taken = extents, small = 0;
  // The most extents that another plan may need.
  std::size_t most = 0;
  for (const auto& holding : holdings_) {
    const HoldingSpec& spec = holding->spec;
    if (holding->in_shared_pages()) {
      if (spec.exposed) small += packed_exposed_bytes(spec.bytes) / allocator::kSmallestExtent;
      continue;
    }
    most += divide_up(spec.bytes, extent_bytes);
    if (holding->resident() && spec.exposed) taken += divide_up(spec.bytes, extent_bytes);
  }
  if (gpu_ != nullptr && taken > 0)
    device_pool_ = std::make_unique<allocator::DeviceFramePool>(ledger_, gpu_->device(), extent_bytes, taken);
  else if (taken > 0)
    pool_ = std::make_unique<allocator::FramePool>(ledger_, extent_bytes, taken, most);
  if (small > 0)
    small_pool_ = std::make_unique<allocator::FramePool>(ledger_, allocator::kSmallestExtent, small);
  make_homes();
  take_packed();
  for (auto& holding : holdings_) {
    const HoldingSpec& spec = holding->spec;
    holding->present = holding->resident();
    if (holding->in_region() && !holding->in_shared_pages())
      holding->region = ComputeRegion(ledger_, gpu_, spec.purpose, spec.bytes);
    else if (holding->resident() && spec.exposed)
      ensure(pool_of(*holding).place(holding->arrival(), spec.bytes, spec.purpose), "no frames for '{}'",
             spec.name);
    if (gpu_ != nullptr && holding->in_region()) gpu_->add(holding->memory(), spec.bytes);
  }
}

void Pager::take_packed() {
  std::array<std::size_t, allocator::kPurposes> bytes = {};
  const auto for_each = [&](const auto& body) {
    for (auto& holding : holdings_)
      if (holding->in_region() && holding->in_shared_pages())
        body(*holding, static_cast<std::size_t>(holding->spec.purpose));
  };
  for_each([&](const Holding& holding, std::size_t purpose) {
    bytes[purpose] += packed_bytes(holding.spec.bytes);
  });
  for (std::size_t purpose = 0; purpose < bytes.size(); ++purpose)
    packed_.emplace_back(ledger_, gpu_, static_cast<allocator::Purpose>(purpose), bytes[purpose]);
  bytes = {};
  for_each([&](Holding& holding, std::size_t purpose) {
    holding.packed = packed_[purpose].data() + bytes[purpose];
    bytes[purpose] += packed_bytes(holding.spec.bytes);
  });
}

}  // namespace sluice::engine
