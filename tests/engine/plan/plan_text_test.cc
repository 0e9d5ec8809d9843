#include "core/bytes.h"
#include "engine/planner/planner.h"
#include "engine/toy.h"
#include "testing.h"

// The table that people read, and what programs read.
namespace sluice::engine::plan_text_test {

struct Written {
  Plan plan;
  std::string text;
  Json json;
};

Written write(const Profile& profile, const Budget& budget, const PlanRequest& request,
              const MachineRates& rates = {}) {
  const Plan plan = make_plan(profile, *optim::make_optimizer({}), budget, request, rates);
  return {plan, to_text(plan, profile, budget), to_json(plan, profile, budget)};
}

PlanRequest of_ranks(std::vector<int> hosts) {
  PlanRequest request;
  request.ranks = {0, static_cast<int>(hosts.size()), hosts};
  return request;
}

PlanRequest placed(const std::string& place) {
  PlanRequest request;
  request.places = toy::places(place);
  return request;
}

// A GPU's plan, with everything in that place.
Written of_gpu(const std::string& place) {
  return write(any_order_profile(toy::profile(1).units, 2), {kGiB, kGiB, 0, kGiB}, placed(place));
}

// A row's words begin below those of all others.
void expect_alike(const std::string& text) {
  constexpr std::size_t kColumn = 18;
  std::istringstream lines(text.substr(text.find("\n\n") + 2));
  for (std::string line; std::getline(lines, line);) {
    ASSERT_GT(line.size(), kColumn) << line;
    EXPECT_EQ(line[kColumn - 1], ' ') << line;
    EXPECT_NE(line[kColumn], ' ') << line;
  }
}

TEST(PlanText, AllRowsBeginAlike) {
  const Budget budget{kGiB, kGiB, 0};
  const Written disk = write(toy::profile(2), budget, placed("disk"));
  EXPECT_THAT(disk.text, HasSubstr("ahead             "));
  expect_alike(disk.text);
  Profile widened = toy::profile(4, {Dtype::kF16});
  widened.native_products = false;
  MachineRates rates;
  expect_alike(write(widened, budget, of_ranks({0, 0}), rates).text);
  rates.link = Link{1e9, 1e-5};
  PlanRequest hosts = of_ranks({0, 0, 1, 1});
  hosts.stage = 3;
  const Written between = write(toy::profile(4), budget, hosts, rates);
  EXPECT_GT(between.plan.step_bytes_from_hosts, 0u);
  expect_alike(between.text);
  PlanRequest waits = of_ranks({0, 0});
  waits.stage = 2;
  expect_alike(write(any_order_profile(toy::profile(1).units, 2), budget, waits).text);
  for (const char* place : {"device", "memory", "disk"}) expect_alike(of_gpu(place).text);
}

TEST(PlanText, OfAGpuSaysWhatTheDiskMoves) {
  const Written memory = of_gpu("memory"), disk = of_gpu("disk");
  EXPECT_THAT(memory.text, Not(HasSubstr("the disk")));
  EXPECT_EQ(memory.json.at("step").at("bytes_read"), 0u);
  ASSERT_GT(disk.plan.step_bytes_read, 0u);
  ASSERT_GT(disk.plan.step_bytes_written, 0u);
  EXPECT_NE(disk.plan.step_bytes_read, disk.plan.step_bytes_written);
  EXPECT_THAT(disk.text, HasSubstr(format_size(disk.plan.step_bytes_read) + " read from the disk, " +
                                   format_size(disk.plan.step_bytes_written) + " written to it"));
  EXPECT_EQ(disk.json.at("step").at("bytes_read"), disk.plan.step_bytes_read);
  EXPECT_EQ(disk.json.at("step").at("bytes_written"), disk.plan.step_bytes_written);
}

}  // namespace sluice::engine::plan_text_test
