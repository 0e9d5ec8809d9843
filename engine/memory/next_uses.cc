#include "engine/memory/next_uses.h"

#include <algorithm>
#include <utility>

namespace sluice::engine {

void NextUses::add(HoldingId holding) { of_.resize(holding + 1); }

void NextUses::follow(HoldingId holding, HoldingId next) {
  of_[holding].next = next;
  of_[next].followers.push_back(holding);
}

void NextUses::set_schedule(std::vector<std::vector<HoldingId>> accesses) {
  schedule_ = std::move(accesses);
  position_ = 0;
  cycle_ = 0;
  for (Holding& holding : of_) holding.uses.clear();
  for (std::size_t i = 0; i < schedule_.size(); ++i)
    for (const HoldingId holding : schedule_[i]) of_[holding].uses.push_back(i);
}

NextUses::Time NextUses::time(HoldingId id) const {
  const Holding& holding = of_[id];
  if (holding.parked && holding.next) return time(*holding.next);
  if (holding.uses.empty()) return kNever;
  const auto next = std::lower_bound(holding.uses.begin(), holding.uses.end(), position_);
  if (next != holding.uses.end()) return cycle_ + *next;
  const bool follows = holding.next && !of_[*holding.next].uses.empty();
  const Holding& user = follows ? of_[*holding.next] : holding;
  return cycle_ + schedule_.size() + user.uses.front();
}

NextUses::Time NextUses::distance(HoldingId holding) const {
  const Time at = time(holding);
  return at == kNever ? kNever : at - cycle_ - position_;
}

}  // namespace sluice::engine
