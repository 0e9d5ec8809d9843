#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "bindings/cli/version.h"
#include "core/text_file.h"
#include "bindings/sluice_process.h"

namespace sluice::cli {
namespace {

using ::testing::HasSubstr;

class BadInputTest : public ::testing::Test {
 protected:
  BadInputTest() {
    std::ofstream(text_) << std::string(20000, 'x');
  }
  void expect_refused(std::vector<std::string> words, int status, const std::string& part) const {
    const Outcome outcome = run_sluice(words);
    EXPECT_EQ(outcome.status, status) << outcome.error;
    EXPECT_THAT(outcome.error, HasSubstr(part));
    EXPECT_THAT(outcome.error, HasSubstr("sluice: error: "));
  }
  void expect_train_refused(const std::vector<std::string>& words, int status, const std::string& part) const {
    std::vector<std::string> all = {"train", "--model", "tiny", "--data", text_, "--memory", "512MiB", "--seq", "32", "--steps", "2"};
    for (std::size_t i = 0; i < words.size(); ++i) {
      const auto known = std::find(all.begin(), all.end(), words[i]);
      if (words[i].starts_with("--") && known != all.end() && i + 1 < words.size()) {
        *(known + 1) = words[++i];
      } else {
        all.push_back(words[i]);
      }
    }
    expect_refused(all, status, part);
  }
  TemporaryFolder folder_;
  std::string text_ = folder_ / "text.txt";
};

TEST_F(BadInputTest, HelpAndVersionAreNoErrors) {
  EXPECT_EQ(run_sluice({"--version"}).out, fmt::format("sluice {}\n", kVersion));
  for (const std::vector<std::string>& words : std::vector<std::vector<std::string>>{
           {"--help"}, {"train", "--help"}, {"plan", "--help"}, {"generate", "--help"}, {"inspect", "--help"}, {"doctor", "--help"}}) {
    const Outcome outcome = run_sluice(words);
    EXPECT_EQ(outcome.status, 0);
    EXPECT_GT(outcome.out.size(), 100u);
  }
  EXPECT_THAT(run_sluice({"train", "--help"}).out, HasSubstr("--save-every"));
}

TEST_F(BadInputTest, TheVersionIsThatOfTheBuild) {
  EXPECT_THAT(read_text_file(std::string(SLUICE_SOURCE_DIR) + "/CMakeLists.txt"), HasSubstr(fmt::format("VERSION {}", kVersion)));
}

TEST_F(BadInputTest, WordsThatAreNotKnownNameTheNearest) {
  expect_refused({}, 2, "train");
  expect_refused({"trian"}, 2, "the nearest is train");
  expect_train_refused({"--memroy", "1GiB"}, 2, "--memory");
  expect_train_refused({"--model", "gpt2-124"}, 2, "gpt2-124m");
  expect_train_refused({"--schedule", "cosin"}, 2, "cosine");
}

TEST_F(BadInputTest, ConfigFilesAreChecked) {
  std::ofstream(folder_ / "c.json") << R"({"save_evry": 3})";
  expect_train_refused({"--config", folder_ / "c.json"}, 2, "save-every");
  std::ofstream(folder_ / "d.json") << R"({"steps": )";
  expect_train_refused({"--config", folder_ / "d.json"}, 2, "not valid JSON");
  expect_train_refused({"--config", folder_ / "nowhere.json"}, 2, "nowhere.json");
}

TEST_F(BadInputTest, SizesAndNumbersAreChecked) {
  expect_train_refused({"--memory", "12XB"}, 2, "12XB");
  expect_train_refused({"--steps", "0"}, 2, "steps");
  expect_train_refused({"--batch", "-1"}, 2, "--batch");
  expect_train_refused({"--lr", "fast"}, 2, "--lr");
  expect_train_refused({"--beta1", "1"}, 2, "beta1");
  expect_train_refused({"--keep", "0"}, 2, "keep");
  expect_train_refused({"--seq", "100000"}, 2, "context");
}

TEST_F(BadInputTest, DataIsChecked) {
  expect_train_refused({"--data", folder_ / "nowhere.txt"}, 2, "nowhere.txt");
  std::ofstream(folder_ / "empty.txt");
  expect_train_refused({"--data", folder_ / "empty.txt"}, 2, "empty.txt");
  std::ofstream(folder_ / "short.txt") << "too short";
  expect_train_refused({"--data", folder_ / "short.txt"}, 2, "short.txt");
  expect_train_refused({"--model", "gpt2-124m"}, 2, "--tokens bytes");
  std::ofstream(folder_ / "big.bin", std::ios::binary) << std::string(20000, '\x7f');  // tokens of 32639
  expect_train_refused({"--data", folder_ / "big.bin"}, 2, "big.bin");
}

TEST_F(BadInputTest, BudgetsAndDisksAreChecked) {
  expect_train_refused({"--memory", "1MiB"}, 3, "--memory");
  expect_train_refused({"--disk", folder_ / "nowhere"}, 2, "nowhere");
  expect_train_refused({"--disk", text_}, 2, "not a folder");
  expect_train_refused({"--disk", folder_.path() + ":900TiB"}, 3, "are free there");
  expect_train_refused({"--batch", "1000000", "--accumulate", "1000"}, 3, "--memory");
}

TEST_F(BadInputTest, OutputsAreChecked) {
  expect_train_refused({"--resume"}, 2, "--out");
  expect_train_refused({"--save-every", "5"}, 2, "--out");
  expect_train_refused({"--trace", folder_ / "no/where.json"}, 2, "where.json");
  expect_train_refused({"--eval-every", "1", "--held-out", "0"}, 2, "--valid");
}

TEST_F(BadInputTest, InspectAndGenerateNameWhatIsWrong) {
  expect_refused({"inspect"}, 2, "FILE");
  expect_refused({"inspect", folder_ / "nowhere"}, 2, "nowhere");
  expect_refused({"inspect", text_}, 2, "of no kind");
  expect_refused({"inspect", folder_.path()}, 2, "neither");
  std::ofstream(folder_ / "bad.safetensors") << "12345678{}";
  expect_refused({"inspect", folder_ / "bad.safetensors"}, 2, "bad.safetensors");
  std::ofstream(folder_ / "bad.jsonl") << "not json\n";
  expect_refused({"inspect", folder_ / "bad.jsonl"}, 2, "bad.jsonl");
  std::ofstream(folder_ / "bad.json") << "[1]";
  expect_refused({"inspect", folder_ / "bad.json"}, 2, "no trace");
  expect_refused({"generate"}, 2, "--checkpoint");
  expect_refused({"generate", "--checkpoint", folder_.path()}, 2, "neither");
  expect_refused({"generate", "--checkpoint", folder_ / "nowhere", "--top-p", "2"}, 2, "top-p");
}

}  // namespace
}  // namespace sluice::cli
