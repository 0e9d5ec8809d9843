#include "models/run/run_ranks.h"

#include "comm/worlds.h"
#include "core/system.h"
#include "models/run/trainer.h"
#include "temporary_folder.h"
#include "testing.h"

// The ranks of a run agree on settings before they train, and tell each other about errors. Each rank is a
// thread here.
namespace sluice::models::run_ranks_test {

TrainSettings of_rank(comm::Communicator& communicator, TrainSettings s = {}) {
  s.communicator = &communicator;
  s.ranks = {communicator.rank(), communicator.size()};
  return s;
}

class RunRanksTest : public ::testing::Test {
 protected:
  RunRanksTest() { std::ofstream(folder_ / "text") << std::string(20000, 'a') << std::string(20000, 'b'); }

  TrainSettings settings() const {
    TrainSettings s;
    s.model = "tiny";
    s.data = {folder_ / "text"};
    s.tokens = "bytes";
    s.memory = std::uint64_t{2} << 30;
    s.batch = 1;
    s.accumulate = 4;
    s.length = 16;
    s.steps = 2;
    s.threads = 1;
    return s;
  }
  // Trains with two ranks, of which `change` may change the settings. Returns the error of each rank.
  std::vector<std::string> errors(const std::function<void(TrainSettings&, int rank)>& change) const {
    std::vector<std::string> all(2);
    comm::run_communicators(comm::World::kThreads, 2, [&](comm::Communicator& communicator) {
      TrainSettings s = of_rank(communicator, settings());
      change(s, communicator.rank());
      try {
        train(s, {});
      } catch (const Error& error) {
        all[static_cast<std::size_t>(communicator.rank())] = error.what();
      }
    });
    return all;
  }
  TemporaryFolder folder_;
};

TEST_F(RunRanksTest, TrainWithTheSameSettings) {
  EXPECT_EQ(errors([](TrainSettings&, int) {}), (std::vector<std::string>{"", ""}));
}

// Ranks that compute layers together do so in one order, and choose a mesh together.
TEST_F(RunRanksTest, ThatWereGivenOtherSettingsAreToldWhich) {
  using Change = std::function<void(TrainSettings&)>;
  const auto differ = [&](const std::string& part, const Change& change, const Change& all = {}) {
    for (const std::string& error : errors([&](TrainSettings&s, int rank) {
           if (all) all(s);
           if (rank == 1) change(s);
         }))
      EXPECT_THAT(error, HasSubstr(part));
  };
  differ("seed was 1 and is 7", [](TrainSettings& s) { s.seed = 7; });
  differ("steps was 2 and is 3", [](TrainSettings& s) { s.steps = 3; });
  differ("optimizer was \"adamw\" and is \"lion\"", [](TrainSettings& s) { s.optimizer.name = "lion"; });
  const std::string other = folder_ / "other";
  std::ofstream(other) << std::string(40000, 'c');
  differ("data_fingerprint was", [&](TrainSettings& s) { s.data = {other}; });
  const auto cut = [](TrainSettings& s) {
    s.mesh = comm::Mesh::parse("tensor=2");
    s.plan.group = 1;
    s.plan.recompute = "none";
  };
  differ(
      "group was 1 and is 2", [](TrainSettings& s) { s.plan.group = 2; }, cut);
  differ(
      "recompute was \"none\" and is \"full\"", [](TrainSettings& s) { s.plan.recompute = "full"; }, cut);
  differ(
      "--mesh of rank 0 is auto, and that of rank 1 is data=2",
      [](TrainSettings& s) {
        s.chooses_mesh = false;
        s.mesh = comm::Mesh::parse("data=2");
      },
      [](TrainSettings& s) { s.chooses_mesh = true; });
}

TEST_F(RunRanksTest, EndWithTheErrorOfOne) {
  const std::vector<std::string> all = errors([&](TrainSettings& s, int rank) {
    if (rank == 1) s.data = {folder_ / "missing"};
  });
  EXPECT_THAT(all[1], HasSubstr("missing"));
  EXPECT_THAT(all[0], HasSubstr("rank 1"));
  EXPECT_THAT(all[0], HasSubstr("missing"));
}

// So the program has the same exit status, whichever rank's memory is too little.
TEST_F(RunRanksTest, EndWithTheKindOfErrorOfOneWhosePlanDoesNotFit) {
  std::vector<ErrorCode> codes(2, ErrorCode::kInternal);
  comm::run_communicators(comm::World::kThreads, 2, [&](comm::Communicator& communicator) {
    TrainSettings s = of_rank(communicator, settings());
    if (communicator.rank() == 1) s.memory = std::uint64_t{1} << 20;
    try {
      train(s, {});
    } catch (const Error& error) {
      codes[static_cast<std::size_t>(communicator.rank())] = error.code();
      EXPECT_THAT(error.what(), HasSubstr("does not fit in 1.00 MiB of memory"));
    }
  });
  EXPECT_EQ(codes, (std::vector<ErrorCode>{ErrorCode::kBudget, ErrorCode::kBudget}));
}

TEST_F(RunRanksTest, AgreeOnTheHighestStageThatOneNeeds) {
  std::vector<std::string> plans(2);
  comm::run_communicators(comm::World::kThreads, 2, [&](comm::Communicator& communicator) {
    TrainSettings s = of_rank(communicator, settings());
    s.plan.stage = communicator.rank() == 1 ? 2 : 0;
    TrainEvents events;
    events.planned = [&](const std::string& table) {
      plans[static_cast<std::size_t>(communicator.rank())] = table;
    };
    train(s, events);
  });
  EXPECT_THAT(plans[0], HasSubstr("this is rank 0 of 2, at stage 2"));
}

// Rank 2 of 3 reads under the path as on a host that has a folder of its own.
TEST_F(RunRanksTest, GoOnWhereAllReadTheSameFile) {
  const auto file = [&](const char* name, const char* text) {
    std::ofstream(folder_ / name) << text;
    return folder_ / name;
  };
  const std::string path = file("file", "one"), same = file("same", "one"), other = file("other", "two");
  const auto error = [&](const std::string& of_rank_2) {
    std::array<std::string, 3> all;
    comm::run_communicators(comm::World::kThreads, 3, [&](comm::Communicator& communicator) {
      RunRanks ranks(of_rank(communicator));
      try {
        ranks.check_all_read(ranks.rank() == 2 ? of_rank_2 : path, "needs");
      } catch (const Error& thrown) {
        all[static_cast<std::size_t>(ranks.rank())] = thrown.what();
      }
    });
    EXPECT_EQ(all[0].substr(0, 20), all[2].substr(0, 20));
    EXPECT_EQ(all[0], all[1]);
    return all[0];
  };
  EXPECT_EQ(error(same), "");
  const std::string missing = error(folder_ / "missing");
  EXPECT_THAT(missing, HasSubstr("rank 2 on host '" + host_name() + "' cannot read '" + path + "'"));
  EXPECT_THAT(missing,
              HasSubstr("rank 0 on host '" + host_name() + "' has found and needs; all ranks read it"));
  EXPECT_THAT(error(other), HasSubstr("reads another '" + path + "'"));
}

TEST_F(RunRanksTest, PutTogetherWhatTheyKnow) {
  comm::run_communicators(comm::World::kThreads, 3, [&](comm::Communicator& communicator) {
    RunRanks ranks(of_rank(communicator));
    const double own = ranks.rank();
    const RunRanks::Outcome all = ranks.combine({{own, own + 0.5}, ranks.rank() == 2});
    EXPECT_EQ(all.losses, (std::vector<double>{0, 0.5, 1, 1.5, 2, 2.5}));
    EXPECT_TRUE(all.stop);
    EXPECT_EQ(ranks.sum(static_cast<std::uint64_t>(ranks.rank()) + 1), 6u);
    EXPECT_EQ(ranks.from_first("rank " + std::to_string(ranks.rank())), "rank 0");
    const std::vector<std::vector<double>> losses = {{0, 3}, {1, 4}, {2}};
    const std::vector<double>& measured = losses[static_cast<std::size_t>(ranks.rank())];
    EXPECT_EQ(ranks.mean(measured, std::vector<double>(measured.size(), 4), 5), 0.5);
  });
}

// One after another these numbers would give 1.
TEST_F(RunRanksTest, AddLossesOfPartsOfSequencesPairwise) {
  const std::vector<double> losses = {1e16, 1, -1e16, 1};
  comm::run_communicators(comm::World::kThreads, 4, [&](comm::Communicator& communicator) {
    TrainSettings s = of_rank(communicator);
    s.mesh = comm::Mesh::parse("sequence=4");
    RunRanks ranks(s);
    const double own = losses[static_cast<std::size_t>(ranks.rank())];
    EXPECT_EQ(ranks.combine({{own, 2}, false}).losses, (std::vector<double>{0, 8}));
    EXPECT_EQ(ranks.mean({own, 2}, {4, 4}, 2), 0.25);
  });
}

TEST(RunRanks, AloneSendsNothing) {
  RunRanks ranks{TrainSettings()};
  EXPECT_TRUE(ranks.is_first());
  const RunRanks::Outcome all = ranks.combine({{2.5, 1}, true});
  EXPECT_EQ(all.losses, (std::vector<double>{2.5, 1}));
  EXPECT_TRUE(all.stop);
  EXPECT_EQ(ranks.mean({1, 2}, {2, 4}, 2), 0.5);
  EXPECT_EQ(ranks.from_first("own"), "own");
}

}  // namespace sluice::models::run_ranks_test
