#pragma once
#include "bindings/run_outputs.h"
#include "bindings/sluice_process.h"
#include "core/json.h"
#include "testing.h"

// Runs of several ranks of a small model, as users start them.
namespace sluice::cli {

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
                                                          {"max_position_embeddings", 64},
                                                          {"vocab_size", 1200},
                                                          {"tie_word_embeddings", true}});
  }
  std::vector<std::string> words(const std::string& name, int ranks, int steps, const std::string& flags,
                                 const std::string& memory = "600MiB") const {
    std::vector<std::string> all =
        tiny_training(text_, folder_ / name, steps,
                      {{"--model", folder_ / "model", "--tokens", "bytes", "--accumulate", "12", "--threads",
                        "1", "--ranks", std::to_string(ranks), "--metrics", folder_ / (name + ".jsonl")}});
    *(std::ranges::find(all, "--memory") + 1) = memory;
    all.erase(all.begin() + 1, all.begin() + 3);  // the other model
    for (const std::string& word : words_of(flags)) all.push_back(word);
    return all;
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
  static void expect_done(const Outcome& outcome) {
    ASSERT_EQ(outcome.status, 0) << outcome.error << outcome.out;
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
