#include "engine/saving/shared_files.h"

#include "engine/checkpoint/support.h"
#include "engine/ranks_client.h"
#include "engine/saving/checkpoint_values.h"
#include "testing.h"

// Checkpoints that several ranks write and load.
namespace sluice::engine::wrapped {
namespace shared_files_test {

namespace fs = std::filesystem;
using Files = std::map<std::string, std::string>;

// All files of the checkpoint; the manifest has every checksum.
Files files_of(const std::string& checkpoint) {
  Files files;
  for (const auto& entry : fs::directory_iterator(checkpoint))
    files[entry.path().filename()] = read_all(entry.path());
  EXPECT_GE(files.size(), 3u);
  return files;
}

std::string save(Rank& rank, offload::IoService& io, const std::string& out, std::uint64_t step = 1) {
  allocator::Ledger ledger;
  CheckpointTensors tensors(rank.layout(), rank.optimizer());
  const std::uint64_t buffers =
      tensors.buffer_bytes(rank.communicator() == nullptr ? 1 : rank.communicator()->size());
  ledger.set_budget(allocator::Tier::kHost, buffers);  // what a plan has for it is enough
  return tensors.save(rank.engine, io, ledger, {.out = out, .step = step, .buffer_bytes = buffers},
                      {{"of", "a test"}}, {}, rank.communicator());
}

void load(Rank& rank, const std::string& checkpoint) {
  HeldFiles io;
  allocator::Ledger ledger;
  const allocator::Region memory(ledger, allocator::Purpose::kCheckpoint, 64 * kMiB);
  ReadAhead ahead(memory.bytes());
  const CheckpointReader reader(io, checkpoint, ahead);
  CheckpointValues values(reader, rank.layout(), rank.optimizer());
  rank.engine.load_all(values.source());
}

void train(Rank& rank) {
  for (int step = 0; step < 2; ++step) {
    rank.engine.begin_step({});
    rank.add_all(step);
    rank.engine.step(Rank::settings());
  }
}

// The files that these ranks save of what they load.
Files saved_again(Case setup, int ranks, std::size_t stage, const std::string& checkpoint) {
  const TemporaryFolder folder;
  setup.ranks = ranks;
  setup.stage = stage;
  const auto load_and_save = [&](Rank& rank) {
    HeldFiles io;
    load(rank, checkpoint);
    save(rank, io, folder.path());
  };
  if (ranks > 1) {
    run(setup, load_and_save);
  } else {
    Rank alone(setup, nullptr);
    load_and_save(alone);
  }
  return files_of(folder.path("step-00000001"));
}

class SharedFilesOf : public ::testing::TestWithParam<std::pair<Kind, std::size_t>> {  // and the stage
 protected:
  TemporaryFolder folder_;
};
INSTANTIATE_TEST_SUITE_P(Optimizers, SharedFilesOf,
                         ::testing::Values(std::pair(Kind{"adamw", Dtype::kF32, Dtype::kF32}, 1),
                                           std::pair(Kind{"adamw", Dtype::kBf16, Dtype::kU8}, 3),
                                           std::pair(Kind{"adafactor", Dtype::kBf16, Dtype::kF32}, 2),
                                           std::pair(Kind{"muon", Dtype::kF32, Dtype::kBf16}, 3)));

// Ranks that see different folders stream to rank 0, which writes as if alone: the other way to the same
// bytes.
TEST_P(SharedFilesOf, AreThoseThatOneRankWritesWhoeverWroteAndLoadedThem) {
  const auto& [kind, stage] = GetParam();
  Case setup = case_of(kind);
  setup.ranks = stage == 1 ? 2 : 4;
  setup.stage = stage;
  setup.place = stage % 2 == 0 ? "memory" : "disk";
  const std::string together = folder_.path("together"), apart = folder_.path("apart"),
                    elsewhere = folder_.path("elsewhere");
  run(setup, [&](Rank& rank) {
    HeldFiles io;
    train(rank);
    EXPECT_EQ(save(rank, io, together), together + "/step-00000001") << "rank " << rank.rank();
    EXPECT_EQ(save(rank, io, rank.rank() == 0 ? apart : elsewhere), apart + "/step-00000001")
        << "rank " << rank.rank();
  });
  const std::string checkpoint = together + "/step-00000001";
  const Files files = files_of(checkpoint);
  EXPECT_TRUE(files == files_of(apart + "/step-00000001"));
  EXPECT_FALSE(fs::exists(elsewhere));
  EXPECT_TRUE(files == saved_again(setup, 1, 0, checkpoint));
  EXPECT_TRUE(files == saved_again(setup, stage == 2 ? 8 : 3, (stage + 1) % 4, checkpoint));
}

TEST(SharedFiles, LetRankZeroReceiveLittle) {
  for (std::size_t stage = 0; stage <= kMostStage; ++stage) {
    const TemporaryFolder folder;
    Case setup{.ranks = 2, .stage = stage};
    run(setup, [&](Rank& rank) {
      HeldFiles io;
      const auto received = [&](const std::string& out, std::uint64_t step) {
        const std::uint64_t before = rank.communicator()->counters().received;
        save(rank, io, folder.path(out), step);
        return rank.communicator()->counters().received - before;
      };
      const std::uint64_t together = received("out", 1);
      const std::uint64_t apart = received(std::to_string(rank.rank()), 2);
      if (rank.rank() > 0) return;
      EXPECT_LT(together, stage == 0 ? 4096u : apart);
    });
  }
}

TEST(SharedFiles, AreWrittenByAllRanks) {
  for (const std::size_t stage : {0, 1}) {
    const TemporaryFolder folder;
    Case setup{.ranks = 2, .stage = stage};
    run(setup, [&](Rank& rank) {
      HeldFiles io;
      save(rank, io, folder.path());
      EXPECT_GT(io.writes.transfers, 0) << "rank " << rank.rank() << " at stage " << stage;
    });
  }
}

// Each rank's errors of a save in which one of them fails, after a save that went well.
class FailedSave : public ::testing::TestWithParam<int> {
 protected:
  std::vector<std::string> errors(std::size_t stage, int failing, int write) {
    Case setup{.ranks = 2, .stage = stage};
    std::vector<std::string> all(2);
    comm::run_communicators(comm::World::kThreads, setup.ranks, [&](comm::Communicator& communicator) {
      Rank rank(setup, &communicator);
      HeldFiles io;
      save(rank, io, folder_.path(), 1);
      io.writes.transfers = 0;
      if (rank.rank() == failing) io.fail_write = write;
      try {
        save(rank, io, folder_.path(), 2);
      } catch (const Error& error) {
        all[static_cast<std::size_t>(rank.rank())] = error.what();
      }
    });
    return all;
  }
  TemporaryFolder folder_;
};
INSTANTIATE_TEST_SUITE_P(Ranks, FailedSave, ::testing::Values(0, 1));

TEST_P(FailedSave, NamesTheRankAndLeavesTheCheckpointBefore) {
  const int failing = GetParam();
  for (const std::size_t stage : {0, 2, 3})
    for (const int write : {0, 3}) {
      SCOPED_TRACE(fmt::format("stage {}, write {}", stage, write));
      const std::vector<std::string> all = errors(stage, failing, write);
      for (int rank = 0; rank < 2; ++rank) {
        const std::string& error = all[static_cast<std::size_t>(rank)];
        EXPECT_THAT(error, HasSubstr("no space left")) << "rank " << rank;
        if (rank != failing) {
          EXPECT_THAT(error, HasSubstr("rank " + std::to_string(failing)));
        }
      }
      const CheckpointList list = list_checkpoints(folder_.path());
      ASSERT_EQ(list.whole.size(), 1u);
      EXPECT_EQ(list.whole[0].step, 1u);
      EXPECT_TRUE(list.broken.empty());
      for (const auto& entry : fs::directory_iterator(folder_.path()))
        EXPECT_EQ(entry.path().filename(), "step-00000001");
    }
}

}  // namespace shared_files_test
}  // namespace sluice::engine::wrapped
