#include "core/error.h"
#include "engine/planner/planner.h"
#include "engine/toy.h"
#include "kernels/matrix.h"
#include "offload/test_files.h"
#include "testing.h"
#include "thrown.h"

// Tests of optimizers that need whole parameters.
namespace sluice::engine::rounds_test {

std::unique_ptr<optim::Optimizer> muon() { return optim::make_optimizer({.name = "muon"}); }

// Three matrices that are too large for one bucket, and vectors between them.
std::vector<UnitSpec> large_unit() {
  UnitSpec unit{"large",
                {{"a", {40, 230'000}}, {"b", {5000}}, {"c", {230'000, 40}}, {"d", {700'000}}, {"e", {9, 9}}}};
  return {unit};
}

Profile one_unit(std::vector<UnitSpec> units) {
  Profile profile;
  profile.units = std::move(units);
  profile.unit_profiles.resize(1);
  profile.unit_profiles[0].choices = {{"none", 0, {}, 0}};
  profile.schedule = {{0, true, -1, false}, {0, true, 0, true}};
  profile.tokens = 1;
  return profile;
}

struct Ran {
  toy::Outcome outcome;
  Plan plan;
  std::uint64_t workspace = 0, staging = 0;  // the peaks
};

Ran run(const Profile& profile, const optim::Optimizer& optimizer, const PlanRequest& request) {
  Ran ran;
  ran.plan = make_plan(profile, optimizer, {2 * kGiB, kGiB, 0}, request, {});
  Threads threads(2);
  const auto library = kernels::load_matrix_library(2);
  allocator::Ledger ledger;
  offload::RecordStore disk(offload::alone(offload::make_memory_file("disk")), ledger);
  ScheduledEngine engine(profile, ran.plan, optimizer, {threads, ledger, &disk, nullptr, library.get()});
  engine.load(0, toy::start_values());
  toy::Trainer trainer(profile, ran.plan, engine);
  for (int step = 0; step < 2; ++step)
    ran.outcome.losses.push_back(trainer.step(toy::settings(0.01, 0.1, request.clip ? 5.0 : 0.0)));
  engine.save(0, toy::collect(ran.outcome, optimizer.state()));
  const auto lines = ledger.snapshot().lines[static_cast<std::size_t>(allocator::Tier::kHost)];
  ran.workspace = lines[static_cast<std::size_t>(allocator::Purpose::kWorkspace)].peak;
  ran.staging = lines[static_cast<std::size_t>(allocator::Purpose::kStaging)].peak;
  return ran;
}

TEST(Buckets, HaveTheSameBitsOnDiskAndTakeWhatIsPlanned) {
  const Profile profile = one_unit(large_unit());
  const auto optimizer = muon();
  PlanRequest request;
  request.clip = false;
  request.places = toy::places("memory");
  const Ran memory = run(profile, *optimizer, request);
  request.places = toy::places("disk");
  const Ran disk = run(profile, *optimizer, request);
  EXPECT_TRUE(memory.outcome == disk.outcome);
  for (const Ran* ran : {&memory, &disk}) {
    const auto& planned = ran->plan.bytes[static_cast<std::size_t>(allocator::Tier::kHost)];
    EXPECT_EQ(ran->workspace, planned[static_cast<std::size_t>(allocator::Purpose::kWorkspace)]);
    EXPECT_EQ(ran->staging, planned[static_cast<std::size_t>(allocator::Purpose::kStaging)]);
  }
  EXPECT_EQ(memory.outcome.states[0].size(), 5u);
  EXPECT_EQ(memory.outcome.states[0][0].size(), 40u * 230'000);
  EXPECT_TRUE(memory.outcome.states[0][1].empty()) << "a vector has no momentum of Muon's";
  EXPECT_EQ(memory.outcome.states[2][3].size(), 700'000u);
  EXPECT_GE(memory.workspace, 40u * 230'000 * 4);
}

TEST(Rounds, AMatrixThatDoesNotFitIsRefusedWithWhatWouldDo) {
  const Profile profile = one_unit({{"unit", {{"small", {8, 8}}, {"large", {3000, 4000}}}}});
  const auto optimizer = muon();
  const auto peak_with = [&](std::uint64_t memory) {
    return make_plan(profile, *optimizer, {memory, kGiB, 0}, {}, {}).peak_memory;
  };
  const auto [code, text] = thrown_by([&] { peak_with(180 * kMiB); });
  EXPECT_EQ(code, ErrorCode::kBudget);
  for (const char* part : {"muon", "'large' (3000 x 4000)", "as a whole", "short by", "works by elements"})
    EXPECT_THAT(text, testing::HasSubstr(part));
  const auto at = text.find("memory=");
  ASSERT_NE(at, std::string::npos) << text;
  const std::uint64_t enough = parse_size(text.substr(at + 7, text.find("MiB", at) + 3 - at - 7));
  EXPECT_LE(peak_with(enough), enough);
  EXPECT_GT(enough, 180 * kMiB);
}

}  // namespace sluice::engine::rounds_test
