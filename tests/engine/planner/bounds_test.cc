#include "core/bytes.h"
#include "engine/planner/placement.h"
#include "engine/planner/planner.h"
#include "engine/planner/stages.h"
#include "engine/planner/walk.h"
#include "engine/toy.h"
#include "testing.h"
#include "tests/thrown.h"

// However large a request is, its plan is made, or refused, in seconds.
namespace sluice::engine::bounds_test {

constexpr Budget kPlenty{16 * kGiB, 64 * kGiB, 0};

// A long step is not walked to its end, and has the time and the traffic of one that is.
TEST(Bounds, AStepOfManyGroupsTakesWhatAllOfItsVisitsTake) {
  const auto optimizer = optim::make_optimizer({});
  MachineRates rates;
  rates.disk_read = rates.disk_write = 1e9;
  for (const std::size_t micro_batches : {64, 65, 300}) {
    const Profile profile = toy::profile(micro_batches);
    PlanRequest request;
    request.group = request.prefetch = 1;
    request.places = toy::places("disk");
    const Plan plan = make_plan(profile, *optimizer, kPlenty, request, rates);
    request.chunk_elements = plan.chunk_elements;
    const Placement placement(profile, *optimizer, request);
    const std::vector<Visit> visits = placement.visits(plan.units, 1, placement.times(rates));
    std::uint64_t read = 0, written = 0;
    for (const Visit& visit : visits) {
      read += visit.read_bytes();
      written += visit.written_bytes();
    }
    EXPECT_EQ(plan.step_bytes_read, read) << micro_batches;
    EXPECT_EQ(plan.step_bytes_written, written) << micro_batches;
    double nearest = std::numeric_limits<double>::infinity();
    for (const std::size_t window : {2, 3}) {  // without a frame for what is written behind, and with one
      const StepTime all = walk(visits, {1, window, plan.staging_slots, false}, rates);
      nearest = std::min(nearest, std::abs(all.step - plan.time.step) / all.step);
    }
    EXPECT_LT(nearest, 1e-9) << micro_batches;
  }
}

TEST(Bounds, WhatIsBeyondThemIsRefused) {
  const auto optimizer = optim::make_optimizer({});
  PlanRequest request;
  for (const std::size_t prefetch :
       {std::size_t{0}, std::size_t{65}, std::numeric_limits<std::size_t>::max()}) {
    request.prefetch = prefetch;
    EXPECT_THAT(message_of([&] { make_plan(toy::profile(1), *optimizer, kPlenty, request, {}); }),
                ::testing::HasSubstr("a prefetch depth of " + std::to_string(prefetch)));
  }
  request.prefetch = 64;
  EXPECT_EQ(make_plan(toy::profile(1), *optimizer, kPlenty, request, {}).prefetch, 64u);
  request = {};
  EXPECT_THAT(message_of([&] { make_plan(toy::profile(1'000'001), *optimizer, kPlenty, request, {}); }),
              ::testing::HasSubstr("1000001 micro-batches"));
  const auto begin = std::chrono::steady_clock::now();
  make_plan(toy::profile(1'000'000), *optimizer, kPlenty, request, {});
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(60));
}

}  // namespace sluice::engine::bounds_test
