#include "bindings/cli/flags.h"

#include <CLI/CLI.hpp>

#include "core/error.h"
#include "testing.h"
#include "thrown.h"

namespace sluice::cli::flags_test {

struct Fields {
  std::string name, kind = "a";
  std::vector<std::string> data;
  std::uint64_t size = 0, steps = 5;
  std::optional<std::size_t> group;
  int threads = 0;
  double rate = 0.5;
  bool resume = false;
};

class FlagsTest : public ::testing::Test {
 protected:
  FlagsTest() {
    Flags flags(app_);
    app_.allow_extras();
    flags.text("--name", f_.name, "");
    flags.choice("--kind", f_.kind, {"a", "b"}, "");
    flags.texts("--data", f_.data, "");
    flags.size("--memory", f_.size, "");
    flags.whole("--save-every", f_.steps, "");
    flags.whole("--group", f_.group, "");
    flags.whole("--threads", f_.threads, "");
    flags.real("--rate", f_.rate, "");
    flags.toggle("--resume", f_.resume, "");
  }
  void parse(std::vector<std::string> words) {
    std::reverse(words.begin(), words.end());
    app_.parse(words);
    refuse_unknown(app_);
  }
  static std::string error_of(const std::function<void()>& action) { return message_of(action); }
  CLI::App app_{"", "test"};
  Fields f_;
};

TEST_F(FlagsTest, WrongValuesNameTheFlag) {
  const std::vector<std::pair<std::string, std::string>> bad = {
      {"--memory", "12XB"},   {"--memory", "0"},       {"--memory", "-1GiB"},
      {"--save-every", "-3"}, {"--save-every", "3.5"}, {"--save-every", "ten"},

      {"--rate", "fast"},     {"--rate", "nan"},       {"--rate", "1e999"},
      {"--threads", "0"},     {"--threads", "99999"},  {"--save-every", "99999999999999999999"},
      {"--kind", "c"}};
  for (const auto& [flag, value] : bad) {
    CLI::App* app = &app_;
    app->clear();
    EXPECT_THAT(error_of([&] { parse({flag + "=" + value}); }), HasSubstr(flag)) << flag << " " << value;
  }
}

TEST_F(FlagsTest, AConfigFileMayWriteDashes) {
  parse({});
  apply_config(app_, Json{{"save-every", 4}, {"resume", false}, {"data", "one"}}, "c.json");
  EXPECT_EQ(f_.steps, 4u);
  EXPECT_FALSE(f_.resume);
  EXPECT_THAT(f_.data, ElementsAre("one"));
}

TEST_F(FlagsTest, WrongConfigsAreRefused) {
  parse({});
  const auto refuse = [&](const char* text) {
    return error_of([&] { apply_config(app_, Json::parse(text), "c.json"); });
  };
  EXPECT_THAT(refuse(R"({"save_evry": 4})"),
              ::testing::AllOf(HasSubstr("c.json"), HasSubstr("save_evry"), HasSubstr("save-every")));
  EXPECT_THAT(refuse("[1]"), HasSubstr("object"));
  EXPECT_THAT(refuse(R"({"resume": 1})"), HasSubstr("resume"));
  EXPECT_THAT(refuse(R"({"rate": null})"), HasSubstr("rate"));
  EXPECT_THAT(refuse(R"({"rate": true})"), HasSubstr("rate"));
  EXPECT_THAT(refuse(R"({"rate": [1, 2]})"), HasSubstr("rate"));
  EXPECT_THAT(refuse(R"({"save_every": -4})"), HasSubstr("save-every"));
  EXPECT_THAT(refuse(R"({"help": true})"), HasSubstr("help"));
}

}  // namespace sluice::cli::flags_test
