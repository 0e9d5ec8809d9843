#include "engine/step/sums_of_ranks.h"

namespace sluice::engine {

void SumsOfRanks::add(const optim::PartSums& sums) {
  TransferGroup group;
  ranks_.sum_round(sums.f64, sums.f32, group);
  group.wait();
}

}  // namespace sluice::engine
