#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "comm/worlds.h"
#include "engine/agreement.h"
#include "engine/store/stored_shards.h"
#include "engine/toy.h"
#include "offload/records.h"
#include "offload/test_files.h"

// Ranks that follow a schedule, each a thread here, with everything in shards. Wherever these are, the bits
// are those of ranks that each have everything; and a disk that fails ends the work of all of them.
namespace sluice::engine {
namespace {

constexpr std::size_t kHost = static_cast<std::size_t>(allocator::Tier::kHost),
                      kDiskTier = static_cast<std::size_t>(allocator::Tier::kDisk);
constexpr int kRanks = 3;

struct Case {
  optim::OptimizerSettings optimizer = {};
  Dtype dtype = Dtype::kF32;
  double clip = 0;
  std::size_t group = 4;
};
void PrintTo(const Case& c, std::ostream* to) {
  *to << c.optimizer.name << ", " << name_of(c.dtype) << ", clip " << c.clip << ", groups of " << c.group;
}

struct Where {
  std::size_t stage = 3;
  const char* place = "disk";
  std::size_t pieces = StoredShards::kFewestPieces;
  offload::Faults faults = {};  // of rank 1
  std::size_t blocks = 2;       // of the model
};

struct Ran {
  toy::Outcome outcome;  // of rank 0
  std::uint64_t read = 0, planned_read = 0;
  std::uint64_t from_hosts = 0, planned_from_hosts = 0, received = 0, planned_received = 0;  // in a step
  std::size_t on_disk = 0;  // how many units have their shard of parameters there
};

std::vector<std::unique_ptr<offload::File>> faulty(offload::File& file, const offload::Faults& faults) {
  std::vector<std::unique_ptr<offload::File>> files;
  files.push_back(offload::make_faulty_file(file, faults));
  return files;
}

Ran train(comm::Communicator& communicator, const Case& c, const Where& where) {
  const Profile profile = toy::profile(4, {c.dtype}, where.blocks);
  const auto optimizer = optim::make_optimizer(c.optimizer);
  PlanRequest request;
  request.ranks = rank_of(communicator);
  request.stage = where.stage;
  request.clip = c.clip > 0;
  request.group = c.group;
  request.places = toy::places(where.place);
  Plan plan = make_plan(profile, *optimizer, {kGiB, kGiB, 0}, request, {});
  const std::uint64_t spared = plan.serving_pieces > where.pieces ? plan.serving_pieces - where.pieces : 0;
  plan.serving_pieces -= spared;
  Threads threads(1);
  allocator::Ledger ledger;
  const auto file = offload::make_memory_file("the disk");
  const bool is_faulty = communicator.rank() == 1;
  offload::RecordStore disk(faulty(*file, is_faulty ? where.faults : offload::Faults()), ledger);
  const auto products = kernels::load_matrix_library(1);
  Ran ran;
  {
    ScheduledEngine engine(profile, plan, *optimizer,
                           {threads, ledger, &disk, nullptr, products.get(), &communicator});
    for (UnitId u = 0; u < profile.units.size(); ++u) engine.load(u, toy::start_values());
    toy::Trainer trainer(profile, plan, engine);
    // As a run does, which tells the others its losses. They may be in updates meanwhile that wait for this
    // rank's.
    trainer.before_step = [&] { communicator.exchange(98, "the losses", {}, [&] { engine.serve_ranks(); }); };
    const auto counted = [&] {
      const auto wait_for_all = [&] {
        communicator.exchange(97, "what has come", {}, [&] { engine.serve_ranks(); });
      };
      wait_for_all();
      const comm::Transport::Counters found = communicator.counters();
      wait_for_all();  // so that nobody has begun more
      return found;
    };
    comm::Transport::Counters first;
    for (int step = 0; step < 3; ++step) {
      if (step == 1) first = counted();
      const std::uint64_t before = disk.counters().bytes_read;
      double norm = 0;
      ran.outcome.losses.push_back(trainer.step(toy::settings(0.01, 0.1, c.clip), &norm));
      ran.outcome.norms.push_back(norm);
      engine.settle();
      ran.read = disk.counters().bytes_read - before;
    }
    const comm::Transport::Counters last = counted();
    ran.received = (last.received - first.received) / 2;
    ran.from_hosts = (last.received_from_hosts - first.received_from_hosts) / 2;
    for (UnitId u = 0; u < profile.units.size(); ++u)
      engine.save(u, communicator.rank() == 0 ? toy::collect(ran.outcome, optimizer->state()) : UnitSink{});
    communicator.barrier(99, "the end of a test");
  }
  ran.planned_read = plan.step_bytes_read;
  ran.planned_received = plan.step_bytes_received;
  ran.planned_from_hosts = plan.step_bytes_from_hosts;
  ran.on_disk = static_cast<std::size_t>(std::ranges::count(plan.units, true, &UnitPlan::shard_on_disk));
  // The model itself would take its activations and its workspace.
  const auto snapshot = ledger.snapshot();
  EXPECT_EQ(snapshot.total[kDiskTier].peak, plan.disk_bytes);
  EXPECT_EQ(snapshot.total[kHost].peak + round_up(plan.workspace_bytes, kHugePage) +
                plan.bytes[kHost][static_cast<std::size_t>(allocator::Purpose::kActivation)] +
                round_up((plan.serving_pieces + spared) * StoredShards::kPiece, kHugePage) -
                round_up(plan.serving_pieces * StoredShards::kPiece, kHugePage),
            plan.peak_memory);
  return ran;
}

std::vector<Ran> train_all(const Case& c, const Where& where, comm::World world = comm::World::kThreads,
                           int ranks = kRanks) {
  std::vector<Ran> all(static_cast<std::size_t>(ranks));
  comm::run_communicators(world, ranks, [&](comm::Communicator& communicator) {
    all[static_cast<std::size_t>(communicator.rank())] = train(communicator, c, where);
  });
  return all;
}

class ScheduledRanksTest : public ::testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(
    Cases, ScheduledRanksTest,
    ::testing::Values(Case{}, Case{.dtype = Dtype::kBf16, .clip = 1},
                      Case{.optimizer = {.storage = {Dtype::kU8, false}}, .dtype = Dtype::kBf16, .group = 2},
                      Case{.optimizer = {.storage = {Dtype::kU8}}, .clip = 1},
                      Case{.optimizer = {.name = "adafactor"}, .clip = 1},
                      Case{.optimizer = {.name = "adafactor"}, .dtype = Dtype::kBf16, .clip = 1},
                      Case{.optimizer = {.name = "muon"}, .clip = 1, .group = 1},
                      Case{.optimizer = {.name = "muon", .storage = {Dtype::kF32, false}},
                           .dtype = Dtype::kBf16,
                           .clip = 1}));

TEST_P(ScheduledRanksTest, HaveTheBitsOfRanksThatHaveEverything) {
  const toy::Outcome whole = train_all(GetParam(), {0, "memory"})[0].outcome;
  const std::vector<Ran> in_memory = train_all(GetParam(), {3, "memory"});
  EXPECT_TRUE(in_memory[0].outcome == whole);
  EXPECT_EQ(in_memory[0].on_disk, 0u);
  const std::vector<Ran> on_disk = train_all(GetParam(), {3, "disk"});
  EXPECT_TRUE(on_disk[0].outcome == whole);
  EXPECT_EQ(on_disk[0].on_disk, 3u);  // all but the unit that is too small to be cut
  // Through a single piece of memory, from a disk that takes its time on one rank.
  const std::vector<Ran> slow = train_all(GetParam(), {3, "disk", 1, {.delay_microseconds = 500}});
  EXPECT_TRUE(slow[0].outcome == whole);
  for (const auto* all : {&on_disk, &slow})
    for (const Ran& ran : *all) {
      // Less is read where it is still there, and more where ranks come apart and do not share a read.
      EXPECT_GT(ran.read, 0u);
      EXPECT_LE(ran.read, kRanks * ran.planned_read);
    }
}

// Two hosts of two ranks, and hosts of three and two.
TEST_P(ScheduledRanksTest, HaveTheSameBitsOnSeveralHosts) {
  for (const auto& [world, ranks] : {std::pair(comm::World::kHosts, 4), {comm::World::kWideHosts, 5}}) {
    const toy::Outcome whole = train_all(GetParam(), {0, "memory"}, comm::World::kThreads, ranks)[0].outcome;
    for (const Where& where : {Where{1, "memory"}, Where{3, "memory"}, Where{3, "disk"}})
      EXPECT_TRUE(train_all(GetParam(), where, world, ranks)[0].outcome == whole)
          << ranks << " ranks, stage " << where.stage << ", " << where.place;
  }
}

// Two hosts of two ranks, and hosts of three and two. Parameters in shards that are still there when they are
// needed again are not fetched: what a rank does not receive for that, its host does not, but for the parts
// of the host's own ranks.
TEST(ScheduledRanks, ReceiveWhatTheirPlansSayFromOtherHosts) {
  for (const auto& [world, ranks] : {std::pair(comm::World::kHosts, 4), {comm::World::kWideHosts, 5}})
    for (std::size_t stage = 0; stage <= kMostStage; ++stage) {
      const std::vector<Ran> all =
          train_all({.clip = 1}, {.stage = stage, .place = "memory", .blocks = 10}, world, ranks);
      for (const int first : {0, ranks - 1}) {
        double came = 0, missing = 0, here = 0;
        const auto planned = static_cast<double>(all[static_cast<std::size_t>(first)].planned_from_hosts);
        for (int rank = 0; rank < ranks; ++rank) {
          if (comm::host_of(world, rank) != comm::host_of(world, first)) continue;
          const Ran& ran = all[static_cast<std::size_t>(rank)];
          came += static_cast<double>(ran.from_hosts);
          missing += static_cast<double>(ran.planned_received) - static_cast<double>(ran.received);
          ++here;
        }
        const std::string of = fmt::format("{} ranks, stage {}, rank {}", ranks, stage, first);
        EXPECT_GT(planned, 0) << of;
        if (stage < 3) {
          EXPECT_NEAR(missing / here, 0, 0.01 * planned) << of;
          EXPECT_NEAR(came, planned, 0.01 * planned) << of;
        } else {
          EXPECT_LE(missing / here, 0.1 * planned) << of;
          EXPECT_LE(came, planned) << of;
          EXPECT_GE(came, 0.9 * planned) << of;
          if (world == comm::World::kHosts) {  // where all ranks have equal shards, and fetch alike
            EXPECT_NEAR(came, planned - missing / here * (ranks - here) / (ranks - 1), 0.01 * planned) << of;
          }
        }
      }
    }
}

// Without clipping, one rank may be in a round of an update that another has not heard of yet, since it tells
// its losses, for which the first has no time.
TEST(ScheduledRanks, MakeGradientsFinalWhileTheyWaitForEachOther) {
  const Case c{.optimizer = {.name = "adafactor"}};
  const std::vector<Ran> whole = train_all(c, {0, "memory"});
  for (int time = 0; time < 5; ++time)
    EXPECT_TRUE(train_all(c, {3, "memory"})[0].outcome == whole[0].outcome);
}

// Wherever in a step the disk begins to fail, no rank waits for ever, and all name the one whose disk it is.
TEST(ScheduledRanks, NameTheOneWhoseDiskFails) {
  const Case c{.clip = 1};
  int failed = 0;
  for (const std::uint64_t after : {3, 9, 15, 21, 27, 33, 39, 45, 51, 57}) {
    std::vector<std::string> errors(kRanks);
    comm::run_communicators(comm::World::kThreads, kRanks, [&](comm::Communicator& communicator) {
      try {
        train(communicator, c, {3, "disk", 2, {.fail_after = after}});
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
  EXPECT_GE(failed, 5);
}

}  // namespace
}  // namespace sluice::engine
