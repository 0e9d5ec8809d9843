#include "models/data/tokens.h"

#include <sys/stat.h>

#include "models/data/data_test_support.h"

namespace sluice::models::tokens_test {

std::string llmc_header(std::int32_t magic, std::int32_t version, std::int32_t count) {
  std::vector<std::int32_t> header(256, 0);
  header[0] = magic;
  header[1] = version;
  header[2] = count;
  return {reinterpret_cast<const char*>(header.data()), 1024};
}

TEST_F(DataTest, TextIsItsBytes) {
  auto source = open_tokens({store("a.txt", "h\xc3\xa9!")});
  EXPECT_EQ(source->total(), 4u);
  EXPECT_EQ(source->vocabulary(), 256u);
  EXPECT_EQ(read(*source, 0, 4), (Tokens{'h', 0xc3, 0xa9, '!'}));
  EXPECT_EQ(read(*source, 4, 0), Tokens{});
  source->set_vocabulary(256);
  source->set_vocabulary(50257);
  expect_error(ErrorCode::kInvalidArgument, {path("a.txt"), "255", "256", ".bin"},
               [&] { source->set_vocabulary(255); });
  expect_error(ErrorCode::kInvalidArgument, {path("a.txt"), "4"}, [&] { read(*source, 2, 3); });
}

TEST_F(DataTest, ReadsAcrossPiecesAndFiles) {
  std::string all;
  std::vector<std::string> paths;
  for (int i = 0; i < 3; ++i) {
    std::string text;
    for (int k = 0; k < 40'000; ++k) text += static_cast<char>('a' + (k * 7 + i + k / 26) % 26);
    all += text;
    paths.push_back(store("part" + std::to_string(i), text));
  }
  auto source = open_tokens(paths);
  ASSERT_EQ(source->total(), all.size());
  const Tokens expected(all.begin(), all.end());
  EXPECT_TRUE(read(*source, 0, all.size()) == expected);
  EXPECT_TRUE(read(*source, 39'999, 40'002) == Tokens(expected.begin() + 39'999, expected.begin() + 80'001));
}

TEST_F(DataTest, FoldersAreWalkedInOrderOfPaths) {
  store("d/b.txt", "2");
  store("d/a/z", "1");
  store("d/c", "3");
  store("d/.hidden", "no");
  store("d/.git/config", "no");
  store("d/image", std::string("\x89PNG\0", 5));
  store("d/empty", "");
  std::filesystem::create_directory_symlink(path("d"), path("d/loop"));
  std::filesystem::create_symlink(path("d/c"), path("d/link"));
  auto source = open_tokens({path("d")});
  EXPECT_EQ(read(*source, 0, source->total()), (Tokens{'1', '2', '3', '3'}));
}

TEST_F(DataTest, ReadsLlmcFiles) {
  const std::vector<std::uint16_t> narrow = {50256, 1, 2, 65535};
  auto source = open_tokens({store("gpt2.bin", llmc_header(20240520, 1, 4) + raw(narrow))});
  EXPECT_EQ(source->total(), 4u);
  EXPECT_EQ(source->vocabulary(), std::nullopt);
  EXPECT_EQ(read(*source, 0, 4), (Tokens{50256, 1, 2, 65535}));
  const std::vector<std::uint32_t> wide = {128000, 9, 0x7fffffff};
  auto llama = open_tokens({store("llama.bin", llmc_header(20240801, 7, 3) + raw(wide))});
  EXPECT_EQ(read(*llama, 1, 2), (Tokens{9, 0x7fffffff}));
  auto both = open_tokens({path("gpt2.bin"), path("llama.bin")});
  EXPECT_EQ(read(*both, 2, 3), (Tokens{2, 65535, 128000}));
}

TEST_F(DataTest, ReadsNanoGptFiles) {
  const std::vector<std::uint16_t> tokens = {5, 50256, 7};
  auto source = open_tokens({store("train.bin", raw(tokens))});
  EXPECT_EQ(read(*source, 0, 3), (Tokens{5, 50256, 7}));
}

TEST_F(DataTest, TokensOutsideTheVocabularyAreNamed) {
  const std::vector<std::uint16_t> tokens = {5, 6, 300, 7};
  auto source = open_tokens({store("train.bin", raw(tokens))});
  source->set_vocabulary(300);
  EXPECT_EQ(read(*source, 0, 2), (Tokens{5, 6}));
  expect_error(ErrorCode::kInvalidArgument, {path("train.bin"), "token 300", "position 2", "has 300"},
               [&] { read(*source, 1, 3); });
  source->set_vocabulary(301);
  EXPECT_EQ(read(*source, 2, 1), Tokens{300});
  const std::vector<std::uint32_t> negative = {0x80000000u};
  auto wide = open_tokens({store("wide.bin", llmc_header(20240801, 7, 1) + raw(negative))});
  expect_error(ErrorCode::kInvalidArgument, {path("wide.bin"), "2147483648"}, [&] { read(*wide, 0, 1); });
}

TEST_F(DataTest, BadInputIsNamed) {
  const auto refused = [&](const std::string& name, ErrorCode code, std::vector<std::string> parts) {
    parts.push_back(path(name));
    expect_error(code, parts, [&] { open_tokens({path(name)}); });
  };
  refused("absent.txt", ErrorCode::kNotFound, {});
  refused("absent.bin", ErrorCode::kNotFound, {});
  refused("absent/folder", ErrorCode::kNotFound, {});
  store("empty.txt", "");
  refused("empty.txt", ErrorCode::kInvalidArgument, {"empty"});
  store("empty.bin", "");
  refused("empty.bin", ErrorCode::kInvalidArgument, {"empty"});
  store("image.txt", std::string("\x89PNG\0", 5));
  refused("image.txt", ErrorCode::kInvalidArgument, {"no text"});
  store("odd.bin", "abc");
  refused("odd.bin", ErrorCode::kInvalidArgument, {"3 bytes"});
  store("short.bin", llmc_header(20240520, 1, 4).substr(0, 100));
  refused("short.bin", ErrorCode::kInvalidArgument, {"100 bytes", "1024"});
  store("version.bin", llmc_header(20240520, 7, 0));
  refused("version.bin", ErrorCode::kInvalidArgument, {"version 7", "version 1"});
  store("none.bin", llmc_header(20240520, 1, 0));
  refused("none.bin", ErrorCode::kInvalidArgument, {"no tokens"});
  store("less.bin", llmc_header(20240520, 1, 4) + "1234567");
  refused("less.bin", ErrorCode::kInvalidArgument, {"4 tokens", "1032", "1031"});
  store("more.bin", llmc_header(20240801, 7, 1) + "12345");
  refused("more.bin", ErrorCode::kInvalidArgument, {"1 tokens", "1028", "1029"});
  store("binaries/x", std::string(10, '\0'));
  refused("binaries", ErrorCode::kInvalidArgument, {"no text", "1 files were skipped"});
  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
  refused("pipe", ErrorCode::kInvalidArgument, {"named pipe", "regular file"});
  expect_error(ErrorCode::kInvalidArgument, {"no path"}, [] { open_tokens({}); });
}

TEST_F(DataTest, TextAndTokensAreNotMixed) {
  const std::string text = store("a.txt", "text"), tokens = store("b.bin", "1234");
  expect_error(ErrorCode::kInvalidArgument, {text, tokens}, [&] { open_tokens({text, tokens}); });
}

TEST_F(DataTest, AFileThatShrinksIsAnError) {
  auto source = open_tokens({store("a.txt", std::string(1000, 'x'))});
  std::filesystem::resize_file(path("a.txt"), 500);
  EXPECT_EQ(read(*source, 499, 1), Tokens{'x'});
  expect_error(ErrorCode::kIo, {path("a.txt"), "500"}, [&] { read(*source, 499, 2); });
  auto gone = open_tokens({path("a.txt")});
  std::filesystem::remove(path("a.txt"));
  expect_error(ErrorCode::kNotFound, {path("a.txt")}, [&] { read(*gone, 0, 1); });
}

}  // namespace sluice::models::tokens_test
