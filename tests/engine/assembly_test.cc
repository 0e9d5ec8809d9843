#include "engine/steps/assembly.h"

#include <gtest/gtest.h>

#include "core/bytes.h"
#include "core/error.h"
#include "engine/planner/planner.h"
#include "engine/toy.h"
#include "offload/support.h"
#include "thrown.h"

namespace sluice::engine {
namespace assembly_test {

using allocator::Purpose;
using allocator::Tier;

class AssemblyTest : public ::testing::Test {
 protected:
  AssemblyTest() {
    planned_.profile = toy::profile(1);
    planned_.profile.hidden_bytes = 3 * kMiB;
    planned_.checkpoint_buffers = 2 * kMiB;
    planned_.budget = {kGiB, 0, 20 * kMiB};
  }
  void plan() {
    planned_.plan =
        make_plan(planned_.profile, *optimizer_, planned_.budget, planned_.request, planned_.rates);
  }
  void plan_on_disk() {
    planned_.disk = {{folder_.path(), kGiB / 2}};
    planned_.budget.disk = kGiB / 2;
    planned_.request.places = toy::places("disk");
    plan();
  }
  static allocator::Ledger::Line line(allocator::Ledger& ledger, Purpose purpose) {
    return ledger.snapshot().lines[static_cast<std::size_t>(Tier::kHost)][static_cast<std::size_t>(purpose)];
  }
  Ground::Means means() { return {threads_, *io_, *optimizer_}; }

  const offload::testing::DirectFolder folder_;
  Threads threads_{1};
  std::unique_ptr<offload::IoService> io_ = offload::make_thread_service({});
  std::unique_ptr<optim::Optimizer> optimizer_ = optim::make_optimizer({});
  Planned planned_;
};

TEST_F(AssemblyTest, ChargesWhatTheProcessHoldsButNotTheBuffersThatComeAndGo) {
  plan();
  Assembly<ScheduledEngine> assembly(planned_, means(), {});
  EXPECT_EQ(line(assembly.ledger(), Purpose::kBase).current, 18 * kMiB);
  EXPECT_GE(line(assembly.ledger(), Purpose::kWorkspace).current, 3 * kMiB);
  EXPECT_EQ(assembly.trace(), nullptr);
  EXPECT_EQ(assembly.disk_records(), nullptr);
  expect_error(ErrorCode::kBudget, {}, [&] {
    const allocator::Charge more(assembly.ledger(), Tier::kHost, Purpose::kStaging, kGiB);
  });
}

TEST_F(AssemblyTest, HasRecordsWhereThePlanOrOneAfterItUsesADisk) {
  plan();
  planned_.disk = {{folder_.path(), kGiB / 2}};
  EXPECT_EQ(Assembly<ScheduledEngine>(planned_, means(), {}).disk_records(), nullptr);
  EXPECT_NE(Assembly<ScheduledEngine>(planned_, means(), {.may_replan = true}).disk_records(), nullptr);
  plan_on_disk();
  EXPECT_NE(Assembly<ScheduledEngine>(planned_, means(), {}).disk_records(), nullptr);
}

TEST_F(AssemblyTest, TracesTheTransfersOfItsEngine) {
  plan_on_disk();
  Assembly<ScheduledEngine> assembly(planned_, means(), {.trace_events = 100});
  assembly.engine().load(0, toy::start_values());
  assembly.engine().settle();
  std::size_t events = 0;
  assembly.trace()->for_each([&](const Trace::Event&) { ++events; });
  EXPECT_GT(events, 0u);
}

TEST_F(AssemblyTest, IsNotMadeWhereTheDiskLacksRoom) {
  plan_on_disk();
  planned_.disk.front().limit = kMiB;
  expect_error(ErrorCode::kBudget, {folder_.path()},
               [&] { Assembly<ScheduledEngine>(planned_, means(), {}); });
}

}  // namespace assembly_test
}  // namespace sluice::engine
