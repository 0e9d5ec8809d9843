#include "engine/planner/planner.h"
#include "spans_client.h"
#include "testing.h"

// Tests of units of a few kilobytes, which share huge pages.
namespace sluice::engine::small_units_test {

constexpr std::size_t kMany = 300;
constexpr std::size_t kUnitBytes = 64 * 64 * sizeof(float);

std::vector<ParameterSpec> parameters() {
  std::vector<ParameterSpec> all;
  for (std::size_t i = 0; i < kMany; ++i) all.push_back({fmt::format("weight.{}", i), {64, 64}});
  return all;
}

std::vector<UnitSpec> each_its_own() {
  std::vector<UnitSpec> units;
  for (const ParameterSpec& parameter : parameters())
    units.push_back({"unit " + parameter.name, {parameter}});
  return units;
}

struct Trained {
  spans::Outcome outcome;
  Plan plan;
  allocator::Ledger::Snapshot held;
};

Trained train(const spans::Case& setup, std::vector<UnitSpec> units) {
  for (UnitSpec& unit : units) unit.dtype = setup.dtype;
  Profile profile = any_order_profile(std::move(units), 1);
  profile.any_order = setup.any_order;
  const auto optimizer = optim::make_optimizer(setup.optimizer);
  PlanRequest request;
  request.clip = setup.clip;
  Trained trained;
  trained.plan = make_plan(profile, *optimizer, {kGiB, 0, 0}, request, {});
  Threads threads(2);
  allocator::Ledger ledger;
  ledger.set_budget(allocator::Tier::kHost, trained.plan.peak_memory);
  const auto engine = spans::make_engine(profile, trained.plan, *optimizer, {threads, ledger});
  spans::Client client(setup, *engine);
  client.load();
  std::vector<double> losses;
  for (int step = 0; step < 3; ++step) losses.push_back(client.step(step));
  trained.outcome = client.save();
  trained.outcome.losses = losses;
  trained.held = ledger.snapshot();
  return trained;
}

class SmallUnits : public testing::TestWithParam<std::tuple<bool, bool, Dtype>> {
 protected:
  static spans::Case setup() {
    spans::Case setup;
    std::tie(setup.any_order, setup.clip, setup.dtype) = GetParam();
    return setup;
  }
};
INSTANTIATE_TEST_SUITE_P(Clients, SmallUnits,
                         testing::Combine(testing::Bool(), testing::Bool(),
                                          testing::Values(Dtype::kF32, Dtype::kBf16)));

TEST_P(SmallUnits, HaveTheBitsOfOneLargeUnitAndTakeLittleMoreThanTheirBytes) {
  const Trained small = train(setup(), each_its_own()), large = train(setup(), {{"all", parameters()}});
  EXPECT_EQ(small.outcome, large.outcome);
  const auto host = static_cast<std::size_t>(allocator::Tier::kHost);
  EXPECT_EQ(small.held.total[host].peak, small.plan.peak_memory);
  const std::uint64_t each = setup().any_order ? allocator::kSmallestExtent : kUnitBytes;
  const auto line = static_cast<std::size_t>(allocator::Purpose::kParameter);
  // Frames for the gradients of some accesses come on top, where updates follow at once.
  EXPECT_LE(small.plan.bytes[host][line], kMany * each + 8 * kHugePage);
  EXPECT_LE(small.plan.peak_memory, 4 * kMany * each + 40 * kHugePage);
}

}  // namespace sluice::engine::small_units_test
