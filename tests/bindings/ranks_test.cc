#include <regex>

#include "bindings/ranks_runs.h"
#include "testing.h"

// Runs of several ranks, as users start them. Whatever is partitioned, and wherever it lies, the bits are
// those of ranks that each have everything.
namespace sluice::cli::ranks_test {

class TwinsOfRanksTest : public RanksTest, public ::testing::WithParamInterface<Partition> {
 protected:
  TwinsOfRanksTest() : RanksTest(4) {}  // a block for each of two chunks of two stages
  // The ranks that have everything: as many as share the micro-batches, or one where that has the same bits.
  static Partition whole_of(const Partition& parts) {
    const std::regex cuts("--(mesh|pipeline|chunks|stages|group) [^ ]+");
    Partition whole{parts.ranks, "0", "memory", std::regex_replace(parts.flags, cuts, "")};
    std::smatch data;
    if (parts.flags.find("--mesh") != std::string::npos)
      whole.ranks = std::regex_search(parts.flags, data, std::regex("data=(\\d)")) ? std::stoi(data[1]) : 1;
    if (parts.flags.find("--reproducible") != std::string::npos) whole.ranks = 1;
    return whole;
  }
};
// The cells of tests/campaigns/rank_matrix.py have every two of cut, order, ZeRO's stage, place, optimizer,
// type and number of ranks; these have groups, recomputation and stated stages besides. Of 12 micro-batches
// each of 2 and 4 ranks gives two sums where they are reproducible, and each of 3 ranks one.
INSTANTIATE_TEST_SUITE_P(
    Partitions, TwinsOfRanksTest,
    ::testing::Values(
        Partition{2, "2", "disk", "--optimizer lion --dtype f16 --initial-scale 1e30"},
        Partition{4, "2", "disk",
                  "--mesh data=2,pipeline=2 --optimizer adafactor --dtype f16 --pipeline gpipe --group 1 "
                  "--stages 0,1-3 --eval-every 2"},
        Partition{4, "3", "memory",
                  "--mesh data=2,pipeline=2 --optimizer muon --pipeline zb-h1 --recompute full"},
        Partition{4, "2", "disk", "--reproducible --optimizer adamw --clip 0 --group 1"},
        Partition{2, "3", "disk",
                  "--reproducible --mesh tensor=2 --optimizer adamw --dtype bf16 --master none --group 5"},
        Partition{4, "3", "disk",
                  "--reproducible --sequence-grain 4 --mesh sequence=2,data=2 --seq 512 --accumulate 6 "
                  "--optimizer adamw --dtype bf16 --eval-every 2 --recompute full"}));
INSTANTIATE_TEST_SUITE_P(
    Long, TwinsOfRanksTest,
    ::testing::Values(
        Partition{4, "3", "disk", "--optimizer adamw --state 8bit --dtype bf16 --clip 0"},
        Partition{6, "3", "memory",
                  "--reproducible --mesh data=2,pipeline=3 --optimizer adamw --dtype bf16 --master none "
                  "--pipeline zb-h1 --group 2"},
        Partition{4, "3", "disk",
                  "--mesh data=2,pipeline=2 --optimizer adamw --dtype bf16 --recompute full --chunks 2"},
        Partition{4, "2", "disk",
                  "--reproducible --mesh pipeline=2,tensor=2 --optimizer muon --pipeline zb-h1"},
        Partition{2, "0", "memory",
                  "--reproducible --mesh tensor=2 --optimizer lion --eval-every 2 --recompute full"},
        Partition{4, "0", "memory",
                  "--reproducible --sequence-grain 4 --mesh sequence=4 --seq 512 --accumulate 1 --batch 2 "
                  "--optimizer muon"},
        Partition{4, "2", "memory",
                  "--reproducible --sequence-grain 4 --mesh sequence=2,tensor=2 --seq 512 --accumulate 1 "
                  "--optimizer adafactor --dtype f16"},
        Partition{4, "1", "disk",
                  "--reproducible --sequence-grain 2 --mesh pipeline=2,sequence=2 --seq 256 --accumulate 5 "
                  "--optimizer lion --pipeline zb-h1"},
        Partition{4, "2", "disk",
                  "--reproducible --sequence-grain 4 --mesh sequence=4 --seq 512 --accumulate 3 "
                  "--optimizer muon --group 1"},
        Partition{2, "3", "disk",
                  "--reproducible --sequence-grain 2 --seq 256 --accumulate 4 --optimizer adamw --group 1"}));

TEST_P(TwinsOfRanksTest, HaveTheBitsOfRanksThatHaveEverything) {
  succeed(placed("whole", whole_of(GetParam()), 3));
  succeed(placed("parts", GetParam(), 3));
  EXPECT_EQ(losses("parts"), losses("whole"));
  EXPECT_TRUE(tensors("parts", 3) == tensors("whole", 3));
}

TEST_F(RanksTest, HaveNoMetricsBesideAPipeOrADevice) {
  succeed(words("run", 2, 2, "--metrics /dev/null"));
  EXPECT_FALSE(std::filesystem::exists("/dev/null.rank1"));
}

// Each rank has its shards on disk, and takes memory and disk, and moves bytes in a step, as planned.
TEST_F(RanksTest, TakeAndMoveWhatThePlanSaysWithShardsOnDisk) {
  const std::string flags = "--stage 3 --group 6" + on_disk();
  const Json plan = planned(words("none", 2, 3, flags));
  for (const Json& unit : plan.at("units")) EXPECT_EQ(unit.value("shard", "disk"), "disk");
  const Outcome run = run_sluice(words("run", 2, 7, flags + " --eval-every 3"));
  expect_done(run);
  EXPECT_THAT(run.out, HasSubstr("units (4 of them on disk)"));
  const auto stated = [&](const char* what) { return plan.at("step").at(what).get<double>(); };
  for (const char* name : {"run", "run.rank1"}) {
    double read = 0, written = 0, received = 0;
    for (const Json& row : rows(name)) {
      EXPECT_LE(row.at("peak_memory"), row.at("predicted_peak")) << name;
      if (row.at("step") == 1) continue;
      read += row.at("disk_read").get<double>() / 6;
      written += row.at("disk_written").get<double>() / 6;
      received += row.at("received").get<double>() / 6;
    }
    // Fewer bytes where a unit is still there, or a piece of it; with two evaluations.
    EXPECT_GE(read, 0.5 * stated("bytes_read")) << name;
    EXPECT_LE(read, 1.06 * stated("bytes_read_apart")) << name;
    EXPECT_LE(written, 1.06 * stated("bytes_written")) << name;
    EXPECT_GE(received, 0.5 * stated("bytes_received")) << name;
    EXPECT_LE(received, 1.2 * stated("bytes_received")) << name;  // with two evaluations
  }
}

// A gather after a step may end in the next one, so that three steps are taken together.
TEST_F(RanksTest, TakeAndReceiveWhatThePlanSays) {
  for (const std::string stage : {"1", "2 --reproducible --clip 0"}) {
    const std::string flags = "--stage " + stage;
    const double stated = planned(words("none", 4, 3, flags)).at("step").at("bytes_received").get<double>();
    succeed(words("run" + flags, 4, 4, flags));
    double received = 0;
    for (const Json& row : rows("run" + flags)) {
      EXPECT_LE(row.at("peak_memory"), row.at("predicted_peak")) << flags;
      if (row.at("step") > 1) received += row.at("received").get<double>() / 3;
    }
    // Of the embedding's rows the plan counts one for each token, and tokens occur more than once.
    EXPECT_GE(received, 0.8 * stated) << flags;
    EXPECT_LE(received, 1.06 * stated) << flags;
  }
}

TEST_F(RanksTest, HaveOneTraceAndAProfileEach) {
  succeed(
      words("traced", 3, 4,
            "--stage 2 --trace " + (folder_ / "trace.json") + " --profile " + (folder_ / "profile.html")));
  EXPECT_EQ(losses("traced").size(), 4u);
  const Outcome trace = run_sluice({"inspect", folder_ / "trace.json"});
  EXPECT_EQ(trace.status, 0) << trace.error;
  for (const char* part : {"rank wait", "rank 0 on ", "rank 1 on ", "rank 2 on "})
    EXPECT_THAT(trace.out, HasSubstr(part));
  for (const char* name : {"profile.html", "profile.rank1.html", "profile.rank2.html"})
    EXPECT_THAT(file_text(folder_ / name), HasSubstr("rank wait")) << name;
  EXPECT_THAT(file_text(folder_ / "profile.rank2.html"), HasSubstr("\"rank\":2"));
  EXPECT_FALSE(std::filesystem::exists(folder_ / "trace.rank1.json"));
}

TEST_F(RanksTest, EachWriteWhatTheyHaveAfterAnError) {
  const Outcome outcome =
      run_sluice(words("diverged", 2, 3,
                       "--stage 2 --dtype f16 --loss-scale 1e30 --trace " + (folder_ / "trace.json") +
                           " --profile " + (folder_ / "profile.html")));
  EXPECT_NE(outcome.status, 0) << outcome.error;
  EXPECT_THAT(outcome.error, HasSubstr("not finite"));
  for (const std::string name : {"", ".rank1"}) {
    const std::string trace = succeed({"inspect", "--json", folder_ / ("trace" + name + ".json")});
    EXPECT_THAT(trace, HasSubstr("compute"));
    EXPECT_THAT(file_text(folder_ / ("profile" + name + ".html")), HasSubstr("not finite"));
  }
}

// Each writes what it has taken and received itself, also after it has gone on.
TEST_F(RanksTest, EachHaveMetrics) {
  succeed(words("run", 3, 2, "--stage 2"));
  succeed(words("run", 3, 4, "--stage 2 --resume"));
  const std::vector<Json> first = rows("run");
  for (const char* name : {"run", "run.rank1", "run.rank2"}) {
    const std::vector<Json> own = rows(name);
    ASSERT_EQ(own.size(), 4u) << name;
    for (std::size_t i = 0; i < own.size(); ++i) {
      for (const char* field : {"run", "step", "loss", "gradient_norm"})
        EXPECT_EQ(own[i].at(field), first[i].at(field)) << name << " " << field;
      EXPECT_LE(own[i].at("peak_memory"), own[i].at("predicted_peak")) << name;
      EXPECT_GT(own[i].at("received"), 0) << name;
    }
  }
  EXPECT_NE(rows("run.rank1"), first);
  EXPECT_FALSE(std::filesystem::exists(folder_ / "run.rank3.jsonl"));
}

TEST_F(RanksTest, ThatTakeNoPartAnyMoreKeepNoStepsThatAreDoneAgain) {
  succeed(words("run", 3, 4, "--save-every 2"));
  std::filesystem::remove_all(folder_ / "run/step-00000004");
  const Outcome fewer = run_sluice(words("run", 2, 3, "--resume"));
  expect_done(fewer);
  EXPECT_THAT(fewer.error, HasSubstr("run.rank2.jsonl"));
  EXPECT_EQ(losses("run.rank2").size(), 2u);
  succeed(words("run", 3, 4, "--resume"));
  const std::vector<Json> own = rows("run.rank2");
  ASSERT_EQ(own.size(), 3u);  // steps 1, 2 and 4
  EXPECT_EQ(own[2].at("step"), 4);
}

TEST_F(RanksTest, ThatCannotBeAreRefused) {
  const Outcome outcome = run_sluice(words("refused", 5, 3));
  const std::string once = "give a multiple of 5";
  EXPECT_NE(outcome.error.find(once), std::string::npos) << outcome.error;
  EXPECT_EQ(outcome.error.find(once), outcome.error.rfind(once)) << outcome.error;
  expect_refused({{2, "--memory 20MiB", {"does not fit in 20.0 MiB"}, 3},
                  {5, "", {once}},
                  {2, "--stage 4", {"stage 4"}}});
}

}  // namespace sluice::cli::ranks_test
