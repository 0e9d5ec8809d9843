#include "core/error.h"
#include "engine/memory/holding.h"

namespace sluice::engine {

void Pager::forget_backing(HoldingId id) { holdings_[id]->backing.reset(); }

void Pager::set_tier(HoldingId id, allocator::Tier tier) {
  Holding& holding = *holdings_[id];
  const bool resident = tier == tier_of(gpu_);
  if (holding.resident() == resident) return;
  ensure(!holding.spec.packed, "'{}' is packed, and the new plan moves it to another tier",
         holding.spec.name);
  if (holding.spec.exposed) {
    if (resident) {
      acquire(id, Use::kModify);
      release(id);
    }
    holding.backed = false;  // it changes in memory from now on, or has never been written
  } else if (resident) {
    discard(id);
    holding.home = {};
    holding.region = ComputeRegion(ledger_, gpu_, holding.spec.purpose, holding.spec.bytes);
    holding.present = true;
  } else {
    holding.contents = 0;
    holding.region = {};
    holding.home = allocator::Home(holding.spec.name, holding.spec.bytes);
    holding.present = false;
  }
  holding.spec.tier = tier;
  list(holding);
}

void Pager::set_extents(std::size_t extents) {
  if (pool_ == nullptr) return;
  if (extents > pool_->extents()) return pool_->take_more(extents);
  for (pool_->give_back(extents); pool_->extents() > extents; pool_->give_back(extents)) {
    if (Holding* const victim = furthest(false)) {
      evict(*victim);
      continue;
    }
    Holding* const unwritten = furthest(true);
    ensure(unwritten != nullptr, "{} extents are to be left of {}, and everything in them is held", extents,
           pool_->extents());
    begin_transfer(*unwritten, true);
    settle(*unwritten);
  }
}

}  // namespace sluice::engine
