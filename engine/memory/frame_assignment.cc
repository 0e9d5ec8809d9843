#include "engine/memory/frame_assignment.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <span>
#include <tuple>

namespace sluice::engine {
namespace {

using Schedule = std::vector<std::vector<HoldingId>>;

// The distance of two holdings between whose uses others take more than twice the frames: the two are never
// needed together.
constexpr std::size_t kFar = std::numeric_limits<std::size_t>::max();

class Assignment {
 public:
  Assignment(const Schedule& schedule, const Schedule& held, const std::vector<std::size_t>& extents,
             std::size_t frames)
      : schedule_(schedule),
        held_(held),
        extents_(extents),
        uses_(extents.size()),
        distances_(extents.size(), kFar),
        shares_(frames),
        near_(frames),
        assigned_(extents.size()) {
    for (std::size_t at = 0; at < schedule.size(); ++at) {
      for (const HoldingId holding : schedule[at]) uses_[holding].push_back(at);
      for (const HoldingId holding : held_at(at)) uses_[holding].push_back(at);
    }
  }

  std::vector<std::vector<std::size_t>> find() {
    for (const auto& access : schedule_)
      for (const HoldingId holding : access)
        if (assigned_[holding].empty() && extents_[holding] > 0 && extents_[holding] <= shares_.size())
          assign(holding);
    return std::move(assigned_);
  }

 private:
  void assign(HoldingId holding) {
    for (const std::size_t use : uses_[holding]) {
      look_from(use, true);
      look_from(use, false);
    }
    std::ranges::fill(near_, kFar);
    for (const HoldingId other : seen_) {
      for (const std::size_t frame : assigned_[other])
        near_[frame] = std::min(near_[frame], distances_[other]);
      distances_[other] = kFar;
    }
    seen_.clear();
    std::vector<std::size_t> order(shares_.size());
    std::iota(order.begin(), order.end(), 0);
    const auto rank = [&](std::size_t frame) {
      return std::tuple(kFar - near_[frame], shares_[frame], frame);  // furthest first
    };
    const auto end = order.begin() + static_cast<std::ptrdiff_t>(extents_[holding]);
    std::ranges::partial_sort(order, end, {}, rank);
    order.erase(end, order.end());
    for (const std::size_t frame : order) ++shares_[frame];
    assigned_[holding] = std::move(order);
  }

  // Notes the distance of other holdings' uses from a position, before it or after it.
  void look_from(std::size_t position, bool forwards) {
    std::size_t passed = 0;
    const std::size_t furthest = std::min(schedule_.size(), 2 * shares_.size() + 1);
    for (std::size_t distance = 0; distance < furthest && passed <= 2 * shares_.size(); ++distance) {
      const std::size_t steps = forwards ? distance : schedule_.size() - distance;
      const std::size_t at = (position + steps) % schedule_.size();
      for (const HoldingId other : schedule_[at]) {
        passed += extents_[other];
        note(other, distance);
      }
      for (const HoldingId other : held_at(at)) note(other, distance);
    }
  }

  void note(HoldingId other, std::size_t distance) {
    if (distances_[other] == kFar) seen_.push_back(other);
    distances_[other] = std::min(distances_[other], distance);
  }

  std::span<const HoldingId> held_at(std::size_t at) const {
    return at < held_.size() ? std::span(held_[at]) : std::span<const HoldingId>();
  }

  const Schedule& schedule_;
  const Schedule& held_;
  const std::vector<std::size_t>& extents_;
  std::vector<std::vector<std::size_t>> uses_;  // by holding: positions in the schedule
  std::vector<std::size_t> distances_;          // by holding, from the one being assigned
  std::vector<HoldingId> seen_;                 // holdings whose distance is set
  std::vector<std::size_t> shares_, near_;      // by frame: number of holdings; distance of the nearest
  std::vector<std::vector<std::size_t>> assigned_;
};

}  // namespace

std::vector<std::vector<std::size_t>> assign_frames(const Schedule& schedule, const Schedule& held,
                                                    const std::vector<std::size_t>& extents,
                                                    std::size_t frames) {
  return Assignment(schedule, held, extents, frames).find();
}

}  // namespace sluice::engine
