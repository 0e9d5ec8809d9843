#pragma once
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

namespace sluice::engine {

using HoldingId = std::uint32_t;

// Knows when each holding is used next, in a cycle of accesses that repeats. Time counts accesses and never
// goes back. So two next uses keep their order while time passes, and an access changes only the next uses of
// the holdings that it names. Thread rule: one thread.
class NextUses {
 public:
  using Time = std::uint64_t;
  static constexpr Time kNever = std::numeric_limits<Time>::max();

  void add(HoldingId holding);  // in the order 0, 1, 2, ...
  // After its last use in a cycle, `holding` counts as used next when `next` has its first use in the next
  // cycle. REQUIRES: `next` itself follows no other holding.
  void follow(HoldingId holding, HoldingId next);
  // A parked holding counts as used whenever the holding that it follows is, and not when the schedule names
  // it.
  void set_parked(HoldingId holding, bool parked) { of_[holding].parked = parked; }
  void set_schedule(std::vector<std::vector<HoldingId>> accesses);

  const std::vector<std::vector<HoldingId>>& schedule() const { return schedule_; }
  std::size_t position() const { return position_; }
  // Calls changed(holding) for each holding whose time may have changed. A position below the present one is
  // in the next cycle.
  template <class Changed>
  void set_position(std::size_t position, const Changed& changed);

  Time time(HoldingId holding) const;  // of its next use; the access at the position counts
  // The number of accesses until its next use; kNever where it has none.
  Time distance(HoldingId holding) const;
  // Calls body(holding) for each holding that the next accesses name, from the one at the position on, and
  // for those that follow it. A holding may occur several times.
  template <class Body>
  void for_each_within(std::size_t accesses, const Body& body) const;

 private:
  struct Holding {
    std::vector<std::size_t> uses;  // positions in the schedule, ascending
    std::optional<HoldingId> next;
    std::vector<HoldingId> followers;
    bool parked = false;
  };
  template <class Body>
  void for_each_at(std::size_t position, const Body& body) const;

  std::vector<Holding> of_;
  std::vector<std::vector<HoldingId>> schedule_;
  std::size_t position_ = 0;
  Time cycle_ = 0;  // the time at which the present cycle began
};

template <class Body>
void NextUses::for_each_at(std::size_t position, const Body& body) const {
  for (const HoldingId holding : schedule_[position]) {
    body(holding);
    for (const HoldingId follower : of_[holding].followers) body(follower);
  }
}

template <class Body>
void NextUses::for_each_within(std::size_t accesses, const Body& body) const {
  for (std::size_t i = 0; i < accesses && i < schedule_.size(); ++i)
    for_each_at((position_ + i) % schedule_.size(), body);
}

template <class Changed>
void NextUses::set_position(std::size_t position, const Changed& changed) {
  const std::size_t before = position_;
  const bool wraps = position < before;
  position_ = position;
  if (wraps) cycle_ += schedule_.size();
  const auto passed = [&](std::size_t first, std::size_t end) {
    for (std::size_t i = first; i < end; ++i) for_each_at(i, changed);
  };
  passed(before, wraps ? schedule_.size() : position);
  if (wraps) passed(0, position);
}

}  // namespace sluice::engine
