#include <fmt/format.h>

#include "bindings/ranks_runs.h"
#include "testing.h"

// Runs of models that are cut into the stages of a pipeline, as users start them. ranks_test.cc compares
// their bits with those of runs in which each rank has the whole model.
namespace sluice::cli::pipeline_test {

class PipelineRunsTest : public RanksTest {
 protected:
  PipelineRunsTest() : RanksTest(4) {}  // a block for each of two chunks of two stages
};

// A rank reads and receives the same bytes in each step but the first, which begins with what was loaded.
TEST_F(PipelineRunsTest, MoveWhatTheirPlansSay) {
  int runs = 0;
  for (const Partition& mesh : {Partition{3, "0", "disk", "--mesh pipeline=3 --group 1 --pipeline zb-h1"},
                                Partition{4, "2", "memory", "--mesh data=2,pipeline=2 --clip 0"},
                                Partition{2, "0", "memory", "--mesh pipeline=2 --chunks 2 --group 1"}}) {
    SCOPED_TRACE(mesh.flags);
    const bool alone = mesh.ranks < 4;  // along data
    const std::string run = "run" + std::to_string(++runs);
    std::vector<std::string> all = placed(run, mesh, 4);
    all.insert(all.end(), {"--profile", folder_ / (run + ".html")});
    succeed(all);
    for (int rank = 0; rank < mesh.ranks; ++rank) {
      const std::string name = rank == 0 ? run : run + ".rank" + std::to_string(rank);
      const Json plan = profile_of(folder_ / (name + ".html")).at("plan");
      const Json last = rows(name).back();
      const Json& step = plan.at("step");
      const auto along = [&](const char* axis) {
        return step.at("bytes_received_along").at(axis).get<std::uint64_t>();
      };
      EXPECT_EQ(along("data") + along("pipeline"), step.at("bytes_received"));
      EXPECT_EQ(along("data") == 0, alone) << name;
      if (alone) {
        EXPECT_EQ(last.at("received"), step.at("bytes_received")) << name;
      } else {  // of a table's gradient the rows of tokens that occurred
        EXPECT_LE(last.at("received"), step.at("bytes_received")) << name;
        EXPECT_GT(last.at("received").get<double>(), 0.5 * step.at("bytes_received").get<double>()) << name;
      }
      EXPECT_LE(last.at("disk_read"), step.at("bytes_read")) << name;
      EXPECT_LE(last.at("peak_memory"), plan.at("predicted_peak")) << name;
      EXPECT_GT(last.at("rank_wait_seconds"), 0) << name;
    }
  }
}

// With 1F1B a stage holds as many micro-batches as there are stages from it to the last one. Differences of
// two stages are compared, in which what every process takes beside its plan cancels out.
TEST_F(PipelineRunsTest, HoldTheMicroBatchesThatTheirPlansSay) {
  constexpr int kStages = 4;
  succeed(words("run", kStages, 1,
                "--mesh pipeline=4 --group 1 --recompute none --batch 96 --seq 64 --accumulate 4"));
  std::vector<double> stated, taken;
  for (int rank = 0; rank < kStages; ++rank) {
    const Json row = rows(rank == 0 ? "run" : "run.rank" + std::to_string(rank)).back();
    stated.push_back(row.at("predicted_peak"));
    taken.push_back(row.at("peak_memory"));
  }
  for (int stage = 0; stage + 1 < kStages; ++stage) {
    const double more = stated[stage] - stated[stage + 1];
    EXPECT_GT(more, 20 << 20) << stage;
    EXPECT_NEAR(taken[stage] - taken[stage + 1], more, 0.02 * more) << stage;
  }
}

TEST_F(PipelineRunsTest, HavePassesAndMessagesInTheirTrace) {
  const std::string trace = folder_ / "trace.json";
  succeed(words("run", 3, 2, "--mesh pipeline=3 --stages 0,1,2-3 --group 6 --trace " + trace));
  const Json file = parse_json(file_text(trace), trace);
  std::map<int, std::string> processes;
  std::map<int, std::set<std::string>> events;
  for (const Json& event : file.at("traceEvents"))
    if (event.at("name") == "process_name")
      processes[event.at("pid")] = event.at("args").at("name");
    else if (event.at("ph") == "X")
      events[event.at("pid")].insert(event.at("cat").get<std::string>() + ": " +
                                     event.at("name").get<std::string>());
  EXPECT_THAT(processes.at(2), HasSubstr(", pipeline stage 2 of 3"));
  using ::testing::IsSupersetOf;
  EXPECT_THAT(events.at(1), IsSupersetOf({"compute: forward block.0, item 1", "message: the output of item 1",
                                          "message: the output's gradient of item 0"}));
  EXPECT_THAT(events.at(2),
              IsSupersetOf({"message: the input of item 0", "message: the input's gradient of item 1",
                            "compute: backward block.1, item 1"}));
  EXPECT_THAT(events.at(3), IsSupersetOf({"compute: loss final, item 1"}));
}

// The first stage has posted the receive of its last gradient long before anybody computes that.
TEST_F(PipelineRunsTest, WaitForAStageThatComputesLongerThanTheyHavePatience) {
  succeed(
      words("run", 2, 1, "--model mini --mesh pipeline=2 --group 12 --patience 1 --seq 128 --memory 1GiB"));
}

TEST_F(PipelineRunsTest, ArePlannedAsAWhole) {
  const Json plan =
      planned(placed("plan", {6, "1", "memory", "--mesh data=2,pipeline=3 --group 2 --stages 0,1-2,3"}, 3))
          .at("pipeline");
  EXPECT_EQ(plan.at("items"), 3);  // of 12 micro-batches, which two ranks share
  ASSERT_EQ(plan.at("stages").size(), 3u);
  Json units = Json::array();
  for (const Json& stage : plan.at("stages")) units.push_back(stage.at("units"));
  EXPECT_EQ(units, Json::parse("[[[0, 2]], [[2, 4]], [[4, 6]]]"));
  EXPECT_EQ(plan.at("stages")[0].at("items_held"), 3);
  EXPECT_EQ(plan.at("stages")[2].at("items_held"), 1);
  EXPECT_GT(plan.at("bubble"), 0.2);  // (p - 1) / (m + p - 1) where stages are equal
  EXPECT_LT(plan.at("bubble"), 0.9);
}

// Both plans have the rates of one machine, since two that each measure may find others.
TEST_F(PipelineRunsTest, AreShorterInChunks) {
  std::ofstream(folder_ / "machine.json")
      << R"({"version": 2, "cores": {"usable": 2}, "memory": {"usable": "8GiB", "bandwidth": 2e10},
    "products": [{"type": "f32", "m": 1024, "n": 768, "k": 768, "flops": 2e11}], "disks": []})";
  const auto pipeline = [&](const std::string& flags) {
    return planned(placed("plan",
                          {2, "0", "memory",
                           fmt::format("--mesh pipeline=2 --group 4 --link 10Gbit/s,20us --machine {} {}",
                                       folder_ / "machine.json", flags)},
                          3))
        .at("pipeline");
  };
  const Json whole = pipeline("--stages 0-1,2-3"), parts = pipeline("--chunks 2 --stages 0,1,2,3");
  EXPECT_EQ(parts.at("chunks"), 2);
  EXPECT_EQ(parts.at("stages")[0].at("units"), Json::parse("[[0, 2], [3, 4]]"));
  EXPECT_EQ(parts.at("stages")[1].at("names"), "block.1, block.3 to final");
  EXPECT_LT(parts.at("bubble").get<double>(), whole.at("bubble").get<double>());
}

// Where stages wait for a slow disk, the blocks that compute longest are not all that counts: such stages
// would have the blocks 0 to 7, and 8 to 11.
TEST_F(PipelineRunsTest, AreCutByWhatTheirPlansTake) {
  const std::string machine = folder_ / "machine.json", disk = folder_ / "disk";
  std::filesystem::create_directory(disk);
  std::ofstream(machine)
      << R"({"version": 2, "cores": {"usable": 2}, "memory": {"usable": "8GiB", "bandwidth": 2e10},
    "products": [{"type": "f32", "m": 4096, "n": 4096, "k": 4096, "flops": 2e11}], "disks": [{"folder": ")"
      << disk << R"(", "free": "40GiB", "read": 3e8, "write": 3e8}]})";
  const auto seconds = [&](const std::string& memory, const std::string& cut) {
    std::vector<std::string> run = {"plan",   "--model",       "gpt2-124m", "--machine", machine,
                                    "--disk", disk + ":40GiB", "--memory",  memory,      "--accumulate",
                                    "16",     "--batch",       "1",         "--seq",     "256",
                                    "--mesh", "pipeline=2"};
    for (std::istringstream more(cut); more >> run.emplace_back();) {
    }
    run.pop_back();
    return planned(run).at("pipeline").at("step_seconds").get<double>();
  };
  for (const std::string memory : {"575MiB", "700MiB", "1000MiB", "6GiB"}) {
    double shortest = std::numeric_limits<double>::infinity();
    for (int end = 0; end < 11; ++end)
      shortest = std::min(shortest, seconds(memory, fmt::format("--stages 0-{},{}-11", end, end + 1)));
    EXPECT_LE(seconds(memory, ""), 1.01 * shortest) << memory;
  }
  EXPECT_LE(seconds("575MiB", ""), 0.85 * seconds("575MiB", "--stages 0-7,8-11"));
  EXPECT_LE(seconds("575MiB", "--chunks 2"), seconds("575MiB", "--chunks 2 --stages 0-1,2-5,6-8,9-11"));
}

TEST_F(PipelineRunsTest, AreRefusedWithWhatIsWrong) {
  expect_refused({
      {2, "--mesh pipeline=3", {"--mesh pipeline=3 is of 3 ranks", "--ranks is 2"}},
      {5, "--mesh pipeline=5", {"5 stages is asked for", "4 blocks"}},
      {2,
       "--mesh pipeline=2 --stages 0,1,2-3",
       {"--stages '0,1,2-3' has 3 groups of blocks", "2 stages along pipeline", "give 2"}},
      {2, "--mesh pipeline=2 --chunks 3", {"2 stages of 3 chunks each (--chunks)", "4 blocks"}},
      {2,
       "--mesh pipeline=2 --chunks 2 --stages 0-1,2-3",
       {"has 2 groups of blocks", "2 stages along pipeline of 2 chunks each (--chunks)", "give 4"}},
      {2, "--mesh pipeline=2 --chunks 0", {"--chunks: '0' is not a whole number from 1 on"}},
      {2, "--mesh pipeline=2 --chunks -1", {"--chunks: '-1' is not a whole number from 1 on"}},
      {2, "--mesh pipeline=2 --chunks 1025", {"chunks must be from 1 to 1024"}},
      {2, "--mesh pipeline=2 --stages 0,1,2,3,4", {"goes on with '4' after block 3", "last one"}},
      {2, "--chunks 2", {"--chunks 2", "give --mesh pipeline=P"}},
      {2, "--mesh pipeline=2 --chunks 2 --pipeline zb-h1", {"--pipeline zb-h1", "--chunks is 2"}},
      {2, "--mesh pipeline=2 --stages 0-1,1-3", {"'1-3'", "blocks from 2 on"}},
      {2, "--mesh pipeline=2 --stages 0,1", {"ends with block 1"}},
      {2, "--stages 0,1-2", {"give --mesh pipeline=P", "--stage, without an s"}},
      {2, "--pipeline gpipe", {"--pipeline gpipe", "give --mesh pipeline=P"}},
      {2, "--mesh experts=2", {"'experts'", "data, pipeline, tensor, sequence"}},
      {2, "--mesh pipeline=2 --group 13", {"a group of 13", "a step has 12"}},
      {8, "--mesh data=4,pipeline=2 --accumulate 6", {"accumulate", "4 ranks cannot share"}},
  });
}

TEST_F(PipelineRunsTest, NameTheStageThatDoesNotFit) {
  expect_refusal(words("run", 3, 1, "--mesh pipeline=3 --stages 0,1,2-3 --memory 40MiB"), 3,
                 {"pipeline stage 1 of 3 (embedding to block.0): ", "other --stages may fit"});
  const Outcome any = run_sluice(words("run", 3, 1, "--mesh pipeline=3 --memory 20MiB"));
  EXPECT_EQ(any.status, 3);
  EXPECT_THAT(any.error, ::testing::AnyOf(HasSubstr("cuts of the model were tried, and none fits"),
                                          HasSubstr("no other cut of the model can fit")));
}

}  // namespace sluice::cli::pipeline_test
