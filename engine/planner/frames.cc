#include "engine/planner/frames.h"

#include <algorithm>
#include <bit>

#include "core/bytes.h"

namespace sluice::engine {
namespace {

constexpr std::size_t kBlock = 128;  // numbers that are searched together
constexpr std::size_t kGradient = index(Part::kGradient), kParameters = index(Part::kParameters);

// The extents that an access needs: of parameters, the gradient of use 0, and that of the last further use.
std::array<std::uint64_t, 3> extents_of(const Access& access, const Layout& layout, int uses,
                                        std::size_t buffers, std::size_t extent_bytes) {
  std::array<std::uint64_t, 3> extents = {};
  if (access.parameters) extents[0] = divide_up(layout.unit_bytes(access.unit), extent_bytes);
  for (int use = 0; use < uses; ++use)
    if (use == access.gradient_use || access.final)
      extents[use == 0 ? 1 : 2] =
          buffers * divide_up(use_elements(layout, access.unit, use) * sizeof(float), extent_bytes);
  return extents;
}

// Accesses below 0 are those of the step before.
void add_windows(std::ptrdiff_t first, std::ptrdiff_t end, std::size_t windows, std::uint64_t each,
                 std::vector<Range>& to) {
  const auto all = static_cast<std::ptrdiff_t>(windows);
  const auto range = [&](std::ptrdiff_t from, std::ptrdiff_t until) {
    if (from < until)
      to.push_back({static_cast<std::size_t>(from), static_cast<std::size_t>(until - from), each});
  };
  range(std::max<std::ptrdiff_t>(first, 0), std::min(end, all));
  range(first + all, std::min(end, std::ptrdiff_t{0}) + all);
}

std::vector<std::uint64_t> known_values(const FrameNeeds& needs) {
  std::vector<std::uint64_t> known = {0};
  for (std::size_t unit = 0; unit < needs.extents[0].size(); ++unit) {
    const std::uint64_t parameters = needs.extents[kParameters][unit],
                        gradient = needs.extents[kGradient][unit];
    known.insert(known.end(), {parameters, gradient, parameters + gradient});
  }
  std::ranges::sort(known);
  known.erase(std::unique(known.begin(), known.end()), known.end());
  return known;
}

}  // namespace

Maximum::Maximum(std::size_t count) : values_(count), blocks_(divide_up(count, kBlock)) {}

void Maximum::add(const std::vector<Range>& ranges, std::int64_t times) {
  for (const Range& range : ranges)
    for (std::size_t i = range.first; i < range.first + range.count; ++i) {
      values_[i] += static_cast<std::uint64_t>(times) * range.each;
      blocks_[i / kBlock].stale = all_.stale = true;
    }
}

void Maximum::refresh() {
  if (!all_.stale) return;
  const auto take = [](Block& block, std::uint64_t value, std::size_t count) {
    if (value < block.most) return;
    block.count = value > block.most ? count : block.count + count;
    block.most = value;
  };
  all_ = {0, 0, false};
  for (std::size_t b = 0; b < blocks_.size(); ++b) {
    Block& block = blocks_[b];
    if (block.stale) {
      block = {0, 0, false};
      const std::size_t end = std::min(values_.size(), (b + 1) * kBlock);
      for (std::size_t i = b * kBlock; i < end; ++i) take(block, values_[i], 1);
    }
    take(all_, block.most, block.count);
  }
}

std::uint64_t Maximum::most() {
  refresh();
  return all_.most;
}

std::uint64_t Maximum::most_if_lower(const std::vector<Range>& ranges) {
  refresh();
  std::size_t lowered = 0;  // how many of the largest numbers would be lowered
  for (const Range& range : ranges)
    for (std::size_t i = 0; i < range.count; ++i) lowered += values_[range.first + i] == all_.most ? 1 : 0;
  if (lowered < all_.count || ranges.empty()) return all_.most;
  lower(ranges);
  const std::uint64_t then = most();
  raise(ranges);
  return then;
}

LargestFew::LargestFew(std::vector<std::uint64_t> known, std::size_t few)
    : known_(std::move(known)), few_(few), counts_(known_.size() + 1), sums_(known_.size() + 1) {}

void LargestFew::count(std::uint64_t value, std::int64_t more) {
  const auto above = known_.end() - std::ranges::lower_bound(known_, value);
  for (auto i = static_cast<std::size_t>(above); i < counts_.size(); i += i & (~i + 1)) {
    counts_[i] += more;
    sums_[i] += static_cast<std::uint64_t>(more) * value;
  }
}

void LargestFew::replace(std::uint64_t value, std::uint64_t by) {
  count(value, -1);
  count(by, 1);
}

std::uint64_t LargestFew::sum() const {
  std::size_t at = 0;
  auto left = static_cast<std::int64_t>(few_);
  std::uint64_t sum = 0;
  for (std::size_t step = std::bit_floor(counts_.size() - 1); step > 0; step /= 2)
    if (at + step < counts_.size() && counts_[at + step] <= left) {
      at += step;
      left -= counts_[at];
      sum += sums_[at];
    }
  return at + 1 < counts_.size() ? sum + static_cast<std::uint64_t>(left) * known_[known_.size() - 1 - at]
                                 : sum;
}

FrameNeeds::FrameNeeds(const Profile& profile, const Layout& layout, const std::vector<int>& uses,
                       const std::vector<std::size_t>& buffers, const std::vector<bool>& together,
                       const Lookahead& lookahead, std::size_t extent_bytes)
    : any_order(profile.any_order) {
  const std::size_t units = profile.units.size();
  if (any_order) {
    // Beside a unit that is being summed, others are ready that some rank does not have yet.
    window = profile.held_units + lookahead.ahead() + (lookahead.sums ? kUnitsThatWait : 0);
    for (UnitId unit = 0; unit < units; ++unit) {
      const auto all = extents_of({unit, true, 0, true}, layout, uses[unit], buffers[unit], extent_bytes);
      extents[kParameters].push_back(all[0]);
      extents[kGradient].push_back(all[1] + all[2]);
    }
    return;
  }
  windows = profile.schedule.size();
  window = std::min(windows, 1 + lookahead.ahead());
  for (auto& ranges : in_windows) ranges.resize(units);
  in_passes.resize(units);
  struct Seen {
    std::ptrdiff_t first = -1, last = -1;
    std::uint64_t each = 0;
  };
  std::vector<std::array<Seen, 3>> seen(units);
  // The last access in a window says what the window needs.
  const auto end_with = [&](UnitId unit, std::size_t need, std::ptrdiff_t next) {
    const Seen& before = seen[unit][need];
    const auto reach = static_cast<std::ptrdiff_t>(window);
    add_windows(before.last - reach + 1, std::min(before.last, next - reach) + 1, windows, before.each,
                in_windows[need == 0 ? kParameters : kGradient][unit]);
  };
  for (std::size_t i = 0; i < windows; ++i) {
    const Access& access = profile.schedule[i];
    const auto needed = extents_of(access, layout, uses[access.unit], buffers[access.unit], extent_bytes);
    for (std::size_t need = 0; need < needed.size(); ++need) {
      if (needed[need] == 0) continue;
      Seen& before = seen[access.unit][need];
      const auto at = static_cast<std::ptrdiff_t>(i);
      if (before.last >= 0) end_with(access.unit, need, at);
      before = {before.first < 0 ? at : before.first, at, needed[need]};
    }
  }
  for (UnitId unit = 0; unit < units; ++unit) {
    for (std::size_t need = 0; need < seen[unit].size(); ++need)
      if (seen[unit][need].last >= 0)
        end_with(unit, need, seen[unit][need].first + static_cast<std::ptrdiff_t>(windows));
    if (together[unit]) in_passes[unit] = {{unit, 1, divide_up(layout.unit_bytes(unit), extent_bytes)}};
  }
}

Frames::Frames(const FrameNeeds& needs, const std::vector<UnitPlan>& units)
    : needs_(&needs),
      windows_(needs.windows),
      passes_(needs.in_passes.size()),
      largest_(known_values(needs), needs.window) {
  for (UnitId unit = 0; unit < units.size(); ++unit) {
    for (const Part part : {Part::kParameters, Part::kGradient}) {
      if (needs.any_order) resident_[index(part)].push_back(units[unit].resident(part));
      if (!needs.any_order && !units[unit].resident(part))
        windows_.raise(needs.in_windows[index(part)][unit]);
    }
    if (needs.any_order) largest_.insert(of(unit));
    if (!needs.any_order && !units[unit].resident(Part::kParameters)) passes_.raise(needs.in_passes[unit]);
  }
  most();
}

std::uint64_t Frames::of(UnitId unit) const {
  return (resident_[kParameters][unit] ? 0 : needs_->extents[kParameters][unit]) +
         (resident_[kGradient][unit] ? 0 : needs_->extents[kGradient][unit]);
}

std::size_t Frames::most() {
  return bound_ = needs_->any_order ? largest_.sum() : windows_.most() + passes_.most();
}

std::size_t Frames::most_without(UnitId unit, Part part) {
  if (needs_->any_order) {
    const std::uint64_t now = of(unit), then = now - needs_->extents[index(part)][unit];
    largest_.replace(now, then);
    const std::uint64_t sum = largest_.sum();
    largest_.replace(then, now);
    return sum;
  }
  const std::uint64_t windows = windows_.most_if_lower(needs_->in_windows[index(part)][unit]);
  return windows +
         (part == Part::kParameters ? passes_.most_if_lower(needs_->in_passes[unit]) : passes_.most());
}

void Frames::remove(UnitId unit, Part part) {
  if (needs_->any_order) {
    const std::uint64_t now = of(unit);
    resident_[index(part)][unit] = true;
    return largest_.replace(now, of(unit));
  }
  windows_.lower(needs_->in_windows[index(part)][unit]);
  if (part == Part::kParameters) passes_.lower(needs_->in_passes[unit]);
}

}  // namespace sluice::engine
