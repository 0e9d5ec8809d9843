#pragma once
#include <cstdint>
#include <optional>
#include <set>
#include <tuple>
#include <vector>

#include "engine/memory/next_uses.h"

namespace sluice::engine {

// The candidates for eviction, sorted so that the one whose next use is furthest away comes first. Dirty
// holdings, which must be written first, and clean ones are in separate sets. Thread rule: one thread.
class Leavers {
 public:
  struct Leaver {
    NextUses::Time time;  // of its next use
    HoldingId id;
    bool unwritten;
    bool operator==(const Leaver&) const = default;
    bool operator<(const Leaver& other) const {
      return std::tuple(other.time, id) < std::tuple(time, other.id);
    }
  };
  using Set = std::set<Leaver>;

  void add(HoldingId /*holding*/) { of_.emplace_back(); }  // in the order 0, 1, 2, ...
  // nullopt: the holding may not be evicted.
  void set(HoldingId holding, const std::optional<Leaver>& now) {
    std::optional<Leaver>& before = of_[holding];
    if (now == before) return;
    if (before) all(before->unwritten).erase(*before);
    if (now) all(now->unwritten).insert(*now);
    before = now;
  }
  bool may_leave(HoldingId holding) const { return of_[holding].has_value(); }
  const Set& written() const { return written_; }
  std::optional<HoldingId> furthest(bool unwritten) const {
    const Set& leavers = unwritten ? unwritten_ : written_;
    return leavers.empty() ? std::nullopt : std::optional(leavers.begin()->id);
  }

 private:
  Set& all(bool unwritten) { return unwritten ? unwritten_ : written_; }
  Set written_, unwritten_;
  std::vector<std::optional<Leaver>> of_;  // by holding
};

}  // namespace sluice::engine
