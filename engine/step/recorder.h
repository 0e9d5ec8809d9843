#pragma once
#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "engine/plan/profile.h"

namespace sluice::engine {

// The accesses of a step whose order is the client's own, held against those of the step before.
class Recorder {
 public:
  // Forgets what was noted of a step that did not end.
  void begin_step() {
    recorded_.clear();
    next_ = 0;
  }
  // Notes an access, if it is to be recorded; returns its place in the order of the step before, or where
  // that goes on when it is not there.
  std::size_t follow(const Access& access, bool record) {
    if (record && recorded_.size() < kMost) recorded_.push_back(access);
    if (access.unit < places_.size()) {
      const std::vector<std::size_t>& places = places_[access.unit];
      for (auto at = std::ranges::lower_bound(places, next_); at != places.end(); ++at)
        if (expected_[*at] == access) {
          next_ = *at + 1;
          return *at;
        }
    }
    return next_ < expected_.size() ? next_ : 0;
  }
  // The step is over: its order is what the next one is expected to have.
  const std::vector<Access>& end_step() {
    expected_ = std::exchange(recorded_, {});
    next_ = 0;
    for (std::vector<std::size_t>& places : places_) places.clear();
    for (std::size_t i = 0; i < expected_.size(); ++i) {
      if (expected_[i].unit >= places_.size()) places_.resize(expected_[i].unit + 1);
      places_[expected_[i].unit].push_back(i);
    }
    return expected_;
  }

 private:
  static constexpr std::size_t kMost = std::size_t{1} << 20;  // a step with an evaluation in it
  std::vector<Access> expected_, recorded_;
  std::vector<std::vector<std::size_t>> places_;  // by unit: in the order that is expected
  std::size_t next_ = 0;
};

}  // namespace sluice::engine
