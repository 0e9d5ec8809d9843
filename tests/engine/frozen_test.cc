#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/error.h"
#include "engine/planner/planner.h"
#include "engine/toy.h"
#include "offload/test_files.h"
#include "thrown.h"

// Tests of units that are never updated: they have no gradient, no master and no state anywhere.
namespace sluice::engine {
namespace frozen_test {

using allocator::Purpose;
using ::testing::HasSubstr;

constexpr UnitId kFrozen = 2;  // a block of the toy
constexpr ParameterId kFrozenWeight = 4, kFrozenBias = 5;

Profile frozen_profile(Dtype dtype) {
  Profile profile = toy::profile(2, {dtype});
  profile.units[kFrozen].trainable = false;
  for (Access& access : profile.schedule)
    if (access.unit == kFrozen) access = {kFrozen, true, -1, false};
  return profile;
}

PlanRequest everything(const std::string& place, bool clip) {
  PlanRequest request;
  request.clip = clip;
  request.group = 2;
  request.places = toy::places(place);
  return request;
}

std::uint64_t bytes_of(const Plan& plan, allocator::Tier tier, Purpose purpose) {
  return plan.bytes[static_cast<std::size_t>(tier)][static_cast<std::size_t>(purpose)];
}

float rounded(float value, Dtype type) {
  float held = 0;
  test::set_value({&held, type}, 0, value);
  return test::value_at({&held, type}, 0);
}

class FrozenUnits : public testing::TestWithParam<Dtype> {
 protected:
  toy::Outcome trained(const std::string& place, bool clip) const {
    const Profile profile = frozen_profile(GetParam());
    const Plan plan = make_plan(profile, *optimizer_, {kGiB, kGiB, 0}, everything(place, clip), {});
    Threads threads(2);
    allocator::Ledger ledger;
    ledger.set_budget(allocator::Tier::kHost, plan.peak_memory);
    std::vector<std::unique_ptr<offload::File>> files;
    files.push_back(offload::make_memory_file("disk"));
    offload::RecordStore disk(std::move(files), ledger);
    ScheduledEngine engine(profile, plan, *optimizer_, {threads, ledger, &disk, nullptr});
    for (UnitId u = 0; u < profile.units.size(); ++u) engine.load(u, toy::start_values());
    toy::Outcome outcome;
    toy::Trainer trainer(profile, plan, engine);
    for (int step = 0; step < 3; ++step)
      outcome.losses.push_back(trainer.step(toy::settings(0.01, 0.1, clip ? 5.0 : 0.0)));
    for (UnitId u = 0; u < profile.units.size(); ++u) engine.save(u, toy::collect(outcome));
    return outcome;
  }
  std::unique_ptr<optim::Optimizer> optimizer_ = optim::make_optimizer({});
};

INSTANTIATE_TEST_SUITE_P(Types, FrozenUnits, testing::Values(Dtype::kF32, Dtype::kBf16, Dtype::kF16),
                         [](const auto& test) { return std::string(name_of(test.param)); });

TEST_P(FrozenUnits, HaveParametersAlone) {
  const Profile all = toy::profile(2, {GetParam()}), some = frozen_profile(GetParam());
  const Layout layout(all.units);
  const auto plan_of = [&](const Profile& profile) {
    return make_plan(profile, *optimizer_, {kGiB, kGiB, 0}, everything("disk", true), {});
  };
  const Plan before = plan_of(all), after = plan_of(some);
  const std::size_t elements = layout.unit_elements(kFrozen);
  const std::size_t arrays = GetParam() == Dtype::kF32 ? 2 : 3;
  const auto saved = [&](Purpose purpose) {
    return bytes_of(before, allocator::Tier::kDisk, purpose) -
           bytes_of(after, allocator::Tier::kDisk, purpose);
  };
  EXPECT_EQ(saved(Purpose::kOptimizerState), elements * arrays * sizeof(float));
  EXPECT_EQ(saved(Purpose::kGradient), elements * sizeof(float));
  EXPECT_EQ(saved(Purpose::kParameter), 0u);
  EXPECT_EQ(before.step_bytes_written - after.step_bytes_written,
            saved(Purpose::kOptimizerState) + elements * size_of(GetParam()) * 2);
}

TEST_P(FrozenUnits, KeepTheirValuesAndTheSameBitsEverywhere) {
  for (const bool clip : {true, false}) {
    const toy::Outcome memory = trained("memory", clip);
    EXPECT_TRUE(trained("disk", clip) == memory) << "clip " << clip;
    for (const ParameterId p : {kFrozenWeight, kFrozenBias}) {
      for (std::size_t i = 0; i < memory.values[p].size(); ++i) {
        const float start = toy::start_value(p, i);
        ASSERT_EQ(memory.values[p][i], rounded(start, GetParam()));
      }
      EXPECT_TRUE(memory.states[0][p].empty());
      EXPECT_TRUE(GetParam() == Dtype::kF32 || memory.masters[p].empty());
    }
    EXPECT_NE(memory.values[0][0], toy::start_value(0, 0));
    EXPECT_FALSE(memory.states[0][0].empty());
  }
}

TEST(FrozenUnitsTest, AScheduleThatAsksForTheirGradientIsRefused) {
  Profile profile = toy::profile(2);
  profile.units[kFrozen].trainable = false;
  expect_error(ErrorCode::kInvalidArgument, {"'block.1' is frozen"}, [&] {
    make_plan(profile, *optim::make_optimizer({}), {kGiB, kGiB, 0}, {}, {});
  });
}

}  // namespace frozen_test
}  // namespace sluice::engine
