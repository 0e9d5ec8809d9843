#include "engine/updates/sums_of_ranks.h"

namespace sluice::engine {

void SumsOfRanks::add(UnitId unit, const optim::PartSums& sums) {
  if (!ranks_.partitioned(unit)) return;
  TransferGroup group;
  ranks_.sum_round(sums.f64, sums.f32, group);
  group.wait();
}

}  // namespace sluice::engine
