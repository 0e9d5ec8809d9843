#pragma once
#include "engine/ranks/ranks.h"
#include "engine/updates/update_executor.h"

namespace sluice::engine {

// Adds up the sums of an optimizer's rounds over the ranks that have parts of a parameter. REQUIRES: all
// ranks compute the same updates in the same order.
class SumsOfRanks final : public PartsOfOthers {
 public:
  explicit SumsOfRanks(Ranks& ranks) : ranks_(ranks) {}  // the ranks outlive it
  void add(UnitId unit, const optim::PartSums& sums) override;

 private:
  Ranks& ranks_;
};

}  // namespace sluice::engine
