#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/error.h"
#include "engine/layout/state_format.h"
#include "engine/planner/planner.h"
#include "engine/toy.h"
#include "engine/updates/buckets.h"
#include "kernels/matrix.h"
#include "offload/test_files.h"
#include "thrown.h"

// Tests of optimizers that need whole parameters, and of those that keep other arrays for some parameters.
namespace sluice::engine {
namespace rounds_test {

std::unique_ptr<optim::Optimizer> muon(Dtype state = Dtype::kF32) {
  return optim::make_optimizer({.name = "muon", .storage = {state}});
}

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
  std::vector<std::unique_ptr<offload::File>> files;
  files.push_back(offload::make_memory_file("disk"));
  offload::RecordStore disk(std::move(files), ledger);
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

TEST(Buckets, AsManyAsFitAndAtLeastOne) {
  const Layout layout(large_unit());
  const auto optimizer = muon();
  const std::vector<Bucket> buckets =
      buckets_of(layout, *optimizer, Shards(layout, *optimizer, kChunkGrain), 0);
  ASSERT_EQ(buckets.size(), 2u);
  EXPECT_EQ(buckets[0].first, 0u);
  EXPECT_EQ(buckets[0].end, 2u);
  EXPECT_EQ(buckets[1].end, 5u);
  EXPECT_EQ(buckets[1].first_chunk + 1, buckets[0].end_chunk) << "they share a chunk";
  EXPECT_EQ(buckets[0].rounds, 1);
  EXPECT_GE(buckets[0].scratch_bytes, 40u * 230'000 * 4);
  const auto elementwise = optim::make_optimizer({});
  EXPECT_EQ(buckets_of(layout, *elementwise, Shards(layout, *elementwise, kChunkGrain), 0).size(), 1u);
  EXPECT_EQ(rounds_need(layout, *elementwise).bytes, 0u);
  std::vector<UnitSpec> frozen = large_unit();
  frozen[0].trainable = false;
  const Layout still(frozen);
  EXPECT_TRUE(buckets_of(still, *optimizer, Shards(still, *optimizer, kChunkGrain), 0).empty());
}

TEST(Buckets, HaveTheSameBitsOnDiskAndTakeWhatIsPlanned) {
  const Profile profile = one_unit(large_unit());
  const auto optimizer = muon();
  PlanRequest request;
  request.places = toy::places("memory");
  const Ran memory = run(profile, *optimizer, request);
  for (const bool clip : {true, false}) {
    request.clip = clip;
    request.places = toy::places("memory");
    const Ran base = clip ? memory : run(profile, *optimizer, request);
    request.places = toy::places("disk");
    const Ran disk = run(profile, *optimizer, request);
    EXPECT_TRUE(base.outcome == disk.outcome) << "clip " << clip;
    for (const Ran* ran : {&base, &disk}) {
      const auto& planned = ran->plan.bytes[static_cast<std::size_t>(allocator::Tier::kHost)];
      EXPECT_EQ(ran->workspace, planned[static_cast<std::size_t>(allocator::Purpose::kWorkspace)]);
      EXPECT_EQ(ran->staging, planned[static_cast<std::size_t>(allocator::Purpose::kStaging)]);
    }
  }
  EXPECT_EQ(memory.outcome.states[0].size(), 5u);
  EXPECT_EQ(memory.outcome.states[0][0].size(), 40u * 230'000);
  EXPECT_TRUE(memory.outcome.states[0][1].empty()) << "a vector has no momentum of Muon's";
  EXPECT_EQ(memory.outcome.states[2][3].size(), 700'000u);
  EXPECT_GE(memory.workspace, 40u * 230'000 * 4);
}

TEST(StateFormat, EachParameterHasTheArraysThatItsOptimizerKeepsOfIt) {
  std::vector<UnitSpec> units = large_unit();
  units[0].dtype = Dtype::kBf16;
  const Layout layout(units);
  for (const Dtype type : {Dtype::kF32, Dtype::kBf16, Dtype::kU8}) {
    const auto optimizer = muon(type);
    const StateFormat format(layout, *optimizer, kChunkGrain);
    EXPECT_TRUE(format.has(1, 0));
    EXPECT_FALSE(format.has(2, 0));
    EXPECT_FALSE(format.has(1, 3));
    EXPECT_TRUE(format.has(3, 3));
    const double each =
        type == Dtype::kU8 ? 1 + 4.0 / optim::kScaleBlock : static_cast<double>(size_of(type));
    EXPECT_EQ(format.element_bytes(0), 4 + each);
    EXPECT_EQ(format.element_bytes(1), 4 + 2 * each);
    std::size_t bytes = 0;
    for (std::size_t chunk = 0; chunk < format.shards().chunks(0); ++chunk) {
      EXPECT_EQ(format.chunk_offset(0, chunk), bytes);
      bytes += format.chunk_bytes(0, chunk);
      EXPECT_LE(format.chunk_bytes(0, chunk), format.most_chunk_bytes());
      if (chunk + 1 < format.shards().chunks(0)) {
        EXPECT_EQ(format.chunk_bytes(0, chunk) % format.block_bytes(0), 0u);
      }
    }
    EXPECT_EQ(format.bytes(0), bytes);
  }
}

// All chunks of a unit have the size of the largest; little is lost where a few vectors lie in one of them.
TEST(StateFormat, LosesLittleOfABlock) {
  const Layout layout({{"block", {{"a", {1600, 4800}}, {"b", {4800}}, {"c", {1600, 1600}}, {"d", {1600}}}}});
  for (const Dtype type : {Dtype::kF32, Dtype::kBf16, Dtype::kU8}) {
    const StateFormat format(layout, *muon(type), kChunkGrain);
    double needed = 0;
    for (ParameterId p = 0; p < layout.parameters(); ++p)
      needed += format.element_bytes(p) * static_cast<double>(layout.location(p).elements);
    EXPECT_LT(static_cast<double>(format.bytes(0)), 1.04 * needed);
  }
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

}  // namespace rounds_test
}  // namespace sluice::engine
