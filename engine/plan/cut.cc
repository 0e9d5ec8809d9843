#include "engine/plan/cut.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <limits>
#include <utility>

#include "core/error.h"
#include "engine/plan/pipeline_clock.h"

namespace sluice::engine {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

class Cutting {
 public:
  Cutting(const Pipeline& pipeline, std::span<const SectionSeconds> seconds, const Fits& fits)
      : pipeline_(pipeline), seconds_(seconds), fits_(fits), clock_(pipeline) {}

  // Where chunks begin, and the last one ends; nothing where no cut fits.
  std::vector<UnitId> even() const {
    const std::size_t chunks = pipeline_.all_chunks(), units = seconds_.size();
    // By number of chunks and their end: the longest one of the best cut, and where its last one begins.
    std::vector<std::vector<std::pair<double, UnitId>>> best(chunks + 1);
    for (auto& of_chunks : best) of_chunks.assign(units + 1, {kNever, 0});
    best[0][0] = {0, 0};
    for (std::size_t s = 0; s < chunks; ++s)
      for (std::size_t end = 1; end <= units; ++end)
        for (std::size_t first = 0; first < end; ++first) {
          const UnitRange range{static_cast<UnitId>(first), static_cast<UnitId>(end)};
          if (best[s][first].first == kNever || !may_have(s, range)) continue;
          const SectionSeconds own = sum(range);
          const double longest = std::max(best[s][first].first, own.forward + own.backward);
          if (longest < best[s + 1][end].first) best[s + 1][end] = {longest, range.first};
        }
    if (best[chunks][units].first == kNever) return {};
    std::vector<UnitId> borders{static_cast<UnitId>(units)};
    for (std::size_t s = chunks; s > 0; --s) borders.insert(borders.begin(), best[s][borders.front()].second);
    return borders;
  }

  // Moves a border, or several that follow each other, by a unit. With several chunks a section has borders
  // enough that one at a time does, and they are too many to try each pair.
  std::vector<UnitId> improved(std::vector<UnitId> borders) const {
    double step = time(borders);
    for (bool better = true; std::exchange(better, false);) {
      std::vector<UnitId> best;
      for (std::size_t first = 1; first + 1 < borders.size(); ++first)
        for (std::size_t last = first; last + 1 < borders.size() && (last == first || pipeline_.chunks == 1);
             ++last)
          for (const bool up : {false, true}) {
            std::vector<UnitId> moved = borders;
            for (std::size_t i = first; i <= last; ++i) moved[i] += up ? 1 : UnitId(-1);
            const double found = time(moved, step);
            if (found >= step) continue;
            step = found;
            best = std::move(moved);
          }
      if (!best.empty()) borders = std::move(best), better = true;
    }
    return borders;
  }

 private:
  SectionSeconds sum(UnitRange range) const {
    SectionSeconds sum;
    for (UnitId unit = range.first; unit < range.end; ++unit) {
      sum.forward += seconds_[unit].forward;
      sum.backward += seconds_[unit].backward;
      sum.weights += seconds_[unit].weights;
      sum.message = std::max(sum.message, seconds_[unit].message);
    }
    return sum;
  }

  bool may_have(std::size_t chunk, UnitRange range) const {
    const std::size_t first_block = std::max<std::size_t>(range.first, 1);
    const std::size_t end_block = std::min<std::size_t>(range.end, seconds_.size() - 1);
    return range.first < range.end && first_block < end_block &&
           fits_(static_cast<int>(chunk) % pipeline_.sections, range);
  }

  // kNever also where it cannot be less than `than`.
  double time(const std::vector<UnitId>& borders, double than = kNever) const {
    std::vector<SectionSeconds> chunks;
    for (std::size_t s = 0; s + 1 < borders.size(); ++s) {
      const UnitRange range{borders[s], borders[s + 1]};
      if (!may_have(s, range)) return kNever;
      chunks.push_back(sum(range));
    }
    if (least_step(pipeline_, chunks) >= than) return kNever;
    return clock_.step(chunks);
  }

  const Pipeline pipeline_;
  const std::span<const SectionSeconds> seconds_;
  const Fits& fits_;
  const PipelineClock clock_;
};

std::size_t block_of(std::string_view text, std::string_view number) {
  std::size_t block = 0;
  const auto [rest, error] = std::from_chars(number.data(), number.data() + number.size(), block);
  if (error != std::errc() || rest != number.data() + number.size())
    fail(ErrorCode::kInvalidArgument,
         "the cut '{}' has '{}' where the number of a block must be: give it as 0-7,8-15", text, number);
  return block;
}

}  // namespace

std::vector<UnitRange> units_of(std::span<const UnitRange> cut, int sections, int section) {
  std::vector<UnitRange> units;
  for (auto at = static_cast<std::size_t>(section); at < cut.size(); at += static_cast<std::size_t>(sections))
    units.push_back(cut[at]);
  return units;
}

std::vector<UnitRange> cut(const Pipeline& pipeline, std::span<const SectionSeconds> seconds,
                           const Fits& fits) {
  const Cutting cutting(pipeline, seconds, fits);
  std::vector<UnitId> borders = cutting.even();
  if (borders.empty()) return {};
  borders = cutting.improved(std::move(borders));
  std::vector<UnitRange> cut;
  for (std::size_t s = 0; s + 1 < borders.size(); ++s) cut.push_back({borders[s], borders[s + 1]});
  return cut;
}

std::vector<UnitRange> parse_cut(std::string_view text, std::size_t blocks) {
  std::vector<UnitRange> cut;
  std::string_view rest = text;
  std::size_t next = 0;
  for (bool is_last = false; !is_last;) {
    const std::string_view part = rest.substr(0, rest.find(','));
    is_last = part.size() == rest.size();
    rest.remove_prefix(std::min(rest.size(), part.size() + 1));
    const std::size_t sign = std::min(part.find('-'), part.size());
    const std::size_t first = block_of(text, part.substr(0, sign));
    const std::size_t last = sign == part.size() ? first : block_of(text, part.substr(sign + 1));
    if (next == blocks)
      fail(ErrorCode::kInvalidArgument,
           "the cut '{}' goes on with '{}' after block {}, which is the model's last one", text, part,
           blocks - 1);
    if (first != next || last < first || last >= blocks)
      fail(ErrorCode::kInvalidArgument,
           "the cut '{}' has '{}' where blocks from {} on must be: the model has the blocks 0 to {}, each in "
           "one stage, in their order",
           text, part, next, blocks - 1);
    next = last + 1;
    cut.push_back({static_cast<UnitId>(first == 0 ? 0 : first + 1), static_cast<UnitId>(next + 1)});
  }
  if (next != blocks)
    fail(ErrorCode::kInvalidArgument, "the cut '{}' ends with block {}, and the model has the blocks 0 to {}",
         text, next - 1, blocks - 1);
  ++cut.back().end;
  return cut;
}

std::string to_text(std::span<const UnitRange> cut) {
  std::vector<std::string> parts;
  for (std::size_t s = 0; s < cut.size(); ++s) {
    const UnitId first = std::max<UnitId>(cut[s].first, 1) - 1;
    const UnitId last = cut[s].end - 2 - (s + 1 == cut.size() ? 1 : 0);
    parts.push_back(first == last ? fmt::format("{}", first) : fmt::format("{}-{}", first, last));
  }
  return fmt::format("{}", fmt::join(parts, ","));
}

}  // namespace sluice::engine
