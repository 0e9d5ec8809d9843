#include "models/run/machine_plan.h"

#include "core/bytes.h"
#include "engine/machine/support.h"
#include "testing.h"
#include "thrown.h"

// Plans for a machine that a file describes.
namespace sluice::models::machine_plan_test {
using engine::machines::small_machine;

class MachinePlan : public engine::machines::MachineFile {
 protected:
  TrainSettings settings() const {
    TrainSettings s;
    s.model = "llama-8b";
    s.dtype = Dtype::kBf16;
    s.batch = 1;
    s.length = 128;
    return s;
  }
};

TrainSettings of_ranks(TrainSettings s, int ranks, int hosts) {
  s.ranks = {0, ranks};
  s.plan.stage = 0;
  s.accumulate = 8;
  s.ranks_here = ranks / hosts;
  s.share_of_cores = 1.0 / s.ranks_here;
  for (int rank = 0; rank < ranks && hosts > 1; ++rank) s.ranks.hosts.push_back(rank / s.ranks_here);
  return s;
}

// Ranks of one machine have it together: none more than its share, and all no more speed than one alone.
TEST_F(MachinePlan, IsDividedByItsRanks) {
  Json json = small_machine();
  json["cores"]["usable"] = 8;
  const engine::Machine machine = read(json);
  TrainSettings s = settings();
  s.model = "tiny";
  s.dtype = Dtype::kF32;
  s.accumulate = 8;
  s.length = 64;
  const PlanResult alone = plan_for_machine(s, machine);
  for (const int hosts : {1, 2, 4}) {
    const PlanResult shared = plan_for_machine(of_ranks(s, 4, hosts), machine);
    const auto here = static_cast<std::uint64_t>(4 / hosts);
    EXPECT_EQ(shared.budget.memory, 64 * kGiB / here) << hosts;
    EXPECT_EQ(shared.budget.disk, alone.budget.disk / here) << hosts;
    EXPECT_EQ(shared.rates.cores, 8 / static_cast<int>(here)) << hosts;
    EXPECT_DOUBLE_EQ(shared.rates.disk_read, alone.rates.disk_read / static_cast<double>(here));
    // With what making sums final takes besides.
    EXPECT_GE(shared.plan.time.compute, alone.plan.time.compute / hosts);
    EXPECT_LE(shared.plan.time.compute, 1.03 * alone.plan.time.compute / hosts);
    EXPECT_NEAR(shared.plan.time.optimizer, alone.plan.time.optimizer * static_cast<double>(here),
                1e-6 * alone.plan.time.optimizer)
        << "at stage 0 each rank updates everything";
    EXPECT_GT(shared.rates.rank_processor_seconds, 0) << "no core is left for the transport";
  }
  TrainSettings few = of_ranks(s, 4, 1);
  few.threads = 1;
  EXPECT_EQ(plan_for_machine(few, machine).rates.rank_processor_seconds, 0);
  few.memory = 8 * kGiB;
  few.disk = {{"/nowhere/at/all", kGiB}};
  const PlanResult stated = plan_for_machine(few, machine);
  EXPECT_EQ(stated.budget.memory, 8 * kGiB) << "what is stated is each rank's";
  EXPECT_EQ(stated.budget.disk, kGiB);
  EXPECT_EQ(stated.rates.cores, 1);
}

}  // namespace sluice::models::machine_plan_test
