#include "engine/scheduled_ranks.h"
#include "testing.h"

// Ranks that follow a schedule, with everything in shards, or some of it. Wherever these are, the bits are
// those of ranks that each have everything; and a disk that fails ends the work of all of them.
namespace sluice::engine::scheduled_ranks_test {

using scheduled::Case;
using scheduled::Ran;
using scheduled::Where;

constexpr int kRanks = 3;
const auto kInMemory = toy::places("memory");

std::vector<Ran> train_all(const Case& c, const Where& where, comm::World world = comm::World::kThreads,
                           int ranks = kRanks) {
  return scheduled::train_all(ranks, c, where, 3, world);
}

class ScheduledRanksTest : public ::testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(
    Cases, ScheduledRanksTest,
    ::testing::Values(Case{},
                      Case{.optimizer = {.storage = {Dtype::kU8, false}}, .dtype = Dtype::kBf16, .group = 2},
                      Case{.optimizer = {.name = "adafactor"}, .dtype = Dtype::kBf16, .clip = 1},
                      Case{.optimizer = {.name = "muon"}, .clip = 1, .group = 1}));
INSTANTIATE_TEST_SUITE_P(Long, ScheduledRanksTest,
                         ::testing::Values(Case{.dtype = Dtype::kBf16, .clip = 1},
                                           Case{.optimizer = {.storage = {Dtype::kU8}}, .clip = 1},
                                           Case{.optimizer = {.name = "adafactor"}, .clip = 1},
                                           Case{
                                               .optimizer = {.name = "muon", .storage = {Dtype::kF32, false}},
                                               .dtype = Dtype::kBf16,
                                               .clip = 1}));

// There are two hosts of two ranks, or hosts of three and two.
TEST_P(ScheduledRanksTest, HaveTheSameBitsOnSeveralHosts) {
  const bool few = GetParam().clip == 0;
  const comm::World world = few ? comm::World::kHosts : comm::World::kWideHosts;
  const int ranks = few ? 4 : 5;
  const toy::Outcome whole = train_all(GetParam(), {0, kInMemory}, comm::World::kThreads, ranks)[0].outcome;
  for (const Where& where : {Where{few ? 1u : 3u, kInMemory}, Where{3}})
    EXPECT_TRUE(train_all(GetParam(), where, world, ranks)[0].outcome == whole)
        << ranks << " ranks, stage " << *where.stage;
}

TEST_P(ScheduledRanksTest, HaveTheBitsOfRanksThatHaveEverything) {
  const toy::Outcome whole = train_all(GetParam(), {0, kInMemory})[0].outcome;
  const std::vector<Ran> in_memory = train_all(GetParam(), {3, kInMemory});
  EXPECT_TRUE(in_memory[0].outcome == whole);
  EXPECT_EQ(in_memory[0].on_disk, 0u);
  const std::vector<Ran> on_disk = train_all(GetParam(), {});
  EXPECT_TRUE(on_disk[0].outcome == whole);
  EXPECT_EQ(on_disk[0].on_disk, 3u);  // all but the unit that is too small to be cut
  // Through a single piece of memory, from a disk that takes its time on one rank.
  const std::vector<Ran> slow = train_all(GetParam(), {.pieces = 1, .faults = {.delay_microseconds = 500}});
  EXPECT_TRUE(slow[0].outcome == whole);
  for (const auto* all : {&on_disk, &slow})
    for (const Ran& ran : *all) {
      // Less is read where it is still there, and more where ranks come apart and do not share a read.
      EXPECT_GT(ran.read, 0u);
      EXPECT_LE(ran.read, ran.planned_read_apart);
    }
  // The units have any stages: the embedding, two blocks, and the final one, which is too small for its
  // parameters to be cut.
  for (const std::vector<std::size_t>& stages :
       {std::vector<std::size_t>{0, 3, 2, 1}, {3, 0, 3, 0}, {2, 3, 0, 3}, {0, 2, 1, 0}}) {
    const char* const place = stages[0] == 0 ? "disk" : "memory";
    const std::vector<Ran> mixed = train_all(GetParam(), {.places = toy::places(place), .stages = stages});
    EXPECT_TRUE(mixed[0].outcome == whole) << testing::PrintToString(stages) << " in " << place;
    for (const Ran& ran : mixed) {
      // The statistics that an optimizer keeps of a whole parameter come besides.
      if (GetParam().optimizer.name != "adamw") continue;
      EXPECT_LE(ran.received, ran.planned_received) << testing::PrintToString(stages) << " in " << place;
      // A unit that is put together may still be there when it is needed again.
      if (std::ranges::count(stages, kMostStage) == 0) {
        EXPECT_EQ(ran.received, ran.planned_received);
      }
    }
  }
}

// Shards count as out of date from the last use of their units in a step on, also where nothing changes them
// after all: a step whose gradients are too large for f16 is skipped, and the next one goes on with what
// there is. So do ranks that save after such a step.
TEST(ScheduledRanks, GoOnAfterAStepThatIsSkipped) {
  for (const char* const optimizer : {"adamw", "adafactor"}) {
    const Case c{.optimizer = {.name = optimizer},
                 .dtype = Dtype::kF16,
                 .clip = 1,
                 .group = 1,
                 .micro_batches = 2,
                 .scales = {256, 1 << 20, 256, 1 << 20}};
    const auto train = [&](const Where& where) {
      const std::vector<Ran> all = scheduled::train_all(kRanks, c, where, 4);
      for (const Ran& ran : all) EXPECT_EQ(ran.skipped, (std::vector{1, 3})) << optimizer;
      return all[0].outcome;
    };
    const toy::Outcome whole = train({0, kInMemory});
    EXPECT_TRUE(train({3, kInMemory}) == whole) << optimizer;
    EXPECT_TRUE(train({}) == whole) << optimizer << " on disk";
  }
}

// There are two hosts of two ranks, and hosts of three and two. Parameters in shards that are still there
// when they are needed again are not fetched: what a rank does not receive for that, its host does not, but
// for the parts of the host's own ranks.
TEST(ScheduledRanks, ReceiveWhatTheirPlansSayFromOtherHosts) {
  for (const auto& [world, ranks] : {std::pair(comm::World::kHosts, 4), {comm::World::kWideHosts, 5}})
    for (const std::size_t stage :
         ranks == 4 ? std::array<std::size_t, 2>{0, 3} : std::array<std::size_t, 2>{1, 3}) {
      const std::vector<Ran> all =
          train_all({.clip = 1, .blocks = 10}, {.stage = stage, .places = kInMemory}, world, ranks);
      for (const int first : {0, ranks - 1}) {
        double came = 0, missing = 0, here = 0, least = std::numeric_limits<double>::infinity();
        const auto planned = static_cast<double>(all[static_cast<std::size_t>(first)].planned_from_hosts);
        for (int rank = 0; rank < ranks; ++rank) {
          if (comm::host_of(world, rank) != comm::host_of(world, first)) continue;
          const Ran& ran = all[static_cast<std::size_t>(rank)];
          came += static_cast<double>(ran.from_hosts);
          const double own = static_cast<double>(ran.planned_received) - static_cast<double>(ran.received);
          missing += own;
          least = std::min(least, own);
          ++here;
        }
        const std::string of = fmt::format("{} ranks, stage {}, rank {}", ranks, stage, first);
        EXPECT_GT(planned, 0) << of;
        if (stage < 3) {
          EXPECT_NEAR(missing / here, 0, 0.01 * planned) << of;
          EXPECT_NEAR(came, planned, 0.01 * planned) << of;
        } else {
          EXPECT_LE(missing / here, 0.25 * planned) << of;
          EXPECT_LE(came, planned) << of;
          EXPECT_GE(came, 0.75 * planned) << of;
          // Where all have equal shards, a host lacks at most what each of its ranks still had.
          if (world == comm::World::kHosts) {
            EXPECT_GE(came, planned - least * (ranks - here) / (ranks - 1) - 0.01 * planned) << of;
          }
        }
      }
    }
}

// Where ranks give parts of gradients, no more is sent. At any stage, and on hosts, which add before they
// send, the bits are the same.
TEST(ScheduledRanks, SumAndReceiveWhatTheyWriteAlone) {
  constexpr int kFour = 4;
  for (const bool reproducible : {false, true}) {
    const std::size_t micro_batches = reproducible ? 3 : 4;
    const Case whole{.group = micro_batches, .micro_batches = micro_batches, .reproducible = reproducible};
    Case in_parts = whole;
    in_parts.in_parts = true;
    const auto [outcome, of_whole] =
        std::pair(train_all(in_parts, {0, kInMemory}, comm::World::kThreads, kFour)[0].outcome,
                  train_all(whole, {0, kInMemory}, comm::World::kThreads, kFour)[0]);
    EXPECT_FALSE(of_whole.outcome == outcome);
    for (const std::size_t stage : {0u, 1u, 3u})
      for (const comm::World world : {comm::World::kThreads, comm::World::kHosts, comm::World::kMixedHosts}) {
        const std::string of = fmt::format("stage {}, world {}", stage, static_cast<int>(world));
        const std::vector<Ran> all = train_all(in_parts, {stage, kInMemory}, world, kFour);
        EXPECT_TRUE(all[0].outcome == outcome) << of;
        for (const Ran& ran : all) {
          EXPECT_LE(ran.received, ran.planned_received) << of;
          if (stage < 3) {
            EXPECT_EQ(ran.received, ran.planned_received) << of;
          }
        }
        if (stage > 0 || world == comm::World::kHosts) continue;  // where sums of a host have all elements
        for (const Ran& ran : all) EXPECT_LT(ran.received, of_whole.received * 8 / 10) << of;
      }
  }
}

// Without clipping, one rank may be in a round of an update that another has not heard of yet, since it tells
// its losses, for which the first has no time.
TEST(ScheduledRanks, MakeGradientsFinalWhileTheyWaitForEachOther) {
  const Case c{.optimizer = {.name = "adafactor"}};
  const std::vector<Ran> whole = train_all(c, {0, kInMemory});
  for (int time = 0; time < 2; ++time)
    EXPECT_TRUE(train_all(c, {3, kInMemory})[0].outcome == whole[0].outcome);
}

// Wherever in a step the disk begins to fail, no rank waits for ever, and all name the one whose disk it is.
TEST(ScheduledRanks, NameTheOneWhoseDiskFails) {
  const Case c{.clip = 1};
  int failed = 0;
  for (const std::uint64_t after : {3, 15, 27, 39, 51}) {
    std::vector<std::string> errors(kRanks);
    comm::run_communicators(comm::World::kThreads, kRanks, [&](comm::Communicator& communicator) {
      try {
        scheduled::train(communicator, c, {.pieces = 2, .faults = {.fail_after = after}}, 3);
      } catch (const Error& error) {
        errors[static_cast<std::size_t>(communicator.rank())] = error.what();
      }
    });
    if (std::ranges::all_of(errors, &std::string::empty)) continue;
    ++failed;
    EXPECT_NE(errors[1].find("the disk"), std::string::npos) << errors[1];
    for (const int rank : {0, 2})
      EXPECT_NE(errors[static_cast<std::size_t>(rank)].find("rank 1 has failed"), std::string::npos)
          << after << ": " << errors[static_cast<std::size_t>(rank)];
  }
  EXPECT_GE(failed, 3);
}

}  // namespace sluice::engine::scheduled_ranks_test
