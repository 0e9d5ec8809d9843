#include "engine/checkpoint/safetensors.h"
#include "engine/checkpoint/support.h"
#include "testing.h"

namespace sluice::engine::safetensors_header_test {

// Made by Python's safetensors 0.8: save({"b": f32 [[1, 2, 3]], "a": u8 []}).
const std::string kGoldenText =
    R"({"b":{"dtype":"F32","shape":[1,3],"data_offsets":[0,12]},"a":{"dtype":"U8","shape":[],"data_offsets":[12,13]}})";

std::uint64_t file_bytes(const std::string& text, std::uint64_t payload) { return 8 + text.size() + payload; }

SafetensorsHeader parse(const std::string& text, std::uint64_t payload) {
  return SafetensorsHeader::parse(text, file_bytes(text, payload), "dir/x.safetensors");
}

void expect_corrupt(const std::string& text, std::uint64_t payload, std::vector<std::string> parts) {
  SCOPED_TRACE(text);
  parts.push_back("dir/x.safetensors");
  expect_error(ErrorCode::kCorrupt, parts, [&] { parse(text, payload); });
}

TEST(SafetensorsHeader, ListsTensors) {
  const auto header = parse(kGoldenText, 13);
  ASSERT_EQ(header.tensors().size(), 2u);
  const StoredTensor* b = header.find("b");
  ASSERT_NE(b, nullptr);
  EXPECT_EQ(b->dtype(), Dtype::kF32);
  EXPECT_EQ(b->shape, (std::vector<std::uint64_t>{1, 3}));
  EXPECT_EQ(b->begin, 0u);
  EXPECT_EQ(b->end, 12u);
  EXPECT_EQ(header.find("a")->elements(), 1u);
  EXPECT_EQ(header.find("c"), nullptr);
  EXPECT_EQ(header.payload_offset(), 8 + kGoldenText.size());
}

TEST(SafetensorsHeader, BuildsGoldenBytes) {
  const SafetensorsHeader header({{"w", Dtype::kF32, {2, 3}}, {"h.\"0\"", Dtype::kBf16, {5}}});
  const std::string text =
      R"({"__metadata__":{"format":"pt"},"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
      R"("h.\"0\"":{"dtype":"BF16","shape":[5],"data_offsets":[24,34]}})";
  ASSERT_EQ(text.size(), 150u);
  EXPECT_EQ(header.bytes(), std::string("\x98\0\0\0\0\0\0\0", 8) + text + "  ");
  EXPECT_EQ(header.payload_bytes(), 34u);
  EXPECT_EQ(header.file_bytes(), 8u + 152u + 34u);
}

TEST(SafetensorsHeader, PadsWithSpacesAndParsesWhatItBuilds) {
  for (std::size_t length = 1; length <= 8; ++length) {
    const SafetensorsHeader built({{std::string(length, 'n'), Dtype::kF16, {3}}}, {{"key",
                                                                                    "val\xc3\xbc"
                                                                                    "e"}});
    const std::string bytes = built.bytes();
    EXPECT_EQ(bytes.size() % 8, 0u);
    const auto parsed = SafetensorsHeader::parse(std::string_view(bytes).substr(8), built.file_bytes(), "x");
    EXPECT_EQ(parsed.tensors().at(0).name, std::string(length, 'n'));
    EXPECT_EQ(parsed.tensors().at(0).dtype(), Dtype::kF16);
    EXPECT_EQ(parsed.metadata(), built.metadata());
    EXPECT_EQ(parsed.payload_offset(), built.payload_offset());
  }
}

TEST(SafetensorsHeader, KnowsForeignTypesAndEmptyTensors) {
  const auto header = parse(
      R"({"bias":{"dtype":"BOOL","shape":[2],"data_offsets":[0,2]},"none":{"dtype":"F32","shape":[0,7],"data_offsets":[2,2]},)"
      R"("ids":{"dtype":"I64","shape":[1],"data_offsets":[2,10]},"f4":{"dtype":"F4","shape":[2],"data_offsets":[10,11]}})",
      11);
  EXPECT_EQ(header.find("bias")->dtype(), std::nullopt);
  EXPECT_EQ(header.find("ids")->bytes(), 8u);
  EXPECT_EQ(header.find("none")->bytes(), 0u);
  EXPECT_TRUE(parse("{}", 0).tensors().empty());
  EXPECT_TRUE(parse("{}     ", 0).tensors().empty());
}

TEST(SafetensorsHeader, RefusesBadPrefixes) {
  const auto text_bytes = [](std::uint64_t stated, std::uint64_t file) {
    return SafetensorsHeader::text_bytes(std::as_bytes(std::span(&stated, 1)), file, "dir/x.safetensors");
  };
  EXPECT_EQ(text_bytes(92, 100), 92u);
  expect_error(ErrorCode::kCorrupt, {"dir/x.safetensors", "93", "longer than the file", "100"},
               [&] { text_bytes(93, 100); });
  expect_error(ErrorCode::kCorrupt, {"dir/x.safetensors", "100000001", "100000000"},
               [&] { text_bytes(100'000'001, 1'000'000'000); });
  expect_error(ErrorCode::kCorrupt, {"dir/x.safetensors"}, [&] { text_bytes(UINT64_MAX, UINT64_MAX); });
  expect_error(ErrorCode::kCorrupt, {"dir/x.safetensors", "7 bytes"}, [&] { text_bytes(1, 7); });
}

TEST(SafetensorsHeader, RefusesTextThatIsNoHeader) {
  expect_corrupt("", 0, {"begin with"});
  expect_corrupt(" {}", 0, {"begin with"});
  expect_corrupt("[]", 0, {"begin with"});
  expect_corrupt("{", 0, {"JSON"});
  expect_corrupt("{} x", 0, {"JSON"});
  expect_corrupt(std::string("{}\0", 3), 0, {"zero byte"});
  expect_corrupt("{\"\xff\":1}", 0, {"JSON"});
  expect_corrupt(R"({"t":1})", 0, {"'t'", "a number"});
  expect_corrupt(R"({"t":[]})", 0, {"'t'", "an array"});
  expect_corrupt(R"({"t":null})", 0, {"'t'", "null"});
  expect_corrupt(R"({"t":{"dtype":{}}})", 0, {"'t'", "'dtype'", "an object"});
  expect_corrupt(R"({"t":{"dtype":["F32"]}})", 0, {"'t'", "'dtype'", "an array"});
  expect_corrupt(R"({"t":{"shape":[[1]]}})", 0, {"'t'", "'shape'", "an array"});
  expect_corrupt(R"({"t":{"shape":[-1]}})", 0, {"'t'", "'shape'", "negative"});
  expect_corrupt(R"({"t":{"shape":[1.5]}})", 0, {"'t'", "'shape'", "1.5"});
  expect_corrupt(R"({"t":{"shape":["1"]}})", 0, {"'t'", "'shape'", "a string"});
  expect_corrupt(R"({"t":{"shape":[18446744073709551616]}})", 0, {"'t'", "'shape'", "18446744073709551616"});
  expect_corrupt(R"({"__metadata__":{"a":1}})", 0, {"__metadata__", "'a'", "a number"});
  expect_corrupt(R"({"__metadata__":"a"})", 0, {"__metadata__", "a string"});
  expect_corrupt(R"({"__metadata__":{"a":"1","a":"2"}})", 0, {"'a'", "twice"});
  expect_corrupt(R"({"__metadata__":{},"__metadata__":{}})", 0, {"__metadata__", "twice"});
  expect_corrupt("{\"t\":" + std::string(1'000'000, '['), 0, {"'t'"});
  expect_corrupt("{\"t\":{\"shape\":[" + std::string(1'000'000, '{'), 0, {"'t'"});
}

std::string tensor(const std::string& name, const std::string& type, const std::string& shape,
                   const std::string& offsets) {
  return "\"" + name + "\":{\"dtype\":\"" + type + "\",\"shape\":[" + shape + "],\"data_offsets\":[" +
         offsets + "]}";
}

TEST(SafetensorsHeader, RefusesBadTensors) {
  expect_corrupt(R"({"t":{"shape":[],"data_offsets":[0,4]}})", 4, {"'t'", "'dtype'"});
  expect_corrupt(R"({"t":{"dtype":"F32","data_offsets":[0,4]}})", 4, {"'t'", "'shape'"});
  expect_corrupt(R"({"t":{"dtype":"F32","shape":[]}})", 4, {"'t'", "'data_offsets'"});
  expect_corrupt(R"({"t":{"dtype":"F32","dtype":"F32"}})", 4, {"'t'", "'dtype'", "twice"});
  expect_corrupt(R"({"t":{"stride":[1]}})", 4, {"'t'", "'stride'"});
  expect_corrupt("{" + tensor("t", "F31", "1", "0,4") + "}", 4, {"'t'", "F31"});
  expect_corrupt("{" + tensor("t", "F32", "1", "0") + "}", 4, {"'t'", "1 data_offsets"});
  expect_corrupt("{" + tensor("t", "F32", "1", "0,4,8") + "}", 4, {"'t'", "3 data_offsets"});
  expect_corrupt("{" + tensor("t", "F32", "1", "4,0") + "}", 4, {"'t'", "before"});
  expect_corrupt("{" + tensor("t", "F32", "2", "0,4") + "}", 4, {"'t'", "4 bytes", "64 bits"});
  expect_corrupt("{" + tensor("t", "F32", "4294967296,4294967296", "0,4") + "}", 4, {"'t'", "64 bits"});
  expect_corrupt("{" + tensor("t", "F4", "1", "0,1") + "}", 1, {"'t'", "4 bits"});
}

TEST(SafetensorsHeader, RefusesWhatDoesNotCoverThePayload) {
  const std::string a = tensor("a", "F32", "2", "0,8");
  expect_corrupt("{" + a + "," + a + "}", 8, {"'a'"});
  expect_corrupt("{" + tensor("a", "U8", "0", "0,0") + "," + tensor("a", "U8", "0", "0,0") + "}", 0,
                 {"'a'", "twice"});
  expect_corrupt("{" + a + "," + tensor("b", "F32", "1", "4,8") + "}", 8, {"'b'", "begins at 4", "end 8"});
  expect_corrupt("{" + a + "," + tensor("b", "F32", "1", "12,16") + "}", 16, {"'b'", "begins at 12", "hole"});
  expect_corrupt("{" + tensor("b", "F32", "1", "4,8") + "}", 8, {"'b'", "hole"});
  expect_corrupt("{" + a + "}", 7, {"'a'", "cut short"});
  expect_corrupt("{" + a + "}", 9, {"1 bytes after"});
  expect_corrupt("{}", 1, {"1 bytes after"});
}

// With any byte changed, and cut anywhere, a text gives a header or an error.
TEST(SafetensorsHeader, NeverFailsOtherwise) {
  const auto tried = [](const std::string& text) {
    try {
      parse(text, 13);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kCorrupt) << error.what();
    }
  };
  for (std::size_t i = 0; i < kGoldenText.size(); ++i) {
    tried(kGoldenText.substr(0, i));
    for (int bit = 0; bit < 8; ++bit) {
      std::string text = kGoldenText;
      text[i] = static_cast<char>(text[i] ^ (1 << bit));
      tried(text);
    }
  }
}

TEST(SafetensorsHeader, RefusesToBuildWhatOthersCouldNotRead) {
  const auto refused = [](const std::vector<TensorDeclaration>& tensors, std::vector<std::string> parts) {
    expect_error(ErrorCode::kInvalidArgument, parts, [&] { SafetensorsHeader header(tensors); });
  };
  refused({{"t", Dtype::kF32, {1}}, {"t", Dtype::kF32, {1}}}, {"'t'", "twice"});
  refused({{"", Dtype::kF32, {1}}}, {"empty"});
  refused({{"__metadata__", Dtype::kF32, {1}}}, {"__metadata__", "reserved"});
  refused({{"h", Dtype::kBf16, {1}}, {"w", Dtype::kF32, {1}}}, {"'w'", "byte 2", "wider types first"});
  refused({{"\xff", Dtype::kF32, {1}}}, {"UTF-8"});
  refused({{"t", Dtype::kF32, {1ull << 40, 1ull << 40}}}, {"'t'", "64 bits"});
}

}  // namespace sluice::engine::safetensors_header_test
