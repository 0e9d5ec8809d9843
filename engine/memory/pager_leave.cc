#include <algorithm>
#include <utility>

#include "core/bytes.h"
#include "core/error.h"
#include "engine/memory/holding.h"
#include "engine/memory/pager.h"

// The end of a pager: what its holdings leave behind.
namespace sluice::engine {

void Pager::drop_unexposed() {
  for (auto& holding : holdings_) {
    if (holding->spec.exposed) continue;
    settle(*holding);
    holding->region = {};
    if (pool_ == nullptr)
      holding->present = false;
    else
      evict(*holding);
  }
  packed_.clear();
}

allocator::FormerHome Pager::leave(HoldingId id, bool with_contents) {
  Holding& holding = *holdings_[id];
  ensure(holding.spec.exposed, "'{}' has no address to leave", holding.spec.name);
  allocator::FormerHome former;
  if (with_contents) {
    acquire(id, Use::kModify);
    view(id, true);
    former = pool_of(holding).leave(holding.home);
    --holding.writers;
    release(id);
  } else {
    try {
      holding.transfers.wait();
    } catch (...) {  // NOLINT: nobody needs what was to be transferred
    }
    if (holding.present) {
      pool_of(holding).shrink(holding.home, 0);
      pool_of(holding).shrink(holding.hidden, 0);
    }
    former = allocator::FormerHome(std::move(holding.home));
  }
  holding.home = {};
  holding.hidden = {};
  holding.present = holding.spec.exposed = false;
  list(holding);
  give_back_left();
  return former;
}

void Pager::give_back_left() {
  if (pool_ != nullptr) pool_->give_back(frames_for_any());
  if (small_pool_ != nullptr) small_pool_->give_back(small_pool_->extents() - small_pool_->free_extents());
}

// How many frames the exposed holdings need, where those that are not resident come one at a time.
std::size_t Pager::frames_for_any() const {
  std::size_t resident = 0, largest = 0;
  for (const auto& holding : holdings_) {
    if (!holding->spec.exposed || holding->in_shared_pages()) continue;
    const std::size_t extents = pool_->extents_for(holding->spec.bytes);
    if (holding->resident())
      resident += extents;
    else
      largest = std::max(largest, extents);
  }
  return resident + largest;
}

// Memory grows by the copy of one unit, and by what all units take beyond the frames that are given back.
Pager::Leaving Pager::leaving() const {
  Leaving result;
  std::size_t all = 0, most = 0, needed = pool_ == nullptr ? 0 : frames_for_any();
  for (const ComputeRegion& region : packed_) result.given_back += region.size();
  for (const auto& holding : holdings_) {
    if (!holding->spec.exposed) {
      result.given_back += holding->region.size();
      continue;
    }
    if (holding->in_shared_pages()) {
      result.growth = std::max(result.growth, packed_exposed_bytes(holding->spec.bytes));
      continue;
    }
    const std::size_t extents = pool_->extents_for(holding->spec.bytes);
    all += extents;
    most = std::max(most, extents);
    if (holding->resident()) needed -= extents;
  }
  if (pool_ == nullptr) return result;
  const std::size_t beyond = all + needed - std::min(all + needed, pool_->extents());
  result.growth = std::max(result.growth, (most + beyond) * pool_->extent_bytes());
  return result;
}

}  // namespace sluice::engine
