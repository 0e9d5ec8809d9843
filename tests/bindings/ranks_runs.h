#pragma once
#include <fmt/format.h>

#include "bindings/run_outputs.h"
#include "bindings/sluice_process.h"
#include "core/json.h"
#include "testing.h"

// Runs of several ranks of a small model, as users start them.
namespace sluice::cli {

inline std::vector<pid_t> children_of(pid_t process) {
  const std::string id = std::to_string(process);
  std::istringstream ids(file_text("/proc/" + id + "/task/" + id + "/children"));
  std::vector<pid_t> children;
  for (pid_t child; ids >> child;) children.push_back(child);
  return children;
}

// The state of a process: 'R', 'S', 'Z', ...; nothing where there is none.
inline std::optional<char> state_of(pid_t process) {
  const std::string stat = file_text("/proc/" + std::to_string(process) + "/stat");
  const std::size_t name_end = stat.rfind(')');
  return name_end == std::string::npos ? std::nullopt : std::optional(stat[name_end + 2]);
}

// Whether or not somebody has asked how it ended.
inline bool ends_within(pid_t process, std::chrono::seconds limit) {
  const auto until = std::chrono::steady_clock::now() + limit;
  while (state_of(process) && state_of(process) != 'Z') {
    if (std::chrono::steady_clock::now() > until) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return true;
}

struct Partition {
  int ranks;
  std::string stage, place, flags;
};
inline void PrintTo(const Partition& p, std::ostream* to) {
  *to << p.ranks << " ranks, stage " << p.stage << ", " << p.place << ", " << p.flags;
}

class RanksTest : public ::testing::Test {
 protected:
  explicit RanksTest(int layers = 3) {
    std::ofstream(text_) << lesson();
    std::filesystem::create_directory(folder_ / "model");
    std::filesystem::create_directory(folder_ / "disk");
    // Its blocks are larger than what is packed, and so are partitioned.
    std::ofstream(folder_ / "model/config.json") << Json({{"model_type", "llama"},
                                                          {"hidden_size", 128},
                                                          {"intermediate_size", 320},
                                                          {"num_hidden_layers", layers},
                                                          {"num_attention_heads", 4},
                                                          {"num_key_value_heads", 2},
                                                          {"max_position_embeddings", 512},
                                                          {"vocab_size", 1200},
                                                          {"tie_word_embeddings", true}});
  }
  // Flags take the place of those that all runs have. Without ranks the program is told of none.
  std::vector<std::string> words(const std::string& name, int ranks, int steps,
                                 const std::string& flags = "") const {
    const std::string of_ranks = ranks > 0 ? fmt::format("--ranks {} ", ranks) : "";
    return tiny_training(text_, folder_ / name, steps,
                         {{"--model", folder_ / "model", "--tokens", "bytes", "--accumulate", "12",
                           "--threads", "1", "--metrics", folder_ / (name + ".jsonl")},
                          words_of(of_ranks + flags)});
  }
  std::vector<std::string> placed(const std::string& name, const Partition& p, int steps) const {
    std::string flags = p.flags;
    if (p.ranks > 1) flags += " --stage " + p.stage;
    for (const char* part : {"parameters", "gradients", "state"})
      flags += std::string(" --place-") + part + " " + p.place;
    if (p.place == "disk") flags += " --disk " + (folder_ / "disk");
    return words(name, p.ranks, steps, flags);
  }
  std::string on_disk() const {
    return " --place-parameters disk --place-gradients disk --place-state disk --disk " + (folder_ / "disk");
  }
  // Returns the program's plan for a run.
  static Json planned(std::vector<std::string> run) {
    run[0] = "plan";
    run.push_back("--json");
    return Json::parse(succeed(run));
  }
  struct Refused {
    int ranks;
    std::string flags;
    std::vector<std::string> parts;  // of the error
    int status = 2;
  };
  // A plan refuses by the same code as a run, and starts no ranks; the first case is also that of a run,
  // which leaves nothing.
  void expect_refused(const std::vector<Refused>& cases) const {
    for (const Refused& c : cases)
      for (const char* command : {"plan", "train"}) {
        if (command == std::string("train") && &c != cases.data()) continue;
        SCOPED_TRACE(command + (" " + c.flags));
        std::vector<std::string> all = words("refused", c.ranks, 1, c.flags);
        all[0] = command;
        const Outcome outcome = run_sluice(all);
        EXPECT_EQ(outcome.status, c.status);
        for (const std::string& part : c.parts) EXPECT_THAT(outcome.error, HasSubstr(part));
        EXPECT_FALSE(std::filesystem::exists(folder_ / "refused"));
      }
  }

  std::map<std::string, std::string> tensors(const std::string& name, int step) const {
    return tensors_of(folder_ / name, step);
  }
  std::vector<Json> rows(const std::string& name) const { return rows_of(folder_ / (name + ".jsonl")); }
  std::vector<double> losses(const std::string& name) const { return losses_of(folder_ / (name + ".jsonl")); }
  TemporaryFolder folder_;
  const std::string text_ = folder_ / "lesson.txt";
};

}  // namespace sluice::cli
