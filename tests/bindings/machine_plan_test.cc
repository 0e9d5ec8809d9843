#include "bindings/cli/ranks.h"
#include "bindings/sluice_process.h"
#include "comm/host_links.h"
#include "comm/mpi_links.h"
#include "core/bytes.h"
#include "core/json.h"
#include "testing.h"

// Tests of `sluice plan` for another machine, and beside `sluice train` at the least memory.
namespace sluice::cli::machine_plan_test {

using Words = std::vector<std::string>;

class MachinePlan : public ::testing::Test {
 protected:
  MachinePlan() {
    std::ofstream(text_) << std::string(20000, 'x');
    std::ofstream(machine_)
        << R"({"version": 2, "cores": {"usable": 8}, "memory": {"usable": "48GiB", "bandwidth": 5e10},
      "products": [{"type": "f32", "m": 1024, "n": 768, "k": 768, "flops": 2e11}],
      "disks": [{"folder": "/not/here", "free": "4TiB", "read": 6e9, "write": 5e9}]})";
  }
  const TemporaryFolder folder_;
  const std::string text_ = folder_ / "text.txt", machine_ = folder_ / "machine.json";
};

TEST_F(MachinePlan, NeedsNothingOfThatMachineHere) {
  const std::string text = succeed({"plan", "--model", "llama-8b", "--seq", "128", "--machine", machine_});
  EXPECT_THAT(text, AllOf(StartsWith("for the machine of " + machine_), HasSubstr("s predicted"),
                          HasSubstr("not known of the machine: attention of f32")));
  const Json plan = Json::parse(succeed({"plan", "--model", "llama-8b", "--seq", "128", "--machine", machine_,
                                         "--memory", "8GiB", "--disk", "/not/here:70TiB", "--json"}));
  EXPECT_EQ(plan["machine"]["file"], machine_);
  EXPECT_EQ(plan["budget"]["memory"], 8 * kGiB);
  EXPECT_EQ(plan["budget"]["disk"], 70 * 1024 * kGiB);
}

// The memory that ranks hold to talk to each other depends on which of them share memory.
TEST_F(MachinePlan, CountsTheLinksOfRanksByTheirHosts) {
  const auto plan = [&](int ranks, int hosts) {
    return Json::parse(succeed({"plan", "--model", "tiny", "--seq", "32", "--stage", "0", "--machine",
                                machine_, "--threads", "1", "--accumulate", std::to_string(ranks), "--ranks",
                                std::to_string(ranks), "--hosts", std::to_string(hosts), "--json"}));
  };
  const auto links = [&](int ranks, int hosts) {
    return plan(ranks, hosts).at("bytes").at("host").at("base").get<std::uint64_t>();
  };
  for (const auto& [ranks, hosts] : {std::pair{4, 2}, {4, 4}, {64, 16}}) {
    const int here = ranks / hosts;
    // Beside them, what the MPI library itself holds.
    const auto library =
        static_cast<std::int64_t>(links(ranks, hosts) - links(ranks, 1)) -
        static_cast<std::int64_t>(comm::host_links_bytes(here, kRing) + comm::mpi_links_bytes(ranks)) +
        static_cast<std::int64_t>(comm::host_links_bytes(ranks, kRing));
    EXPECT_EQ(library, 12 * kMiB) << ranks << " on " << hosts;
  }
  EXPECT_EQ(plan(4, 1).at("budget").at("memory"), 12 * kGiB);
  EXPECT_EQ(plan(4, 2).at("budget").at("memory"), 24 * kGiB);
}

TEST_F(MachinePlan, HostsShareRanks) {
  const auto refused = [&](const Words& more, const char* part) {
    Words words = {"plan", "--model", "tiny", "--machine", machine_};
    words.insert(words.end(), more.begin(), more.end());
    expect_refusal(words, 2, {part});
  };
  refused({"--hosts", "4"}, "--hosts 4: say with --ranks how many ranks they share");
  refused({"--hosts", "4", "--ranks", "1"}, "--hosts 4: 1 ranks cannot be shared evenly");
  refused({"--hosts", "3", "--ranks", "4", "--accumulate", "4"},
          "--hosts 3: 4 ranks cannot be shared evenly");
}

// Along each axis of a mesh what is sent passes another link, by which ranks share a host.
TEST_F(MachinePlan, ALinkIsReadOrRefused) {
  const auto planned = [&](const Words& more) {
    Words words = {"plan", "--model",      "tiny", "--machine", machine_, "--seq",
                   "32",   "--accumulate", "4",    "--json",    "--mesh", "data=2,pipeline=2"};
    words.insert(words.end(), more.begin(), more.end());
    return run_sluice(words);
  };
  const auto refused = [&](const Words& more, const std::vector<std::string>& parts) {
    const Outcome outcome = planned(more);
    EXPECT_EQ(outcome.status, 2) << outcome.out;
    for (const std::string& part : parts) EXPECT_THAT(outcome.error, HasSubstr(part));
  };
  for (const char* flag : {"--link", "--link-host"})
    refused({flag, "100Gbit"}, {flag, "is no link", "as in 100Gbit/s,5us"});
  refused({"--link-host", "200GB/s", "--hosts", "2"}, {"--link-host", "the 2 hosts: give --link, too"});
  refused({"--link", "1GB/s", "--link", "2GB/s"}, {"--link"});
  const Outcome both = planned({"--link", "100Gbit/s,5us", "--link-host", "200GB/s,2us", "--hosts", "2"});
  EXPECT_EQ(both.status, 0) << both.error;
  const Json plan = Json::parse(both.out);
  const Json &stages = plan.at("pipeline").at("stages"), &along = plan.at("step").at("bytes_received_along");
  ASSERT_EQ(stages.size(), 2u);
  EXPECT_EQ(stages[0].at("bytes_received"), along);
  EXPECT_GT(along.at("data"), 0);
  EXPECT_GT(along.at("pipeline"), 0);
}

// The matrix library of this machine cannot tell what such products would take there.
TEST_F(MachinePlan, MayHaveInstructionsForBf16ThatThisCpuLacks) {
  const Variable cap("ONEDNN_MAX_CPU_ISA", "AVX2");
  std::ofstream(machine_)
      << R"({"version": 2, "cores": {"usable": 8}, "memory": {"usable": "48GiB", "bandwidth": 5e10},
      "bf16_products": true, "products": [{"type": "f32", "m": 1024, "n": 768, "k": 768, "flops": 2e11},
      {"type": "bf16", "m": 1024, "n": 768, "k": 768, "flops": 9e11}]})";
  const std::string plan =
      succeed({"plan", "--model", "gpt2-124m", "--dtype", "bf16", "--machine", machine_, "--seq", "128"});
  EXPECT_THAT(plan,
              HasSubstr("what the matrix library takes there for products of bf16, which counts as here"));
}

TEST_F(MachinePlan, NeedsNoData) {
  const auto plan = [&](const Words& more) {
    Words words = {"plan", "--model", "tiny", "--memory", "300MiB", "--threads", "1", "--json"};
    words.insert(words.end(), more.begin(), more.end());
    return Json::parse(succeed(words));
  };
  const Json without = plan({}), with = plan({"--data", text_});
  for (const char* purpose : {"parameter", "optimizer state"})
    EXPECT_EQ(without.at("bytes").at("host").at(purpose), with.at("bytes").at("host").at(purpose)) << purpose;
}

TEST_F(MachinePlan, AWrongFileIsRefused) {
  const Words plan = {"plan", "--model", "tiny", "--machine"};
  const auto refused = [](Words words, const Words& more, const std::string& part) {
    words.insert(words.end(), more.begin(), more.end());
    expect_refusal(words, 2, {part});
  };
  refused(plan, {folder_ / "none.json"}, "none.json");
  refused(plan, {folder_.path()}, "is not a file");
  refused(plan, {text_}, "is not valid JSON: line 1, column 1: ");
  refused(plan, {machine_, "--disk", "/other:1GiB"}, "'/other' is no disk of the machine");
  refused({"train", "--model", "tiny", "--data", text_, "--machine"}, {machine_},
          "use sluice plan --machine to plan for another");
  refused({"train", "--model", "tiny"}, {}, "--data is missing");
}

// The loops run on no wider vectors than the environment says, which doctor tells.
TEST_F(MachinePlan, ReadsWhatDoctorWrites) {
  const Outcome doctor = [] {
    const Variable limit("SLUICE_MAX_TARGET", "scalar");
    return run_sluice({"doctor", "--json"});
  }();
  EXPECT_EQ(doctor.status, 0) << doctor.error;
  EXPECT_THAT(doctor.out, HasSubstr("loops run on scalar"));
  std::ofstream(folder_ / "this.json") << doctor.out;
  const std::string plan = succeed({"plan", "--model", "tiny", "--machine", folder_ / "this.json"});
  EXPECT_THAT(plan, ::testing::Not(HasSubstr("not known")));
}

// Both must agree to the byte, although the processes differ in size.
TEST_F(MachinePlan, AgreesWithTrainAtTheLeastMemory) {
  const auto words = [&](const char* command, std::uint64_t memory) {
    Words all = words_of(std::string(command) + " --model tiny --seq 32 --steps 1 --memory " +
                         std::to_string(memory));
    all.insert(all.end(), {"--data", text_, "--disk", folder_.path() + ":256MiB"});
    return all;
  };
  // A refusal names the least, to a MiB. A plan takes less than it may, so that one for a byte less than it
  // takes is another one, or none.
  const std::string refusal = run_sluice(words("plan", 16 * kMiB)).error;
  const std::size_t at = refusal.find("--memory ");
  ASSERT_NE(at, std::string::npos) << refusal;
  std::uint64_t memory = std::stoull(refusal.substr(at + 9)) * kMiB, enough = 0;
  for (int plans = 0; plans < 30; ++plans) {
    Words all = words("plan", memory);
    all.emplace_back("--json");
    const Outcome planned = run_sluice(all);
    if (planned.status != 0) break;
    enough = Json::parse(planned.out).at("predicted_peak").get<std::uint64_t>();
    ASSERT_LE(enough, memory);
    memory = enough - 1;
  }
  ASSERT_GT(enough, 0u);
  const Outcome fits = run_sluice(words("train", enough)), is_short = run_sluice(words("train", memory));
  EXPECT_EQ(fits.status, 0) << fits.error;
  EXPECT_EQ(is_short.status, 3) << is_short.out;
}

}  // namespace sluice::cli::machine_plan_test
