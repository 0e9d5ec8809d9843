#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>

#include "bindings/ranks_runs.h"

// Runs of several ranks, as users start them. Whatever is partitioned, and wherever it lies, the bits are
// those of ranks that each have everything.
namespace sluice::cli {
namespace ranks_test {

using ::testing::HasSubstr;

class PartitionTest : public RanksTest, public ::testing::WithParamInterface<Partition> {};
// In these every stage is in memory and on disk, and with the long ones every two of stage, place, optimizer
// and number of ranks are together.
INSTANTIATE_TEST_SUITE_P(
    Partitions, PartitionTest,
    ::testing::Values(Partition{3, "2", "memory", "--optimizer adamw --state 8bit --dtype bf16"},
                      Partition{4, "3", "disk", "--optimizer adamw --clip 0"},
                      Partition{3, "1", "disk", "--optimizer adafactor"},
                      Partition{4, "1", "memory", "--optimizer muon"},
                      Partition{2, "3", "memory", "--optimizer adafactor --dtype bf16 --master none"},
                      Partition{2, "2", "disk", "--optimizer lion --dtype f16 --initial-scale 1e30"}));
INSTANTIATE_TEST_SUITE_P(
    Long, PartitionTest,
    ::testing::Values(Partition{2, "1", "memory", "--optimizer adamw"},
                      Partition{4, "2", "memory", "--optimizer adafactor --beta1 0.9 --clip 0"},
                      Partition{2, "2", "disk", "--optimizer muon --state bf16 --group 6"},
                      Partition{3, "3", "memory", "--optimizer muon --dtype bf16"},
                      Partition{3, "3", "disk", "--optimizer adamw --state 8bit --group 4"},
                      Partition{4, "3", "memory", "--optimizer adamw --dtype bf16 --recompute full"},
                      Partition{3, "3", "disk", "--optimizer adafactor --dtype bf16 --master none"}));

TEST_P(PartitionTest, HasTheBitsOfRanksThatHaveEverything) {
  Partition whole = GetParam();
  whole.stage = "0";
  whole.place = "memory";
  expect_done(run_sluice(placed("whole", whole, 3)));
  expect_done(run_sluice(placed("parts", GetParam(), 3)));
  EXPECT_EQ(losses("parts"), losses("whole"));
  EXPECT_TRUE(tensors("parts", 3) == tensors("whole", 3));
}

// The two pairs above in which a group has all micro-batches write such shards.
TEST_F(RanksTest, WhatAStageKeepsOfFinalGradientsOnDiskIsAShard) {
  const auto on_disk = [&](const std::string& stage) {
    std::vector<std::string> all =
        placed("plan", {2, stage, "disk", "--optimizer adamw --group 6 --json"}, 3);
    all[0] = "plan";
    const Outcome outcome = run_sluice(all);
    EXPECT_EQ(outcome.status, 0) << outcome.error;
    return Json::parse(outcome.out).at("bytes").at("disk").at("gradient").get<double>();
  };
  const double whole = on_disk("1"), shards = on_disk("2");
  EXPECT_LT(shards, 0.7 * whole);  // the embedding has two uses, and is whole
  EXPECT_GT(shards, 0.4 * whole);
}

class ReproducibleTest : public RanksTest, public ::testing::WithParamInterface<Partition> {};
// 12 micro-batches: with 2 and 4 ranks each rank gives two sums, with 3 ranks one.
INSTANTIATE_TEST_SUITE_P(Partitions, ReproducibleTest,
                         ::testing::Values(Partition{3, "3", "memory",
                                                     "--optimizer adamw --state 8bit --dtype bf16"},
                                           Partition{4, "2", "memory", "--optimizer adamw --clip 0"},
                                           Partition{2, "3", "disk", "--optimizer adafactor"},
                                           Partition{3, "2", "disk", "--optimizer muon --group 1"}));
INSTANTIATE_TEST_SUITE_P(
    Long, ReproducibleTest,
    ::testing::Values(Partition{2, "0", "memory", "--optimizer adamw"},
                      Partition{4, "1", "memory", "--optimizer muon --dtype bf16 --master none"},
                      Partition{4, "3", "memory", "--optimizer lion --dtype f16 --group 2"}));

TEST_P(ReproducibleTest, HasTheBitsOfOneRank) {
  Partition parts = GetParam();
  parts.flags += " --reproducible";
  expect_done(run_sluice(placed("parts", parts, 3)));
  Partition alone = parts;
  alone.ranks = 1;
  alone.place = "memory";
  if (const std::size_t group = alone.flags.find("--group"); group != std::string::npos)
    alone.flags.replace(group, 9, "--group 5");
  expect_done(run_sluice(placed("alone", alone, 3)));
  EXPECT_EQ(losses("parts"), losses("alone"));
  EXPECT_TRUE(tensors("parts", 3) == tensors("alone", 3));
}

TEST_F(RanksTest, HaveNoMetricsBesideAPipeOrADevice) {
  std::vector<std::string> all = words("run", 2, 2, "");
  *(std::ranges::find(all, "--metrics") + 1) = "/dev/null";
  expect_done(run_sluice(all));
  EXPECT_FALSE(std::filesystem::exists("/dev/null.rank1"));
}

// The head alone writes the first use of a tied embedding's unit, and leaves the positions' out.
TEST_F(RanksTest, ThatAreReproducibleHaveTheBitsOfOneInUsesThatNothingWrites) {
  const auto of_gpt2 = [&](const std::string& name, int ranks, const std::string& flags) {
    std::vector<std::string> all = words(name, ranks, 2, flags + " --reproducible");
    *(std::ranges::find(all, "--model") + 1) = "tiny";
    return all;
  };
  expect_done(run_sluice(of_gpt2("parts", 2, "--stage 3")));
  for (const char* group : {"1", "4", "12"}) {  // with 4 and 12 the smaller sums have no buffer of their own
    const std::string alone = std::string("alone") + group;
    expect_done(run_sluice(of_gpt2(alone, 1, std::string("--group ") + group)));
    EXPECT_EQ(losses(alone), losses("parts"));
    EXPECT_TRUE(tensors(alone, 2) == tensors("parts", 2)) << group;
  }
}

// What is predicted is never passed, and the order is another one than that of a run that adds one after
// another.
TEST_F(RanksTest, ThatAreReproducibleTakeWhatThePlanSays) {
  for (const char* flags : {"", "--group 1", "--clip 0"}) {
    const Outcome outcome =
        run_sluice(words(std::string("run") + flags, 1, 3, std::string(flags) + " --reproducible"));
    expect_done(outcome);
    const std::size_t error = outcome.out.find(" predicted (");
    ASSERT_NE(error, std::string::npos);
    EXPECT_LE(std::stod(outcome.out.substr(error + 12)), 0.0) << outcome.out;
  }
  expect_done(run_sluice(words("folded", 1, 3, "")));
  EXPECT_EQ(losses("folded")[0], losses("run")[0]);
  EXPECT_FALSE(tensors("folded", 3) == tensors("run", 3));
}

TEST_F(RanksTest, LearnWhatOneRankLearns) {
  expect_done(run_sluice(words("alone", 1, 3, "--eval-every 3")));
  for (const int ranks : {2, 3}) {
    const std::string name = std::to_string(ranks);
    expect_done(run_sluice(words(name, ranks, 3, "--eval-every 3 --stage 3")));
    ASSERT_EQ(losses(name).size(), 3u);
    EXPECT_EQ(losses(name)[0], losses("alone")[0]);  // losses are added in the order of the micro-batches
    EXPECT_NEAR(losses(name)[2], losses("alone")[2], 1e-4);
    EXPECT_NE(losses(name)[2], losses(name)[0]);
  }
}

TEST_F(RanksTest, GoOnFromACheckpointOfAnyNumberOfRanks) {
  expect_done(run_sluice(words("straight", 3, 4, "--stage 2")));
  expect_done(run_sluice(words("stopped", 3, 2, "--stage 2")));
  expect_done(run_sluice(words("stopped", 3, 4, "--stage 3 --resume")));
  EXPECT_TRUE(tensors("stopped", 4) == tensors("straight", 4));
  for (const int ranks : {1, 4}) {
    const std::string name = "at" + std::to_string(ranks);
    std::filesystem::create_directory(folder_ / name);
    std::filesystem::copy(folder_ / "stopped/step-00000002", folder_ / (name + "/step-00000002"),
                          std::filesystem::copy_options::recursive);
    std::filesystem::copy_file(folder_ / "stopped.jsonl", folder_ / (name + ".jsonl"));
    const Outcome outcome = run_sluice(words(name, ranks, 4, "--resume"));
    EXPECT_EQ(outcome.status, 0) << outcome.error;
    EXPECT_EQ(tensors(name, 4).size(), tensors("straight", 4).size());
  }
}

// What one rank has on disk, another has in memory, or whole; and all go on from the same files.
TEST_F(RanksTest, SaveAndLoadShardsOnDisk) {
  expect_done(run_sluice(words("saved", 4, 2, "--stage 3" + on_disk())));
  expect_done(run_sluice(words("memory", 4, 2, "--stage 3")));
  EXPECT_TRUE(tensors("saved", 2) == tensors("memory", 2));
  for (const int ranks : {1, 3}) {
    std::vector<std::map<std::string, std::string>> found;
    for (const std::string& flags :
         {"--resume" + on_disk() + (ranks > 1 ? " --stage 3" : ""), std::string("--resume")}) {
      const std::string name = "at" + std::to_string(ranks) + "-" + std::to_string(found.size());
      std::filesystem::create_directory(folder_ / name);
      std::filesystem::copy(folder_ / "saved/step-00000002", folder_ / (name + "/step-00000002"),
                            std::filesystem::copy_options::recursive);
      std::filesystem::copy_file(folder_ / "saved.jsonl", folder_ / (name + ".jsonl"));
      expect_done(
          run_sluice(words(name, ranks, 4, flags + (ranks > 1 && found.size() == 1 ? " --stage 0" : ""))));
      found.push_back(tensors(name, 4));
    }
    EXPECT_TRUE(found[0] == found[1]) << ranks;
  }
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

TEST_F(RanksTest, TakeWhatThePlanSays) {
  for (const char* stage : {"0", "3"}) {
    const Outcome outcome = run_sluice(words(stage, 2, 3, std::string("--stage ") + stage));
    expect_done(outcome);
    EXPECT_THAT(outcome.out, HasSubstr(std::string("this is rank 0 of 2, at stage ") + stage));
    const std::size_t error = outcome.out.find(" predicted (");
    ASSERT_NE(error, std::string::npos);
    EXPECT_LE(std::stod(outcome.out.substr(error + 12)), 0.0) << outcome.out;
  }
}

// What is gathered after a step may come in the next one, so that five steps are taken together.
TEST_F(RanksTest, ReceiveWhatThePlanSays) {
  for (const std::string stage : {"1", "2", "3", "0 --reproducible"}) {
    const std::string flags = "--stage " + stage;
    const Outcome plan = run_sluice([&] {
      std::vector<std::string> all = words("none", 4, 3, flags);
      all[0] = "plan";
      all.push_back("--json");
      return all;
    }());
    expect_done(plan);
    const double planned = Json::parse(plan.out).at("step").at("bytes_received").get<double>();
    expect_done(run_sluice(words("run" + flags, 4, 6, flags)));
    double received = 0;
    for (const Json& row : rows("run" + flags))
      if (row.at("step") > 1) received += row.at("received").get<double>() / 5;
    // At stage 3 some parameters may still be there when they are needed again. Of the embedding's rows the
    // plan counts one for each token, and tokens occur more than once.
    EXPECT_GE(received, (stage == "3" ? 0.5 : 0.85) * planned) << flags;
    EXPECT_LE(received, 1.06 * planned) << flags;
  }
}

TEST_F(RanksTest, HaveOneTraceAndAProfileEach) {
  expect_done(run_sluice(
      words("traced", 3, 4,
            "--stage 2 --trace " + (folder_ / "trace.json") + " --profile " + (folder_ / "profile.html"))));
  EXPECT_EQ(losses("traced").size(), 4u);
  const Outcome trace = run_sluice({"inspect", "--json", folder_ / "trace.json"});
  EXPECT_EQ(trace.status, 0) << trace.error;
  EXPECT_THAT(trace.out, HasSubstr("rank wait"));
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
  for (const char* optimizer : {"adafactor", "muon"}) {
    const std::string flags = "--stage 1 --clip 0 --patience 20 --optimizer ";
    expect_done(run_sluice(words(optimizer, 2, 8, flags + optimizer)));
  }
}

TEST_F(RanksTest, ThatCannotBeAreRefused) {
  const auto expect_refused = [&](int ranks, const std::string& flags, const std::string& part) {
    const Outcome outcome = run_sluice(words("refused", ranks, 3, flags));
    EXPECT_EQ(outcome.status, 2) << outcome.error;
    EXPECT_THAT(outcome.error, HasSubstr(part));
    EXPECT_FALSE(std::filesystem::exists(folder_ / "refused"));
  };
  expect_refused(5, "", "give a multiple of 5");
  expect_refused(2, "--stage 4", "stage 4");
  const Outcome small = run_sluice(words("small", 2, 3, "", "20MiB"));
  EXPECT_EQ(small.status, 3) << small.error;
  EXPECT_THAT(small.error, HasSubstr("does not fit in 20.0 MiB"));
}

}  // namespace ranks_test
}  // namespace sluice::cli
