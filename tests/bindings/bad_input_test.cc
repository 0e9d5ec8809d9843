#include <fmt/format.h>

#include "bindings/cli/version.h"
#include "bindings/sluice_process.h"
#include "core/json.h"
#include "core/text_file.h"
#include "source_folder.h"
#include "testing.h"

namespace sluice::cli::bad_input_test {

class BadInputTest : public ::testing::Test {
 protected:
  BadInputTest() { std::ofstream(text_) << std::string(20000, 'x'); }
  static void expect_refused(const std::vector<std::string>& words, int status, const std::string& part) {
    expect_refusal(words, status, {"sluice: error: ", part});
  }
  void expect_train_refused(const std::vector<std::string>& words, int status,
                            const std::string& part) const {
    const std::vector<std::string> all = {"train",  "--model", "tiny", "--data",  text_, "--memory",
                                          "512MiB", "--seq",   "32",   "--steps", "2"};
    expect_refused(with_flags(all, words), status, part);
  }
  TemporaryFolder folder_;
  std::string text_ = folder_ / "text.txt";
};

TEST_F(BadInputTest, HelpAndVersionAreNoErrors) {
  EXPECT_EQ(run_sluice({"--version"}).out, fmt::format("sluice {}\n", kVersion));
  for (const std::vector<std::string>& words : std::vector<std::vector<std::string>>{{"--help"},
                                                                                     {"train", "--help"},
                                                                                     {"plan", "--help"},
                                                                                     {"generate", "--help"},
                                                                                     {"inspect", "--help"},
                                                                                     {"doctor", "--help"}}) {
    EXPECT_GT(succeed(words).size(), 100u);
  }
  EXPECT_THAT(run_sluice({"train", "--help"}).out, HasSubstr("--save-every"));
}

TEST_F(BadInputTest, TheVersionIsThatOfTheBuild) {
  EXPECT_THAT(read_text_file(std::string(test::kSourceFolder) + "/CMakeLists.txt"),
              HasSubstr(fmt::format("VERSION {}", kVersion)));
}

TEST_F(BadInputTest, UnknownWordsGetTheNearestKnownOne) {
  expect_refused({}, 2, "train");
  expect_refused({"trian"}, 2, "the nearest is train");
  expect_train_refused({"--memroy", "1GiB"}, 2, "--memory");
  expect_train_refused({"--model", "gpt2-124"}, 2, "gpt2-124m");
  expect_train_refused({"--schedule", "cosin"}, 2, "cosine");
}

TEST_F(BadInputTest, ConfigFilesAreChecked) {
  std::ofstream(folder_ / "d.json") << R"({"steps": )";
  expect_train_refused({"--config", folder_ / "d.json"}, 2, "not valid JSON");
  expect_train_refused({"--config", folder_ / "nowhere.json"}, 2, "nowhere.json");
}

TEST_F(BadInputTest, SizesAndNumbersAreChecked) {
  expect_train_refused({"--steps", "0"}, 2, "steps");
  expect_train_refused({"--beta1", "1"}, 2, "beta1");
  expect_train_refused({"--master", "none"}, 2, "its own");
  expect_train_refused({"--momentum", "0.9"}, 2, "adamw has none");
  expect_train_refused({"--optimizer", "sgd", "--nesterov"}, 2, "without momentum");
  expect_train_refused({"--adamw-lr", "1e-3"}, 2, "adamw has none");
  expect_train_refused({"--optimizer", "muon", "--adamw-lr", "-1"}, 2, "adamw-lr");
  expect_train_refused({"--optimizer", "muon", "--lr", "0", "--adamw-lr", "1"}, 2, "larger lr");
  expect_train_refused({"--optimizer", "muon", "--muon-scale", "big"}, 2, "match_rms_adamw");
  expect_train_refused({"--keep", "0"}, 2, "keep");
  expect_train_refused({"--seq", "100000"}, 2, "context");
}

TEST_F(BadInputTest, AFlagThatIsGivenTwiceIsNamedWithBothValues) {
  expect_refused({"plan", "--model", "tiny", "--data", text_, "--steps", "3", "--steps", "4"}, 2,
                 "--steps is given 2 times (3, 4)");
  expect_refused({"plan", "--model", "tiny", "--data", text_, "--steps"}, 2, "--steps needs a value");
  succeed({"plan", "--log-level", "debug", "--model", "tiny", "--data", text_});
}

TEST_F(BadInputTest, SettingsFilesLoseNothingSilently) {
  std::ofstream(folder_ / "twice.json") << R"({"save_every": 3, "save-every": 4})";
  expect_train_refused({"--config", folder_ / "twice.json"}, 2, "are one setting");
  std::ofstream(folder_ / "size.json") << R"({"memory": 1.5})";
  expect_refused({"plan", "--model", "tiny", "--data", text_, "--config", folder_ / "size.json"}, 2,
                 "the unit is missing");
}

TEST_F(BadInputTest, TextsSayWhatToDo) {
  expect_train_refused({"--memory", "1"}, 3, "Give --memory ");
  expect_train_refused({"--recompute", "ln1+"}, 2, "lacks a name beside a +");
  expect_train_refused({"--threads", "8", "--memory", "24MiB"}, 3, "try --threads ");
  expect_train_refused({"--model", "gpt2-355m", "--tokens", "bytes", "--memory", "128MiB"}, 3,
                       "--disk FOLDER:");
  EXPECT_THAT(run_sluice({"train", "--help"}).out, HasSubstr("a multiple of 524288"));
  const std::vector<std::string> plan = {"plan", "--model", "tiny", "--data", text_, "--memory", "512MiB"};
  std::vector<std::string> saving = plan;
  saving.insert(saving.end(), {"--out", folder_ / "out", "--trace", folder_ / "trace.json"});
  EXPECT_THAT(run_sluice(saving).out, HasSubstr("for the files of checkpoints and weights, "));
  EXPECT_THAT(run_sluice(plan).out, ::testing::Not(HasSubstr("for the files of")));
}

TEST_F(BadInputTest, DataIsChecked) {
  expect_train_refused({"--data", folder_ / "nowhere.txt"}, 2, "nowhere.txt");
  std::ofstream(folder_ / "empty.txt");
  expect_train_refused({"--data", folder_ / "empty.txt"}, 2, "empty.txt");
  std::ofstream(folder_ / "short.txt") << "too short";
  expect_train_refused({"--data", folder_ / "short.txt"}, 2, "short.txt");
  expect_train_refused(
      {"--model", "gpt2-124m"}, 2,
      "--tokens bytes, or give token files (.bin) of its own tokenizer (python -m sluice tokenize");
  std::ofstream(folder_ / "big.bin", std::ios::binary) << std::string(20000, '\x7f');  // every token is 32639
  expect_train_refused({"--data", folder_ / "big.bin"}, 2, "big.bin");
  // The token is found although no window of the run contains it.
  std::string tokens(20000, '\0');
  tokens[19998] = tokens[19999] = '\x7f';
  std::ofstream(folder_ / "last.bin", std::ios::binary) << tokens;
  expect_train_refused({"--data", folder_ / "last.bin"}, 2, "token 32639 at position 9999");
  expect_train_refused({"--valid", folder_ / "last.bin"}, 2, "position 9999");
}

TEST_F(BadInputTest, BudgetsAndDisksAreChecked) {
  expect_train_refused({"--memory", "1MiB"}, 3, "--memory");
  expect_train_refused({"--disk", folder_ / "nowhere"}, 2, "nowhere");
  expect_train_refused({"--disk", text_}, 2, "not a folder");
  expect_train_refused({"--disk", folder_.path() + ":900TiB"}, 3, "are free there");
  expect_train_refused({"--disk", folder_.path() + ":0"}, 2, "lends nothing");
  expect_train_refused({"--disk", folder_.path() + ":4KiB"}, 2, "the least");
  expect_train_refused({"--disk", "/proc"}, 2, "'/proc'");
  expect_refused({"doctor", "--json", "--disk", "/proc"}, 2, "'/proc'");
  expect_train_refused({"--batch", "1000000", "--accumulate", "1000"}, 3, "--memory");
}

TEST_F(BadInputTest, OutputsAreChecked) {
  expect_train_refused({"--resume"}, 2, "--out");
  expect_train_refused({"--save-every", "5"}, 2, "--out");
  expect_train_refused({"--trace", folder_ / "no/where.json"}, 2, "where.json");
  expect_train_refused({"--eval-every", "1", "--held-out", "0"}, 2, "--valid");
  expect_refused({"plan", "--model", "tiny", "--valid", text_}, 2, "--data is not given");
}

TEST_F(BadInputTest, OutputsNeverReplaceInputsNorEachOther) {
  const std::string one = folder_ / "one", settings = folder_ / "settings.json";
  expect_train_refused({"--trace", one, "--metrics", one}, 2, "each its own");
  expect_train_refused({"--metrics", folder_ / "./text.txt"}, 2, "the file of --data");
  expect_train_refused({"--trace", text_}, 2, "the file of --data");
  std::ofstream(folder_ / "valid.txt") << std::string(2000, 'y');
  expect_train_refused({"--valid", folder_ / "valid.txt", "--trace", folder_ / "valid.txt"}, 2, "--valid");
  std::ofstream(settings) << R"({"batch": 2})";
  expect_train_refused({"--config", settings, "--metrics", settings, "--resume", "--out", one}, 2,
                       "--config");
  EXPECT_EQ(file_text(settings), R"({"batch": 2})");
  std::filesystem::create_directories(folder_ / "texts");
  std::filesystem::copy(text_, folder_ / "texts/text.txt");
  expect_train_refused({"--data", folder_ / "texts", "--metrics", folder_ / "texts/m.jsonl"}, 2,
                       "a part of the data");
  EXPECT_FALSE(std::filesystem::exists(one));
  EXPECT_FALSE(std::filesystem::exists(folder_ / "texts/m.jsonl"));
}

TEST_F(BadInputTest, OutputsThatCannotBeWrittenAreFoundBeforeAnyWork) {
  // The error comes before the plan is printed and before the model is examined.
  for (const std::string flag : {"--metrics", "--trace"}) {
    expect_refused({"train", "--model", "nowhere", "--data", text_, flag, folder_ / "no/where.json"}, 2,
                   flag + " '");
    expect_refused({"train", "--model", "nowhere", "--data", text_, flag, folder_.path()}, 2, flag + " '");
  }
}

TEST_F(BadInputTest, ARefusedRunLeavesNoFolder) {
  const std::string out = folder_ / "a/b";
  expect_train_refused({"--out", out, "--memory", "20MiB"}, 3, "--memory");
  std::ofstream(folder_ / "m.jsonl") << "{}\n";
  expect_train_refused({"--out", out, "--resume", "--metrics", folder_ / "m.jsonl"}, 2, "m.jsonl");
  EXPECT_FALSE(std::filesystem::exists(folder_ / "a"));
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
  expect_refused({"inspect", folder_ / "bad.json"}, 2, "not a trace");
  expect_refused({"generate"}, 2, "--checkpoint");
  expect_refused({"generate", "--checkpoint", folder_.path()}, 2, "neither");
  expect_refused({"generate", "--checkpoint", folder_ / "nowhere", "--top-p", "2"}, 2, "top-p");
}

TEST_F(BadInputTest, ProgramsReadErrorsAsJson) {
  const auto error_of = [](const std::vector<std::string>& words) {
    const Outcome outcome = run_sluice(words);
    return std::pair(outcome.status, Json::parse(outcome.error));
  };
  const auto missing = error_of({"inspect", "--errors", "json", folder_ / "\"nowhere\""});
  EXPECT_EQ(missing.first, 2);
  EXPECT_EQ(missing.second.at("error"), "not_found");
  EXPECT_THAT(missing.second.at("text").get<std::string>(), HasSubstr(folder_ / "\"nowhere\""));
  const auto small =
      error_of({"plan", "--errors=json", "--model", "tiny", "--data", text_, "--memory", "1MiB"});
  EXPECT_EQ(small.first, 3);
  EXPECT_EQ(small.second.at("error"), "budget");
  EXPECT_EQ(error_of({"trian", "--errors", "json"}).second.at("error"), "invalid_argument");
  EXPECT_EQ(error_of({"train", "--steps=x", "--errors=json"}).second.at("error"), "invalid_argument");
  EXPECT_EQ(error_of({"bench", "disk", "--size=x", "--errors=json"}).second.at("error"), "invalid_argument");
  expect_refused({"doctor", "--errors", "xml"}, 2, "use text, json");
}

}  // namespace sluice::cli::bad_input_test
