#include "models/run/machine_plan.h"

#include <gmock/gmock.h>

#include "core/bytes.h"
#include "engine/machine/support.h"
#include "thrown.h"

// Plans for a machine that a file describes.
namespace sluice::models {
namespace {
using engine::testing::small_machine;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class MachinePlan : public engine::testing::MachineFile {
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

TEST_F(MachinePlan, IsPlannedForWithNothingOfItHere) {
  const engine::Machine machine = read(small_machine());
  TrainSettings s = settings();
  const PlanResult whole = plan_for_machine(s, machine);
  EXPECT_EQ(whole.budget.memory, 64 * kGiB);
  EXPECT_EQ(whole.budget.disk, 8 * 1024 * kGiB / 20 * 19);
  EXPECT_TRUE(whole.plan.uses_disk());
  EXPECT_THAT(plan_text(whole),
              AllOf(StartsWith("for the machine of " + path_), HasSubstr("not known of the machine:")));
  s.memory = 8 * kGiB;
  s.disk = {{"/nowhere/at/all", 900 * 1024 * kGiB}};
  const PlanResult more = plan_for_machine(s, machine);
  EXPECT_EQ(more.budget.disk, 900 * 1024 * kGiB);
  EXPECT_EQ(more.budget.memory, 8 * kGiB);
  s.disk = {{"/elsewhere", kGiB}};
  EXPECT_THAT(message_of([&] { plan_for_machine(s, machine); }),
              AllOf(HasSubstr("'/elsewhere'"), HasSubstr("which has /nowhere/at/all")));
}

TEST_F(MachinePlan, IsFasterWhereItsRatesAre) {
  const double slow = plan_for_machine(settings(), read(small_machine())).plan.time.step;
  Json faster = small_machine();
  faster["products"][0]["flops"] = 2e13;
  faster["memory"]["bandwidth"] = 1e12;
  faster["disks"][0]["read"] = faster["disks"][0]["write"] = 1e12;
  EXPECT_LT(plan_for_machine(settings(), read(faster)).plan.time.step, slow / 10);
}

}  // namespace
}  // namespace sluice::models
