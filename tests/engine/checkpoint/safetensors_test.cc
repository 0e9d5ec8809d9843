#include "engine/checkpoint/safetensors.h"

#include "engine/checkpoint/support.h"
#include "testing.h"

namespace sluice::engine::safetensors_test {

class SafetensorsTest : public FilesTest {
 protected:
  // Writes a file as another program would; safetensors_header_test.cc tests golden bytes of the header.
  std::string store(const std::string& name, const std::vector<TensorDeclaration>& tensors,
                    std::uint32_t seed = 1) {
    const SafetensorsHeader header(tensors);
    const std::string payload = pattern(header.payload_bytes(), seed);
    write_all(folder_.path(name), header.bytes() + payload);
    return payload;
  }
  // Makes a file for write_alone().
  void make_file(const std::string& name, const std::string& bytes) {
    io_.open(folder_.path(name), offload::OpenMode::kCreate)->allocate(round_up(bytes.size(), kDiskBlock));
  }
  static std::string read(SafetensorsReader& reader, const std::string& name, std::uint64_t first,
                          std::size_t bytes) {
    std::string out(bytes, '\0');
    reader.read(reader.tensor(name), first, std::as_writable_bytes(std::span(out)));
    return out;
  }
};

constexpr std::uint64_t kElements =
    9 * kMiB / 4 + 12345;  // a tensor of more than two blocks, not aligned to anything

TEST_F(SafetensorsTest, ReadsAnyRange) {
  const std::string payload =
      store("x", {{"a", Dtype::kF32, {3}}, {"b", Dtype::kF32, {kElements}}, {"c", Dtype::kU8, {777}}});
  SafetensorsReader reader(io_, folder_.path("x"), ahead_);
  const std::uint64_t b = 12, b_bytes = kElements * 4, c = b + b_bytes;
  EXPECT_EQ(read(reader, "a", 0, 12), payload.substr(0, 12));
  EXPECT_EQ(read(reader, "c", 0, 777), payload.substr(c, 777));
  EXPECT_EQ(read(reader, "c", 776, 1), payload.substr(c + 776, 1));
  EXPECT_TRUE(read(reader, "b", 0, b_bytes) == payload.substr(b, b_bytes));
  for (const std::uint64_t at : {std::uint64_t{0}, std::uint64_t{4095}, std::uint64_t{kStreamBlock - 150},
                                 std::uint64_t{2 * kStreamBlock - 200}, b_bytes - 301})
    EXPECT_EQ(read(reader, "b", at, 301), payload.substr(b + at, 301)) << at;
  EXPECT_EQ(read(reader, "b", b_bytes, 0), "");
}

TEST_F(SafetensorsTest, ReadsSmallPiecesInOrder) {
  const std::string payload = store("x", {{"b", Dtype::kF32, {kElements}}});
  SafetensorsReader reader(io_, folder_.path("x"), ahead_);
  std::string all;
  for (std::uint64_t at = 0; at < payload.size(); at += 100'003)
    all += read(reader, "b", at, std::min<std::uint64_t>(100'003, payload.size() - at));
  EXPECT_TRUE(all == payload);
  EXPECT_LE(io_.reads.transfers, 3);  // each block once
}

TEST_F(SafetensorsTest, NamesWhatItCannotRead) {
  store("x", {{"wte.weight", Dtype::kF32, {3}}});
  SafetensorsReader reader(io_, folder_.path("x"), ahead_);
  expect_error(ErrorCode::kNotFound, {"/x", "'wte.wight'", "'wte.weight'"},
               [&] { reader.tensor("wte.wight"); });
  expect_error(ErrorCode::kInvalidArgument, {"/x", "wte.weight", "12"},
               [&] { read(reader, "wte.weight", 1, 12); });
  expect_error(ErrorCode::kInvalidArgument, {"wte.weight"},
               [&] { read(reader, "wte.weight", UINT64_MAX, 1); });
  expect_error(ErrorCode::kNotFound, {"/absent"},
               [&] { SafetensorsReader(io_, folder_.path("absent"), ahead_); });
  expect_error(ErrorCode::kInvalidArgument, {"is not a file"},
               [&] { SafetensorsReader(io_, folder_.path(), ahead_); });
}

TEST_F(SafetensorsTest, RefusesTruncatedAndForeignFiles) {
  store("x", {{"t", Dtype::kF32, {3}}});
  const std::string whole = read_all(folder_.path("x"));
  for (std::size_t bytes = 0; bytes < whole.size(); ++bytes) {
    write_all(folder_.path("cut"), whole.substr(0, bytes));
    expect_error(ErrorCode::kCorrupt, {"/cut"}, [&] { SafetensorsReader(io_, folder_.path("cut"), ahead_); });
  }
  write_all(folder_.path("zip"), "PK\x03\x04 a checkpoint of another format");
  expect_error(ErrorCode::kCorrupt, {"/zip", "no safetensors file"},
               [&] { SafetensorsReader(io_, folder_.path("zip"), ahead_); });
}

TEST_F(SafetensorsTest, RefusesBuffersThatAreTooSmallOrNotAligned) {
  expect_error(ErrorCode::kInvalidArgument, {"reading", "12.0 MiB"},
               [&] { ReadAhead(memory_.bytes().first(8 * kMiB)); });
  allocator::Region region(ledger_, allocator::Purpose::kStaging, 14 * kMiB);
  expect_error(ErrorCode::kInvalidArgument, {"aligned"},
               [&] { ReadAhead(region.bytes().subspan(8, kStreamBuffer)); });
  make_file("x", "1");
  expect_error(ErrorCode::kInvalidArgument, {"writing"},
               [&] { write_alone(io_, ledger_, folder_.path("x"), "1", 4096); });
}

TEST_F(SafetensorsTest, WritesWhatIsReadBack) {
  const auto buffers = [&] {
    return ledger_.snapshot().lines[static_cast<std::size_t>(allocator::Tier::kHost)]
                                   [static_cast<std::size_t>(allocator::Purpose::kCheckpoint)];
  };
  for (const std::size_t buffer : {3 * kDiskBlock, 100'000ul, kStreamBuffer}) {
    const std::string name = "w" + std::to_string(buffer), bytes = pattern(9 * kMiB + 13, 3);
    make_file(name, bytes);
    const FileSum sum = write_alone(io_, ledger_, folder_.path(name), bytes, buffer);
    EXPECT_EQ(buffers().peak, round_up(buffer, kHugePage));
    EXPECT_EQ(buffers().current, 0u);
    EXPECT_TRUE(read_all(folder_.path(name)).substr(0, bytes.size()) == bytes);
    ASSERT_EQ(sum.blocks.size(), 3u);
    for (std::size_t i = 0; i < 3; ++i)
      EXPECT_EQ(
          sum.blocks[i],
          checksum(std::as_bytes(std::span(bytes))
                       .subspan(i * kStreamBlock, std::min(kStreamBlock, bytes.size() - i * kStreamBlock))));
  }
}

TEST_F(SafetensorsTest, AFailedWriteIsSeen) {
  for (const std::size_t size : {32 * kMiB, 10ul}) {
    io_.writes.transfers = 0;
    io_.fail_write = size > kMiB ? 1 : 0;
    const std::string name = std::to_string(size), bytes = pattern(size, 6);
    make_file(name, bytes);
    expect_error(ErrorCode::kIo, {"/" + name, "no space left"},
                 [&] { write_alone(io_, ledger_, folder_.path(name), bytes); });
  }
}

TEST_F(SafetensorsTest, TheBufferIsHeldToTheBudget) {
  ledger_.set_budget(allocator::Tier::kHost, kStreamBuffer + kMiB);
  make_file("x", "1");
  expect_error(ErrorCode::kBudget, {"checkpoint"},
               [&] { write_alone(io_, ledger_, folder_.path("x"), "1"); });
}

TEST_F(SafetensorsTest, EveryFlippedBitIsFoundBeforeItIsHandedOut) {
  const std::string payload = store("x", {{"t", Dtype::kU8, {9 * kMiB}}}), file = read_all(folder_.path("x"));
  FileSummer summer;
  summer.add(std::as_bytes(std::span(file)));
  const FileSum sum = summer.finish();
  for (const std::size_t at : {std::size_t{9}, kStreamBlock + 1, file.size() - 1}) {
    std::string flipped = file;
    flipped[at] = static_cast<char>(flipped[at] ^ 4);
    write_all(folder_.path("y"), flipped);
    expect_error(ErrorCode::kCorrupt, {"/y", "damaged", std::to_string(at / kStreamBlock * kStreamBlock)},
                 [&] {
                   SafetensorsReader reader(io_, folder_.path("y"), ahead_, sum);
                   read(reader, "t", 0, payload.size());
                 });
  }
  write_all(folder_.path("y"), file.substr(0, file.size() - 1));
  expect_error(ErrorCode::kCorrupt, {"/y", std::to_string(file.size())},
               [&] { SafetensorsReader(io_, folder_.path("y"), ahead_, sum); });
  SafetensorsReader reader(io_, folder_.path("x"), ahead_, sum);
  EXPECT_TRUE(read(reader, "t", 0, payload.size()) == payload);
}

TEST_F(SafetensorsTest, ADamagedBlockStaysDamaged) {
  const std::string payload = store("x", {{"t", Dtype::kU8, {9 * kMiB}}});
  FileSummer summer;
  const std::string file = read_all(folder_.path("x"));
  summer.add(std::as_bytes(std::span(file)));
  FileSum sum = summer.finish();
  sum.blocks[1] ^= 1;
  SafetensorsReader reader(io_, folder_.path("x"), ahead_, sum);
  for (int i = 0; i < 2; ++i)
    expect_error(ErrorCode::kCorrupt, {"/x", "4194304"}, [&] { read(reader, "t", kStreamBlock, 100); });
  EXPECT_EQ(read(reader, "t", 0, 100), payload.substr(0, 100));
}

TEST_F(SafetensorsTest, WorksPastThePageCache) {
  const std::string payload = pattern(9 * kMiB + 13, 9);
  const std::string bytes = SafetensorsHeader({{"t", Dtype::kU8, {payload.size()}}}).bytes() + payload;
  const auto io = offload::make_thread_service({});
  FileSum sum;
  try {
    make_file("x", bytes);
    sum = write_alone(*io, ledger_, folder_.path("x"), bytes);
    std::filesystem::resize_file(folder_.path("x"), bytes.size());
  } catch (const Error& error) {
    if (std::string(error.what()).find("O_DIRECT") == std::string::npos) throw;
    GTEST_SKIP() << error.what();
  }
  SafetensorsReader reader(*io, folder_.path("x"), ahead_, sum);
  EXPECT_TRUE(read(reader, "t", 0, payload.size()) == payload);
}

class SafetensorsFolderTest : public SafetensorsTest {
 protected:
  void write_index(const std::string& map) {
    write_all(folder_.path("model.safetensors.index.json"),
              R"({"metadata":{"total_size":1},"weight_map":)" + map + "}");
  }
  SafetensorsFolder open() { return SafetensorsFolder(io_, folder_.path(), ahead_); }
};

TEST_F(SafetensorsFolderTest, ReadsASingleFile) {
  const std::string payload = store("model.safetensors", {{"b", Dtype::kU8, {5}}, {"a", Dtype::kU8, {3}}});
  SafetensorsFolder folder = open();
  EXPECT_EQ(folder.names(), (std::vector<std::string>{"a", "b"}));
  std::string out(3, '\0');
  folder.read("a", 0, std::as_writable_bytes(std::span(out)));
  EXPECT_EQ(out, payload.substr(5));
  EXPECT_EQ(folder.find("c"), nullptr);
  expect_error(ErrorCode::kNotFound, {folder_.path(), "'c'"}, [&] { folder.tensor("c"); });
  SafetensorsFolder file(io_, folder_.path("model.safetensors"), ahead_);
  file.read("b", 0, std::as_writable_bytes(std::span(out)));
  EXPECT_EQ(out, payload.substr(0, 3));
}

TEST_F(SafetensorsFolderTest, ReadsShards) {
  const std::string first = store("model-1.safetensors", {{"a", Dtype::kU8, {5}}}, 1);
  const std::string second =
      store("model-2.safetensors", {{"b", Dtype::kU8, {5}}, {"other", Dtype::kU8, {5}}}, 2);
  write_index(R"({"a":"model-1.safetensors","b":"model-2.safetensors"})");
  SafetensorsFolder folder = open();
  EXPECT_EQ(folder.names(), (std::vector<std::string>{"a", "b"}));
  std::string out(2, '\0');
  folder.read("b", 3, std::as_writable_bytes(std::span(out)));
  EXPECT_EQ(out, second.substr(3, 2));
  folder.read("a", 3, std::as_writable_bytes(std::span(out)));
  EXPECT_EQ(out, first.substr(3, 2));
  EXPECT_EQ(folder.file_of("b").path(), folder_.path("model-2.safetensors"));
}

TEST_F(SafetensorsFolderTest, NamesWhatIsWrong) {
  expect_error(ErrorCode::kNotFound, {folder_.path(), "model.safetensors"}, [&] { open(); });
  expect_error(ErrorCode::kNotFound, {"/absent", "does not exist"},
               [&] { SafetensorsFolder(io_, folder_.path("absent"), ahead_); });
  store("s.safetensors", {{"a", Dtype::kU8, {5}}});
  write_index(R"({"a":"s.safetensors","b":"gone.safetensors"})");
  expect_error(ErrorCode::kNotFound, {"gone.safetensors", "'b'"}, [&] { open(); });
  write_index(R"({"a":"s.safetensors","b":"s.safetensors"})");
  expect_error(ErrorCode::kCorrupt, {"'b'", "s.safetensors", "does not hold"}, [&] { open(); });
  for (const std::string name :
       {"../s.safetensors", "/etc/passwd", "..", "", "sub/s.safetensors", ".hidden"}) {
    write_index(R"({"a":")" + name + R"("})");
    expect_error(ErrorCode::kCorrupt, {"index.json", "'a'", "'" + name + "'"}, [&] { open(); });
  }
  for (const std::string map : {"7", "[]", R"({"a":7})", "{"}) {
    write_index(map);
    expect_error(ErrorCode::kCorrupt, {"index.json"}, [&] { open(); });
  }
}

}  // namespace sluice::engine::safetensors_test
