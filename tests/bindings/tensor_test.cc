#include <fmt/format.h>

#include "bindings/ranks_runs.h"
#include "testing.h"

// Runs whose ranks share out each layer, as users start them.
namespace sluice::cli::tensor_test {

using TensorRunTest = RanksTest;

// A table of which each step has most rows is summed whole, so that what ranks receive does not depend on the
// data. With ZeRO some of it comes in the next step.
TEST_F(TensorRunTest, MoveAndTakeWhatTheirPlansSay) {
  const std::string path = folder_ / "model/config.json";
  Json config = parse_json(file_text(path), path);
  config["vocab_size"] = 256;
  std::ofstream(path) << config;
  const std::string in_pieces = "--reproducible --sequence-grain 4 --seq 512 --model " + (folder_ / "model");
  for (const auto& [ranks, axes, flags] :
       {std::tuple(3, "tensor=3", std::string("--model tiny --seq 32 --accumulate 64")),
        {4, "data=2,tensor=2", "--model tiny --seq 32 --accumulate 64"},
        {2, "sequence=2", "--model tiny --seq 256 --accumulate 8"},
        {4, "sequence=2,tensor=2", in_pieces + " --accumulate 1 --batch 8"},
        {4, "data=2,sequence=2", in_pieces + " --accumulate 8"}}) {
    SCOPED_TRACE(axes);
    const std::string run = axes;
    succeed(
        words(run, ranks, 2,
              fmt::format("{} --stage 0 --mesh {} --profile {}", flags, axes, folder_ / (run + ".html"))));
    for (int rank = 0; rank < ranks; ++rank) {
      const std::string name = rank == 0 ? run : run + ".rank" + std::to_string(rank);
      const Json plan = profile_of(folder_ / (name + ".html")).at("plan"), last = rows(name).back();
      const Json &step = plan.at("step"), &along = step.at("bytes_received_along");
      EXPECT_EQ(last.at("received"), step.at("bytes_received")) << name;
      EXPECT_EQ(along.at("data").get<std::uint64_t>() + along.at("layers").get<std::uint64_t>(),
                step.at("bytes_received"));
      EXPECT_GT(along.at("layers"), 0);
      EXPECT_LE(last.at("peak_memory"), plan.at("predicted_peak")) << name;
      EXPECT_GT(last.at("rank_wait_seconds"), 0) << name;
    }
  }
}

// Ranks with other numbers of heads recompute the same, also where each alone would choose otherwise.
TEST_F(TensorRunTest, AgreeWithUnevenPiecesInAnyMemory) {
  const std::string path = folder_ / "model/config.json";
  Json config = parse_json(file_text(path), path);
  for (const auto& [key, value] : {std::pair("hidden_size", 384),
                                   {"intermediate_size", 640},
                                   {"num_attention_heads", 3},
                                   {"num_key_value_heads", 3},
                                   {"head_dim", 128}})
    config[key] = value;
  config["max_position_embeddings"] = 256;
  std::ofstream(path) << config;
  const auto trained = [&](std::size_t memory) {
    const std::string mib = std::to_string(memory) + "MiB";
    return run_sluice(
        words(mib, 2, 1,
              fmt::format("--mesh tensor=2 --seq 256 --accumulate 2 --memory {} --disk {}:300MiB", mib,
                          folder_ / "disk")));
  };
  const std::string refusal = trained(90).error, advice = "Give --memory ";
  std::size_t least = 0;  // of both ranks
  for (std::size_t at = refusal.find(advice); at != std::string::npos; at = refusal.find(advice, at + 1))
    least = std::max<std::size_t>(least, std::stoul(refusal.substr(at + advice.size())));
  ASSERT_GT(least, 90u) << refusal;
  for (const std::size_t more : {1, 13}) {
    SCOPED_TRACE(least + more);
    const Outcome outcome = trained(least + more);
    if (outcome.status != 0) {  // with what they agree on
      EXPECT_THAT(outcome.error, HasSubstr("does not fit"));
    }
  }
  expect_done(trained(least + 40));
}

// Beside rounding (models/model/tensor_test.cc), nothing depends on where bytes live.
TEST_F(TensorRunTest, HaveTheSameBitsWithPartsOfSequencesWhereverTheBytesLive) {
  const auto trained = [&](const std::string& name, const Partition& partition) {
    succeed(placed(name, partition, 2));
  };
  const std::string flags =
      "--model tiny-llama --seq 256 --accumulate 4 --mesh sequence=2,tensor=2 --optimizer adamw --dtype bf16 "
      "--eval-every 2";
  trained("plain", {4, "0", "memory", flags});
  trained("cut", {4, "3", "disk", flags + " --recompute full --group 1"});
  EXPECT_EQ(losses("cut"), losses("plain"));
  EXPECT_TRUE(tensors("cut", 2) == tensors("plain", 2));
}

TEST_F(TensorRunTest, HaveTheirWaitsInTheTrace) {
  const std::string trace = folder_ / "trace.json";
  succeed(words("run", 2, 1, "--mesh tensor=2 --trace " + trace));
  const Json file = parse_json(file_text(trace), trace);
  std::map<int, std::string> processes;
  std::set<std::string> waits;
  for (const Json& event : file.at("traceEvents"))
    if (event.at("name") == "process_name")
      processes[event.at("pid")] = event.at("args").at("name");
    else if (event.at("ph") == "X" && event.at("pid") == 2)
      waits.insert(event.at("name"));
  EXPECT_THAT(processes.at(2), HasSubstr(", tensor 2 of 2"));
  EXPECT_THAT(waits, ::testing::IsSupersetOf({"proj", "down", "gradients of qkv", "gradients of loss"}));
}

TEST_F(TensorRunTest, AreRefusedWithWhatIsWrong) {
  expect_refused({
      {3,
       "--mesh tensor=3",
       {"3 pieces of a layer over 3 ranks along tensor", "2 key/value heads", "a multiple"}},
      {8,
       "--mesh tensor=8",
       {"8 ranks along tensor", "the model has 4 heads, of which each needs one: give fewer"}},
      {2, "--mesh tensor=4", {"--mesh tensor=4 is of 4 ranks", "--ranks is 2"}},
      {2, "--mesh tensor=2,tensor=2", {"'tensor' twice"}},
      {4, "--mesh tensor=4 --reproducible", {"4 ranks along tensor", "2 pieces (--grain)", "up to 2 ranks"}},
      {2, "--reproducible --grain 4", {"--grain 4", "up to 2", "2 key/value heads"}},
      {2, "--reproducible --grain 0", {"grain must be from 1"}},
      {2, "--reproducible --grain 1 --mesh tensor=2", {"1 pieces (--grain)", "give --grain 2"}},
      {2, "--mesh sequence=2", {"32 tokens", "2 ranks along sequence", "multiple of 256"}},
      {2,
       "--mesh sequence=2 --reproducible --seq 512",
       {"sequences over 2 ranks", "one piece (--sequence-grain)", "give --sequence-grain 4, also"}},
      {2, "--mesh sequence=2 --reproducible --seq 256", {"give --sequence-grain 2, also"}},
      {2, "--mesh sequence=2 --reproducible", {"give --sequence-grain 2, with --seq as a multiple of 256"}},
      {8,
       "--mesh sequence=8 --reproducible",
       {"no --sequence-grain does", "--seq of 1024", "the model's context is 512"}},
      {3, "--mesh sequence=3 --reproducible --sequence-grain 4", {"4 pieces", "be a power of 2"}},
      {2,
       "--mesh sequence=2 --reproducible --sequence-grain 2 --seq 256 --accumulate 257",
       {"257 micro-batches each", "takes 256", "more ranks to data", "larger --batch"}},
      {1,
       "--reproducible --sequence-grain 4",
       {"32 tokens", "4 pieces (--sequence-grain)", "multiple of 512"}},
      {1, "--reproducible --sequence-grain 4 --seq 256", {"or --sequence-grain 2"}},
      {1, "--reproducible --sequence-grain 8", {"multiple of 1024", "the model's context is 512"}},
      {1, "--reproducible --sequence-grain 3", {"sequence-grain must be 1, 2, 4, ..."}},
      {1, "--sequence-grain 4", {"--sequence-grain 4", "give --reproducible, too"}},
      {2, "--grain 2", {"--grain 2", "give --reproducible, too"}},
  });
}

}  // namespace sluice::cli::tensor_test
