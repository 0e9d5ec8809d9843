#include "cuda/engine_fixture.h"
#include "engine/planner/planner.h"
#include "testing.h"

// The size of the extents of frames, which a plan chooses.
namespace sluice::engine::twins::extents_test {

using ExtentsTest = DeviceEngineTest;

// Of all budgets from the least on, some have room for larger extents. The units have a little less than 4
// MiB.
TEST_F(ExtentsTest, TheyGrowWithinTheBudgetAndKeepTheBits) {
  Case setup;
  setup.blocks = 2, setup.rows = 1040, setup.steps = 2;
  std::set<std::size_t> seen;
  std::size_t trained = 0;
  for (setup.device = kMiB; setup.device <= 256 * kMiB; setup.device += (seen.empty() ? 1 : 4) * kMiB) {
    std::optional<Plan> plan;
    try {
      plan = plan_of(setup);
    } catch (const Error&) {
      EXPECT_TRUE(seen.empty());
      continue;
    }
    EXPECT_LE(plan->device_bytes, setup.device);
    seen.insert(plan->extent_bytes);
    if (trained == 0 && plan->extent_bytes == 4 * kMiB && plan->extents > 0) trained = setup.device;
  }
  ASSERT_GT(trained, 0U);
  const Outcome expected = train_on_cpu(setup);
  setup.device = trained;
  if (fake() != nullptr) begin(Schedule::kRandom, 1);
  expect_twin(setup, expected);
}

}  // namespace sluice::engine::twins::extents_test
