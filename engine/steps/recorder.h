#pragma once
#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "engine/plan/profile.h"

namespace sluice::engine {

// Records the accesses of a step whose order the client chooses, and finds each one in the previous step.
class Recorder {
 public:
  // Drops the record of a step that did not end.
  void begin_step() {
    recorded_.clear();
    recorded_held_.clear();
    next_ = 0;
  }
  // Records the access if `record` says so, with what is held from earlier ones. Returns its position in the
  // previous step's order, or, where it is not there, the position that is expected next.
  std::size_t follow(const Access& access, bool record, std::vector<Access> held = {}) {
    if (record && recorded_.size() < kMost) {
      recorded_.push_back(access);
      if (!held.empty()) {
        recorded_held_.resize(recorded_.size());
        recorded_held_.back() = std::move(held);
      }
    }
    if (access.unit < positions_.size()) {
      const std::vector<std::size_t>& positions = positions_[access.unit];
      for (auto at = std::ranges::lower_bound(positions, next_); at != positions.end(); ++at)
        if (expected_[*at] == access) {
          next_ = *at + 1;
          return *at;
        }
    }
    return next_ < expected_.size() ? next_ : 0;
  }
  // Ends the step; the next one is expected to have its order.
  const std::vector<Access>& end_step() {
    expected_ = std::exchange(recorded_, {});
    held_ = std::exchange(recorded_held_, {});
    next_ = 0;
    for (std::vector<std::size_t>& positions : positions_) positions.clear();
    for (std::size_t i = 0; i < expected_.size(); ++i) {
      if (expected_[i].unit >= positions_.size()) positions_.resize(expected_[i].unit + 1);
      positions_[expected_[i].unit].push_back(i);
    }
    return expected_;
  }
  // By access of the last step that ended: what was held from earlier ones; may be shorter than the step.
  const std::vector<std::vector<Access>>& held() const { return held_; }

 private:
  // Bounds the memory for a step that contains a long evaluation.
  static constexpr std::size_t kMost = std::size_t{1} << 20;
  std::vector<Access> expected_, recorded_;
  std::vector<std::vector<Access>> held_, recorded_held_;
  std::vector<std::vector<std::size_t>> positions_;  // by unit: its positions in expected_
  std::size_t next_ = 0;
};

}  // namespace sluice::engine
