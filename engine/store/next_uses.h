#pragma once
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

namespace sluice::engine {

using HoldingId = std::uint32_t;

// When each holding is needed next, in a cycle of accesses that is gone through again and again. Times count
// accesses and never go back, so that what was needed later than another still is while time passes: only
// what an access names has another time after it. Thread rule: one thread.
class NextUses {
 public:
  using Time = std::uint64_t;
  static constexpr Time kNever = std::numeric_limits<Time>::max();

  void add(HoldingId holding);  // 0, 1, 2, ...
  // After its last use of a cycle `holding` is next needed when `next` is needed first. REQUIRES: `next`
  // follows none.
  void follow(HoldingId holding, HoldingId next);
  // Needed whenever the one that it follows is, and not when the schedule names it.
  void set_parked(HoldingId holding, bool parked) { of_[holding].parked = parked; }
  void set_schedule(std::vector<std::vector<HoldingId>> accesses);

  const std::vector<std::vector<HoldingId>>& schedule() const { return schedule_; }
  std::size_t position() const { return position_; }
  // changed(holding): for each whose time may be another now. A position before the present one is in the
  // next cycle.
  template <class Changed>
  void set_position(std::size_t position, const Changed& changed);

  Time time(HoldingId holding) const;  // of its next use; the access at the position counts
  // Accesses until then; kNever where nothing needs it.
  Time distance(HoldingId holding) const;
  // body(holding) for those that these next accesses name, the one at the position first, and those that
  // follow one of them; a holding may come several times.
  template <class Body>
  void for_each_within(std::size_t accesses, const Body& body) const;

 private:
  struct Holding {
    std::vector<std::size_t> uses;  // positions, ascending
    std::optional<HoldingId> next;
    std::vector<HoldingId> followers;
    bool parked = false;
  };
  template <class Body>
  void for_each_at(std::size_t position, const Body& body) const;

  std::vector<Holding> of_;
  std::vector<std::vector<HoldingId>> schedule_;
  std::size_t position_ = 0;
  Time cycle_ = 0;  // the time at which the present one began
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
