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
// The cells of tests/campaigns/rank_matrix.py have every two of cut, order, ZeRO's stage, place, optimizer
// and number of ranks; these have types, groups, recomputation and stated stages besides.
INSTANTIATE_TEST_SUITE_P(
    Partitions, TwinsOfRanksTest,
    ::testing::Values(Partition{3, "1", "disk", "--optimizer muon --dtype bf16"},
                      Partition{4, "3", "disk", "--optimizer adamw --state 8bit --dtype bf16 --clip 0"},
                      Partition{2, "2", "disk", "--optimizer lion --dtype f16 --initial-scale 1e30"}));
INSTANTIATE_TEST_SUITE_P(
    Pipelines, TwinsOfRanksTest,
    ::testing::Values(
        Partition{2, "0", "disk",
                  "--mesh pipeline=2 --optimizer adamw --state 8bit --dtype bf16 --master none --group 5"},
        Partition{4, "2", "disk",
                  "--mesh data=2,pipeline=2 --optimizer adafactor --dtype f16 --pipeline gpipe --group 1"},
        Partition{4, "0", "memory",
                  "--mesh data=2,pipeline=2 --optimizer lion --stages 0,1-3 --eval-every 2"},
        Partition{4, "3", "memory",
                  "--mesh data=2,pipeline=2 --optimizer muon --pipeline zb-h1 --recompute full"}));
// Of 12 micro-batches each of 2 and 4 ranks gives two sums, and each of 3 ranks one.
INSTANTIATE_TEST_SUITE_P(
    Reproducible, TwinsOfRanksTest,
    ::testing::Values(
        Partition{4, "2", "disk", "--reproducible --optimizer adamw --clip 0 --group 1"},
        Partition{6, "3", "memory",
                  "--reproducible --mesh data=2,pipeline=3 --optimizer adamw --dtype bf16 --master none "
                  "--pipeline zb-h1 --group 2"},
        Partition{2, "3", "disk",
                  "--reproducible --mesh tensor=2 --optimizer adamw --dtype bf16 --master none --group 5"},
        Partition{6, "2", "disk",
                  "--reproducible --mesh tensor=2,data=3 --optimizer adamw --state 8bit --dtype f16"},
        Partition{4, "2", "disk",
                  "--reproducible --mesh pipeline=2,tensor=2 --optimizer muon --pipeline zb-h1"}));
INSTANTIATE_TEST_SUITE_P(
    Long, TwinsOfRanksTest,
    ::testing::Values(
        Partition{2, "3", "memory", "--optimizer adafactor --dtype bf16 --master none"},
        Partition{3, "0", "memory", "--mesh pipeline=3 --optimizer muon --dtype f16 --initial-scale 1e30"},
        Partition{4, "3", "disk",
                  "--mesh data=2,pipeline=2 --optimizer adamw --dtype bf16 --recompute full --chunks 2"},
        Partition{3, "0", "disk",
                  "--mesh pipeline=3 --optimizer adafactor --dtype bf16 --pipeline zb-h1 --clip 0"},
        Partition{3, "3", "memory", "--reproducible --optimizer adamw --state 8bit --dtype bf16"},
        Partition{2, "0", "memory",
                  "--reproducible --mesh tensor=2 --optimizer lion --eval-every 2 --recompute full"},
        Partition{4, "1", "memory", "--reproducible --mesh data=2,tensor=2 --optimizer adafactor --clip 0"}));

TEST_P(TwinsOfRanksTest, HaveTheBitsOfRanksThatHaveEverything) {
  expect_done(run_sluice(placed("whole", whole_of(GetParam()), 3)));
  expect_done(run_sluice(placed("parts", GetParam(), 3)));
  EXPECT_EQ(losses("parts"), losses("whole"));
  EXPECT_TRUE(tensors("parts", 3) == tensors("whole", 3));
}

TEST_F(RanksTest, HaveNoMetricsBesideAPipeOrADevice) {
  std::vector<std::string> all = words("run", 2, 2, "");
  *(std::ranges::find(all, "--metrics") + 1) = "/dev/null";
  expect_done(run_sluice(all));
  EXPECT_FALSE(std::filesystem::exists("/dev/null.rank1"));
}

TEST_F(RanksTest, LearnWhatOneRankLearns) {
  expect_done(run_sluice(words("alone", 1, 3, "--eval-every 3")));
  expect_done(run_sluice(words("three", 3, 3, "--eval-every 3 --stage 3")));
  ASSERT_EQ(losses("three").size(), 3u);
  EXPECT_EQ(losses("three")[0], losses("alone")[0]);  // losses are added in the order of the micro-batches
  EXPECT_NEAR(losses("three")[2], losses("alone")[2], 1e-4);
  EXPECT_NE(losses("three")[2], losses("three")[0]);
}

// What one rank has on disk, another has in memory, or whole; and all go on from the same files.
TEST_F(RanksTest, SaveAndLoadShardsOnDisk) {
  expect_done(run_sluice(words("saved", 4, 2, "--stage 3" + on_disk())));
  expect_done(run_sluice(words("memory", 4, 2, "--stage 3")));
  EXPECT_TRUE(tensors("saved", 2) == tensors("memory", 2));
  for (const std::string& flags : {" --stage 3" + on_disk(), std::string(" --stage 0")}) {
    const std::string name = "at" + flags.substr(9, 1);
    std::filesystem::create_directory(folder_ / name);
    std::filesystem::copy(folder_ / "saved/step-00000002", folder_ / (name + "/step-00000002"),
                          std::filesystem::copy_options::recursive);
    std::filesystem::copy_file(folder_ / "saved.jsonl", folder_ / (name + ".jsonl"));
    expect_done(run_sluice(words(name, 3, 3, "--resume" + flags)));
  }
  EXPECT_TRUE(tensors("at3", 3) == tensors("at0", 3));
}

// Each rank, with its shards on disk: what it takes of memory and disk, and what it moves in a step.
TEST_F(RanksTest, TakeAndMoveWhatThePlanSaysWithShardsOnDisk) {
  const std::string flags = "--stage 3 --group 6" + on_disk();
  const Outcome outcome = run_sluice([&] {
    std::vector<std::string> all = words("none", 2, 3, flags + " --json");
    all[0] = "plan";
    return all;
  }());
  expect_done(outcome);
  const Json plan = Json::parse(outcome.out);
  for (const Json& unit : plan.at("units")) EXPECT_EQ(unit.value("shard", "disk"), "disk");
  const Outcome run = run_sluice(words("run", 2, 7, flags + " --eval-every 3"));
  expect_done(run);
  EXPECT_THAT(run.out, HasSubstr("units (4 of them on disk)"));
  const auto planned = [&](const char* what) { return plan.at("step").at(what).get<double>(); };
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
    EXPECT_GE(read, 0.5 * planned("bytes_read")) << name;
    EXPECT_LE(read, 1.06 * planned("bytes_read_apart")) << name;
    EXPECT_LE(written, 1.06 * planned("bytes_written")) << name;
    EXPECT_GE(received, 0.5 * planned("bytes_received")) << name;
    EXPECT_LE(received, 1.2 * planned("bytes_received")) << name;  // with two evaluations
  }
}

// What is gathered after a step may come in the next one, so that three steps are taken together.
TEST_F(RanksTest, TakeAndReceiveWhatThePlanSays) {
  for (const std::string stage : {"1", "3", "0 --reproducible --group 1", "2 --reproducible --clip 0"}) {
    const std::string flags = "--stage " + stage;
    const Outcome plan = run_sluice([&] {
      std::vector<std::string> all = words("none", 4, 3, flags);
      all[0] = "plan";
      all.push_back("--json");
      return all;
    }());
    expect_done(plan);
    const double planned = Json::parse(plan.out).at("step").at("bytes_received").get<double>();
    expect_done(run_sluice(words("run" + flags, 4, 4, flags)));
    double received = 0;
    for (const Json& row : rows("run" + flags)) {
      EXPECT_LE(row.at("peak_memory"), row.at("predicted_peak")) << flags;
      if (row.at("step") > 1) received += row.at("received").get<double>() / 3;
    }
    // At stage 3 some parameters may still be there when they are needed again. Of the embedding's rows the
    // plan counts one for each token, and tokens occur more than once.
    EXPECT_GE(received, (stage == "3" ? 0.5 : 0.8) * planned) << flags;
    EXPECT_LE(received, 1.06 * planned) << flags;
  }
}

TEST_F(RanksTest, HaveOneTraceAndAProfileEach) {
  expect_done(run_sluice(
      words("traced", 3, 4,
            "--stage 2 --trace " + (folder_ / "trace.json") + " --profile " + (folder_ / "profile.html"))));
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
    const Outcome trace = run_sluice({"inspect", "--json", folder_ / ("trace" + name + ".json")});
    EXPECT_EQ(trace.status, 0) << trace.error;
    EXPECT_THAT(trace.out, HasSubstr("compute"));
    EXPECT_THAT(file_text(folder_ / ("profile" + name + ".html")), HasSubstr("not finite"));
  }
}

// Each writes what it has taken and received itself, also after it has gone on.
TEST_F(RanksTest, EachHaveMetrics) {
  expect_done(run_sluice(words("run", 3, 2, "--stage 2")));
  expect_done(run_sluice(words("run", 3, 4, "--stage 2 --resume")));
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
  expect_done(run_sluice(words("run", 3, 4, "--save-every 2")));
  std::filesystem::remove_all(folder_ / "run/step-00000004");
  const Outcome fewer = run_sluice(words("run", 2, 3, "--resume"));
  expect_done(fewer);
  EXPECT_THAT(fewer.error, HasSubstr("run.rank2.jsonl"));
  EXPECT_EQ(losses("run.rank2").size(), 2u);
  expect_done(run_sluice(words("run", 3, 4, "--resume")));
  const std::vector<Json> own = rows("run.rank2");
  ASSERT_EQ(own.size(), 3u);  // steps 1, 2 and 4
  EXPECT_EQ(own[2].at("step"), 4);
}

// A rank that waits for another one's rows makes final what has ended, since the other may wait for its
// update.
TEST_F(RanksTest, WithUpdatesInRoundsAndWithoutClippingGoOn) {
  expect_done(run_sluice(words("run", 2, 4, "--stage 1 --clip 0 --patience 20 --optimizer adafactor")));
}

TEST_F(RanksTest, ThatCannotBeAreRefused) {
  const auto expect_refused = [&](int ranks, const std::string& flags, const std::string& part,
                                  bool told_once = false) {
    const Outcome outcome = run_sluice(words("refused", ranks, 3, flags));
    EXPECT_EQ(outcome.status, 2) << outcome.error;
    EXPECT_THAT(outcome.error, HasSubstr(part));
    if (told_once) {
      EXPECT_EQ(outcome.error.find(part), outcome.error.rfind(part)) << outcome.error;
    }
    EXPECT_FALSE(std::filesystem::exists(folder_ / "refused"));
  };
  expect_refused(5, "", "give a multiple of 5", true);
  expect_refused(2, "--stage 4", "stage 4");
  const Outcome small = run_sluice(words("small", 2, 3, "", "20MiB"));
  EXPECT_EQ(small.status, 3) << small.error;
  EXPECT_THAT(small.error, HasSubstr("does not fit in 20.0 MiB"));
}

}  // namespace sluice::cli::ranks_test
