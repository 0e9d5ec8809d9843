// Tests of errors, JSON, text files and the log.
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>

#include "core/descriptor.h"
#include "core/json.h"
#include "core/log.h"
#include "core/text_file.h"
#include "testing.h"
#include "tests/core/support.h"
#include "thrown.h"

namespace sluice::text_test {

TEST(Error, CarriesCodeAndText) {
  const Thrown thrown = thrown_by([] { fail(ErrorCode::kIo, "cannot read '{}' at {}", "a.bin", 17); });
  EXPECT_EQ(thrown.code, ErrorCode::kIo);
  EXPECT_EQ(thrown.text, "cannot read 'a.bin' at 17");
  ensure(true, "fine");
  EXPECT_EQ(thrown_by([] { ensure(false, "broken {}", 1); }).code, ErrorCode::kInternal);
  EXPECT_EQ(errno_text(ENOSPC), "No space left on device (28)");
  const Thrown full = thrown_by([] {
    errno = ENOSPC;
    fail_system("write", "/a/b");
  });
  EXPECT_EQ(full.text,
            "cannot write '/a/b': No space left on device (28); the disk is full: free space on it");
}

TEST(Error, ExitStatusOfTheCommandLine) {
  EXPECT_EQ(exit_status(ErrorCode::kInvalidArgument), 2);
  EXPECT_EQ(exit_status(ErrorCode::kNotFound), 2);
  EXPECT_EQ(exit_status(ErrorCode::kCorrupt), 2);
  EXPECT_EQ(exit_status(ErrorCode::kBudget), 3);
  for (const ErrorCode code : {ErrorCode::kIo, ErrorCode::kState, ErrorCode::kInternal})
    EXPECT_EQ(exit_status(code), 1);
}

TEST(Json, ErrorsNameTheSourceWithLineAndColumn) {
  EXPECT_EQ(parse_json("{\"a\": [1, 2]}", "x")["a"][1], 2);
  const Thrown thrown = thrown_by([] { parse_json("{\n  \"a\": ,\n}", "config.json"); });
  EXPECT_EQ(thrown.code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(
      thrown.text,
      "config.json is not valid JSON: line 2, column 8: unexpected ','; expected '[', '{', or a literal");
  EXPECT_EQ(thrown_by([] { parse_json("[\n1e999]", "x"); }).text,
            "x is not valid JSON: number overflow parsing '1e999'");
  EXPECT_EQ(thrown_by([] { parse_json("{\"a\": \"b", "x"); }).text,
            "x is not valid JSON: line 1, column 9: invalid string: missing closing quote");
  for (const char* text : {"", "{", "[1,]", "nul", "\"\xff\"", "1 2"})
    EXPECT_EQ(thrown_by([&] { parse_json(text, "x"); }).code, ErrorCode::kInvalidArgument) << text;
}

TEST(Json, FieldsThatAreMissingOrOfAnotherType) {
  const Json object = parse_json(R"({"layers": 12, "name": "x"})", "config.json");
  EXPECT_EQ(json_field<int>(object, "layers", "config.json"), 12);
  for (const char* key : {"heads", "name"}) {
    expect_error(ErrorCode::kInvalidArgument, {"config.json", key},
                 [&] { json_field<int>(object, key, "config.json"); });
  }
}

TEST(Json, AWholeNumberIsNeitherCutNorConverted) {
  const Json object = parse_json(R"({"a": -1, "b": 1.5, "c": 1e300, "d": true, "e": 4294967296})", "x");
  for (const char* key : {"a", "b", "c", "d"})
    EXPECT_EQ(thrown_by([&] { json_field<std::uint64_t>(object, key, "x"); }).code,
              ErrorCode::kInvalidArgument)
        << key;
  EXPECT_EQ(json_field<int>(object, "a", "x"), -1);
  EXPECT_EQ(json_field<std::uint64_t>(object, "e", "x"), std::uint64_t{1} << 32);
  EXPECT_EQ(thrown_by([&] { json_field<int>(object, "e", "x"); }).code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(json_field<double>(object, "b", "x"), 1.5);
}

TEST(Json, DeepNestingIsRefusedBeforeItTakesTheStack) {
  const auto nested = [](std::size_t depth) { return std::string(depth, '[') + std::string(depth, ']'); };
  EXPECT_NO_THROW(parse_json(nested(100), "x"));
  for (const std::size_t depth : {std::size_t{200}, std::size_t{1'000'000}}) {
    expect_error(ErrorCode::kInvalidArgument, {"config.json", "deeper"},
                 [&] { parse_json(nested(depth), "config.json").dump(); });
  }
}

// One of the two values would be lost.
TEST(Json, AKeyThatStandsTwiceInAnObjectIsRefused) {
  for (const char* text :
       {R"({"a": 1, "b": 2, "a": 3})", R"([{"x": {"a": {}, "a": {}}}])", R"({"a": 1, "\u0061": 1})"}) {
    const Thrown thrown = thrown_by([&] { parse_json(text, "config.json"); });
    EXPECT_EQ(thrown.code, ErrorCode::kInvalidArgument) << text;
    EXPECT_THAT(thrown.text, AllOf(HasSubstr("config.json"), HasSubstr("'a'"), HasSubstr("twice")));
  }
  EXPECT_EQ(parse_json(R"([{"a": {"a": 1}, "b": {"a": 2}}, {"a": 3}])", "x")[1]["a"], 3);
}

TEST(Json, ReadsFiles) {
  const TemporaryFolder folder;
  folder.put("a.json", "[true]");
  EXPECT_EQ(read_json_file(folder.path("a.json"))[0], true);
  EXPECT_EQ(thrown_by([&] { read_json_file(folder.path("b.json")); }).code, ErrorCode::kNotFound);
}

TEST(NearestWord, FindsWhatWasMeant) {
  const std::vector<std::string> known = {"memory", "model", "metrics", "seed", "warmup"};
  EXPECT_EQ(nearest_word("memroy", known), "memory");
  EXPECT_EQ(nearest_word("mdel", known), "model");
  EXPECT_EQ(nearest_word("modell", known), "model");
  EXPECT_EQ(nearest_word("seed", known), "seed");
  EXPECT_EQ(nearest_word("warm-up", known), "warmup");
  EXPECT_EQ(nearest_word("learning-rate", known), "");
  EXPECT_EQ(nearest_word("xyzzy", known), "");
  EXPECT_EQ(nearest_word("seed", {}), "");
}

TEST(TextFile, ComesBackWhole) {
  const TemporaryFolder folder;
  for (const std::string& text : {std::string(), std::string("a\0b\n", 4), std::string(100'000, 'x')}) {
    write_text_file(folder.path("f"), text);
    EXPECT_EQ(read_text_file(folder.path("f")), text);
  }
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 1)
      << "a temporary file was left";
}

TEST(TextFile, ErrorsNameThePath) {
  const TemporaryFolder folder;
  folder.put("long", std::string(1000, 'x'));
  const auto read_error = [&](const std::string& name, std::size_t limit) {
    const Thrown thrown = thrown_by([&] { read_text_file(folder.path(name), limit); });
    EXPECT_THAT(thrown.text, HasSubstr(folder.path(name)));
    return thrown.code;
  };
  EXPECT_EQ(read_error("missing", 10), ErrorCode::kNotFound);
  EXPECT_EQ(read_error("long/below", 10), ErrorCode::kNotFound);
  EXPECT_EQ(read_error("long", 999), ErrorCode::kInvalidArgument);
  EXPECT_EQ(read_text_file(folder.path("long"), 1000).size(), 1000u);
  EXPECT_EQ(thrown_by([&] { read_text_file(folder.path()); }).code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(thrown_by([&] { write_text_file(folder.path("no/f"), "x"); }).code, ErrorCode::kNotFound);
  EXPECT_EQ(thrown_by([&] { sync_folder(folder.path("no")); }).code, ErrorCode::kNotFound);
}

TEST(TextFile, AFailedWriteLeavesWhatWasThere) {
  const TemporaryFolder folder;
  std::filesystem::create_directory(folder.path("taken"));
  folder.put("taken/inside", "kept");
  EXPECT_EQ(thrown_by([&] { write_text_file(folder.path("taken"), "new"); }).code, ErrorCode::kIo);
  EXPECT_EQ(contents(folder.path("taken/inside")), "kept");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 1)
      << "a temporary file was left";
}

TEST(TextFile, AReaderNeverSeesAPart) {
  const TemporaryFolder folder;
  const std::string path = folder.path("f"), one(50'000, '1'), two(80'000, '2');
  write_text_file(path, one);
  std::thread writer([&] {
    for (int i = 0; i < 30; ++i) write_text_file(path, i % 2 == 0 ? two : one);
  });
  for (int i = 0; i < 300; ++i) {
    const std::string seen = read_text_file(path);
    EXPECT_TRUE(seen == one || seen == two) << seen.size();
  }
  writer.join();
}

TEST(TextFile, AKilledWriterLeavesTheFileWhole) {
  const TemporaryFolder folder;
  const std::string path = folder.path("f"), one(200'000, '1'), two(300'000, '2');
  write_text_file(path, one);
  for (int round = 0; round < 10; ++round) {
    const pid_t child = ::fork();
    if (child == 0)
      for (int i = 0;; ++i) write_text_file(path, i % 2 == 0 ? two : one);
    std::this_thread::sleep_for(std::chrono::milliseconds(3 + round));
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    const std::string seen = contents(path);
    EXPECT_TRUE(seen == one || seen == two) << seen.size();
  }
}

TEST(Log, ShowsControlCharactersOfNames) {
  testing::internal::CaptureStderr();
  log().warn("'{}' is left\nbehind", "\x1b[2J");
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "sluice: warning: '\\x1b[2J' is left\nbehind\n");
}

TEST(Log, Levels) {
  const auto said = [] {
    testing::internal::CaptureStderr();
    log().debug("{}", 1);
    log().info("{}", 2);
    log().warn("{}", 3);
    log().error("said {}", 5);
    return testing::internal::GetCapturedStderr();
  };
  const std::string all = "sluice: debug: 1\nsluice: info: 2\nsluice: warning: 3\nsluice: error: said 5\n";
  EXPECT_EQ(said(), all.substr(all.find("sluice: info")));
  for (const auto& [level, first] : {std::pair{"debug", "sluice: debug"},
                                     {"info", "sluice: info"},
                                     {"warn", "sluice: warning"},
                                     {"error", "sluice: error"}}) {
    set_log_level(level);
    EXPECT_EQ(said(), all.substr(all.find(first))) << level;
  }
  set_log_level("off");
  EXPECT_EQ(said(), "");
  for (const char* level : {"", "loud", "INFO"})
    EXPECT_EQ(thrown_by([&] { set_log_level(level); }).code, ErrorCode::kInvalidArgument) << level;
  set_log_level("info");
}

}  // namespace sluice::text_test
