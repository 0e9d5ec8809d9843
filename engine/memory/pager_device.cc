#include <algorithm>
#include <utility>

#include "core/error.h"
#include "engine/memory/frame_assignment.h"
#include "engine/memory/holding.h"
#include "engine/memory/pager.h"

// Frames of a GPU. To put others under a home than those that are mapped there holds up the whole GPU, so
// each holding has frames of its own, which it shares with those that are used far from it, and what is in
// them makes room. That may have to be fetched once more than if any frames were good enough.
namespace sluice::engine {
namespace {

// The first orders are assigned frames at once: the one that is guessed, and those of two steps. Later ones
// are when they come twice in a row, so that orders which keep changing do not have homes mapped in each
// step.
constexpr int kAtOnce = 3;

}  // namespace

void Pager::make_device_homes() {
  if (device_pool_) device_pool_->before_unmapping([this] { gpu_->wait_for_all(); });
  for (const auto& holding : holdings_) {
    const HoldingSpec& spec = holding->spec;
    ensure(!spec.exposed && !spec.adjoins, "'{}' is exposed, or adjoins another one, on a GPU", spec.name);
    if (holding->in_region()) continue;
    holding->device_home = allocator::DeviceHome(*device_pool_, spec.name, spec.bytes);
    device_homes_[holding->device_home.address()] = holding->id;
    gpu_->add(holding->memory(), spec.bytes);
  }
}

void Pager::assign_device_frames(bool comes_again) {
  const auto& schedule = uses_.schedule();
  if (device_pool_ == nullptr || schedule.empty() || (schedule == assigned_for_ && held_ == assigned_held_))
    return;
  if (assignments_ >= kAtOnce && !comes_again) return;
  ++assignments_;
  assigned_for_ = schedule;
  assigned_held_ = held_;
  std::vector<std::size_t> extents(holdings_.size());
  for (const auto& holding : holdings_)
    if (!holding->resident()) extents[holding->id] = frames_for(*holding);
  std::vector<std::vector<std::size_t>> assigned = assign_frames(schedule, held_, extents, frames());
  for (const auto& holding : holdings_)
    if (!assigned[holding->id].empty())
      device_pool_->assign(holding->device_home, std::move(assigned[holding->id]));
}

Pager::Way Pager::clear_way(const Holding& wanted, bool forced) {
  const NextUses::Time limit = uses_.distance(wanted.id);
  std::vector<Holding*> in_the_way;
  for (const DeviceAddress address : device_pool_->in_the_way(wanted.device_home)) {
    Holding& victim = *holdings_[device_homes_.at(address)];
    if (victim.pins > 0 || (victim.is_unwritten() && !victim.spec.stored)) return Way::kHeld;
    const bool is_sooner = uses_.distance(victim.id) <= limit || victim.io != Holding::Io::kNone;
    if (!forced && is_sooner) return Way::kStays;
    in_the_way.push_back(&victim);
  }
  Way way = Way::kClear;
  for (Holding* const victim : in_the_way) {
    if (victim->io == Holding::Io::kNone && victim->is_unwritten()) begin_transfer(*victim, true);
    // A write to host memory has ended for the caller as soon as it has begun.
    if (victim->io == Holding::Io::kWriting && victim->transfers.finished()) settle(*victim);
    if (victim->io == Holding::Io::kNone)
      evict(*victim);
    else
      way = Way::kStays;
  }
  return way;
}

// Where its frames are held, waits until an update gives some back. Returns whether one has: otherwise a
// client holds them.
bool Pager::update_gives_way(const Holding& wanted) {
  if (gpu_ == nullptr || !on_stall_) return false;
  const std::vector<DeviceAddress> in_the_way = device_pool_->in_the_way(wanted.device_home);
  const auto is_held = [&](DeviceAddress address) { return holdings_[device_homes_.at(address)]->pins > 0; };
  return std::ranges::any_of(in_the_way, is_held) && on_stall_();
}

// Begins to write what must leave for these, and is not used within the `nearest` next accesses.
void Pager::write_in_the_way(const std::set<HoldingId>& wanted, NextUses::Time nearest) {
  for (const HoldingId id : wanted)
    for (const DeviceAddress address : device_pool_->in_the_way(holdings_[id]->device_home)) {
      Holding& victim = *holdings_[device_homes_.at(address)];
      if (victim.listed && victim.is_unwritten() && uses_.distance(victim.id) > nearest)
        begin_transfer(victim, true);
    }
}

}  // namespace sluice::engine
