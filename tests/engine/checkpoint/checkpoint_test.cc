#include "engine/checkpoint/checkpoint.h"

#include <sys/file.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "core/text_file.h"
#include "engine/checkpoint/folders.h"
#include "engine/checkpoint/support.h"
#include "testing.h"

namespace sluice::engine {
namespace checkpoint_test {

namespace fs = std::filesystem;

// Adds a file of the model with one tensor.
void add_model(CheckpointWriter& writer, offload::IoService& io, allocator::Ledger& ledger,
               const std::string& payload) {
  const std::string bytes = SafetensorsHeader({{"t", Dtype::kU8, {payload.size()}}}).bytes() + payload;
  writer.add_tensor_file(kModelFile, bytes.size());
  const std::string path = path_in(writer.partial(), kModelFile);
  writer.finish_tensor_file(kModelFile, write_alone(io, ledger, path, bytes, 3 * kDiskBlock));
}

void add_text(CheckpointWriter& writer, const std::string& name, std::string_view text) {
  writer.add_file({name, {std::as_bytes(std::span(text))}});
}

class CheckpointTest : public FilesTest {
 protected:
  std::string out() const { return folder_.path("out"); }
  std::unique_ptr<CheckpointWriter> begin(std::uint64_t step) {
    return std::make_unique<CheckpointWriter>(io_, CheckpointWriter::Options{out(), step, 1000});
  }
  // Writes a whole checkpoint whose model has `bytes` bytes.
  std::string save(std::uint64_t step, std::size_t bytes = 5000) {
    auto writer = begin(step);
    add_model(*writer, io_, ledger_, pattern(bytes, static_cast<std::uint32_t>(step)));
    add_text(*writer, "config.json", R"({"n": 1})");
    return writer->commit({{"next_sample", step * 8}, {"lr", 0.1}});
  }
  std::vector<std::uint64_t> steps() const {
    std::vector<std::uint64_t> steps;
    for (const auto& whole : list_checkpoints(out()).whole) steps.push_back(whole.step);
    return steps;
  }
  std::vector<std::string> entries() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(out())) names.push_back(entry.path().filename().string());
    std::sort(names.begin(), names.end());
    return names;
  }
};

using Names = std::vector<std::string>;
using Steps = std::vector<std::uint64_t>;

TEST_F(CheckpointTest, IsReadBack) {
  const std::string path = save(100);
  EXPECT_EQ(path, out() + "/step-00000100");
  const CheckpointReader reader(io_, path, ahead_);
  EXPECT_EQ(reader.step(), 100u);
  EXPECT_EQ(reader.run()["next_sample"], 800);
  EXPECT_EQ(reader.run()["lr"].get<double>(), 0.1);
  EXPECT_EQ(read_all(*reader.verified("config.json")), R"({"n": 1})");
  EXPECT_TRUE(reader.has(kModelFile));
  EXPECT_FALSE(reader.has(optimizer_file("exp_avg")));
  std::string bytes(5000, '\0');
  auto tensors = reader.open_tensors(kModelFile);
  tensors->read(tensors->tensor("t"), 0, std::as_writable_bytes(std::span(bytes)));
  EXPECT_EQ(bytes, pattern(5000, 100));
  reader.verify();
  expect_error(ErrorCode::kNotFound, {path, "optimizer.exp_avg.safetensors"},
               [&] { reader.open_tensors(optimizer_file("exp_avg")); });
  EXPECT_EQ(entries(), Names{"step-00000100"});
}

TEST_F(CheckpointTest, ManifestHasTheDocumentedForm) {
  Manifest manifest;
  manifest.step = 7;
  FileSummer summer;
  summer.add(std::as_bytes(std::span("abc", 3)));
  manifest.files.push_back({"config.json", summer.finish()});
  manifest.run = {{"seed", 1}};
  // The digits were computed with Python's xxhash (xxh3_64).
  const std::string golden = R"({
  "block_bytes": 4194304,
  "files": [
    {
      "blocks": "78af5f94892f3950",
      "bytes": 3,
      "checksum": "f267cda02014e7eb",
      "name": "config.json"
    }
  ],
  "format": "sluice checkpoint",
  "run": {
    "seed": 1
  },
  "step": 7,
  "version": 2,
  "checksum": "c6a0dcab324fb488"
}
)";
  EXPECT_EQ(manifest.to_text(), golden);
  EXPECT_EQ(Manifest::parse(golden, "m").files[0].sum, manifest.files[0].sum);
}

// Returns a manifest's text with another body, and the checksum of that body.
std::string resealed(std::string text, const std::string& from, const std::string& to) {
  const std::size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  text.replace(at, from.size(), to);
  std::string body = text.substr(0, text.rfind(",\n"));
  return body + ",\n  \"checksum\": \"" + to_hex(checksum(std::as_bytes(std::span(body)))) + "\"\n}\n";
}

TEST_F(CheckpointTest, ManifestIsChecked) {
  const std::string text = read_all(save(3) + "/manifest.json");
  for (std::size_t i = 0; i < text.size(); ++i) {
    std::string changed = text;
    changed[i] = static_cast<char>(changed[i] ^ 1);
    expect_error(ErrorCode::kCorrupt, {"the/manifest"}, [&] { Manifest::parse(changed, "the/manifest"); });
    expect_error(ErrorCode::kCorrupt, {"the/manifest"},
                 [&] { Manifest::parse(text.substr(0, i), "the/manifest"); });
  }
  const auto refused = [&](const std::string& from, const std::string& to, ErrorCode code, Names parts) {
    SCOPED_TRACE(to);
    expect_error(code, parts, [&] { Manifest::parse(resealed(text, from, to), "the/manifest"); });
  };
  refused("\"version\": 2", "\"version\": 1", ErrorCode::kInvalidArgument,
          {"the/manifest", "version 1", "version 2"});
  refused("sluice checkpoint", "another", ErrorCode::kCorrupt, {"the/manifest", "not the manifest"});
  refused("\"sluice checkpoint\"", "1", ErrorCode::kCorrupt, {"the/manifest", "not the manifest"});
  refused("\"config.json\"", "\"../config.json\"", ErrorCode::kCorrupt, {"the/manifest", "../config.json"});
  refused("\"config.json\"", "\"model.safetensors\"", ErrorCode::kCorrupt, {"the/manifest", "twice"});
  refused("\"bytes\": 8", "\"bytes\": 4194305", ErrorCode::kCorrupt,
          {"the/manifest", "config.json", "4194305"});
  refused("\"block_bytes\": 4194304", "\"block_bytes\": 8", ErrorCode::kCorrupt, {"the/manifest", "8"});
  for (const char* step : {"\"3\"", "-3", "1e300", "true"})
    refused("\"step\": 3", std::string("\"step\": ") + step, ErrorCode::kInvalidArgument,
            {"the/manifest", "step"});
}

TEST_F(CheckpointTest, DamageIsFound) {
  const std::string path = save(1, 9 * kMiB), model = path + "/model.safetensors",
                    config = path + "/config.json";
  const std::string whole = read_all(model);
  std::string flipped = whole;
  flipped[5 * kMiB] = static_cast<char>(flipped[5 * kMiB] ^ 1);
  write_all(model, flipped);
  const CheckpointReader reader(io_, path, ahead_);
  expect_error(ErrorCode::kCorrupt, {model, "4194304"}, [&] { reader.verify(); });
  auto tensors = reader.open_tensors(kModelFile);
  std::string bytes(kMiB, '\0');
  // Reads a block that is not damaged.
  tensors->read(tensors->tensor("t"), 0, std::as_writable_bytes(std::span(bytes)));
  expect_error(ErrorCode::kCorrupt, {model}, [&] {
    tensors->read(tensors->tensor("t"), 5 * kMiB, std::as_writable_bytes(std::span(bytes)));
  });
  write_all(model, whole);
  reader.verify();
  write_all(config, R"({"n": 2})");
  expect_error(ErrorCode::kCorrupt, {config}, [&] { (void)reader.verified("config.json"); });
  expect_error(ErrorCode::kCorrupt, {config}, [&] { reader.verify(); });
  write_all(config, "");
  expect_error(ErrorCode::kCorrupt, {config, "0 bytes"}, [&] { CheckpointReader(io_, path, ahead_); });
  fs::remove(config);
  expect_error(ErrorCode::kCorrupt, {config}, [&] { CheckpointReader(io_, path, ahead_); });
  ASSERT_EQ(::mkfifo(config.c_str(), 0600), 0);
  expect_error(ErrorCode::kInvalidArgument, {config, "a named pipe"},
               [&] { CheckpointReader(io_, path, ahead_); });
  expect_error(ErrorCode::kNotFound, {"manifest.json"},
               [&] { CheckpointReader(io_, folder_.path(), ahead_); });
}

TEST_F(CheckpointTest, OnlyWholeOnesAreListed) {
  EXPECT_TRUE(list_checkpoints(out()).whole.empty());
  for (const std::uint64_t step : {300u, 20u, 123456789u}) save(step);
  fs::create_directories(out() + "/step-00000040");
  save(50);
  fs::resize_file(out() + "/step-00000050/model.safetensors", 100);
  save(60);
  fs::rename(out() + "/step-00000060", out() + "/step-00000061");
  fs::create_directories(out() + "/step-7");
  fs::create_directories(out() + "/step-00000001x");
  write_all(out() + "/step-00000002", "a file");
  EXPECT_EQ(steps(), (Steps{20, 300, 123456789}));
  const auto broken = list_checkpoints(out()).broken;
  ASSERT_EQ(broken.size(), 3u);
  EXPECT_NE(broken[0].reason.find("manifest.json"), std::string::npos);
  EXPECT_NE(broken[1].reason.find("model.safetensors' has 100 bytes"), std::string::npos);
  EXPECT_NE(broken[2].reason.find("step 60"), std::string::npos);
}

TEST_F(CheckpointTest, WithoutCommitNothingIsLeft) {
  save(1);
  {
    auto writer = begin(2);
    add_text(*writer, "config.json", "{}");
    writer->add_tensor_file(kModelFile, 10);
    EXPECT_EQ(steps(), Steps{1});
    expect_error(ErrorCode::kInternal, {kModelFile}, [&] { writer->commit({}); });
  }
  EXPECT_EQ(entries(), Names{"step-00000001"});
}

TEST_F(CheckpointTest, TheSameStepIsReplaced) {
  save(1, 10);
  save(1, 20);
  EXPECT_EQ(entries(), Names{"step-00000001"});
  const CheckpointReader reader(io_, out() + "/step-00000001", ahead_);
  EXPECT_EQ(reader.open_tensors(kModelFile)->tensor("t").bytes(), 20u);
}

TEST_F(CheckpointTest, NamesAreChecked) {
  auto writer = begin(1);
  add_text(*writer, "config.json", "{}");
  for (const char* name : {"../x", "a/b", "", ".hidden", "manifest.json", "config.json"})
    expect_error(ErrorCode::kInvalidArgument, {std::string("'") + name + "'"},
                 [&] { add_text(*writer, name, ""); });
  expect_error(ErrorCode::kInvalidArgument, {"'config.json'"},
               [&] { writer->add_tensor_file("config.json", 1); });
}

TEST_F(CheckpointTest, AFileInPiecesIsOneFile) {
  const std::string first = "head", second(3 * kMiB + 7, 'x'), none;
  auto writer = begin(1);
  OwnFile file{"own.bin", {}};
  for (const std::string* piece : {&first, &none, &second})
    file.pieces.push_back(std::as_bytes(std::span(*piece)));
  EXPECT_EQ(file.bytes(), first.size() + second.size());
  writer->add_file(file);
  writer->add_file({"none.bin", {}});
  const std::string folder = writer->commit({});
  const CheckpointReader reader(io_, folder, ahead_);
  EXPECT_EQ(reader.verified("own.bin"), folder + "/own.bin");
  EXPECT_EQ(read_all(folder + "/own.bin"), first + second);
  EXPECT_EQ(reader.verified("none.bin"), folder + "/none.bin");
  EXPECT_EQ(reader.verified("other.bin"), std::nullopt);
  write_all(folder + "/own.bin", first + std::string(second.size(), 'y'));
  expect_error(ErrorCode::kCorrupt, {"own.bin"}, [&] { (void)reader.verified("own.bin"); });
}

TEST_F(CheckpointTest, AFileOfAnotherFolderIsCopied) {
  const std::string text = std::string(2 * kMiB + 5, 't') + "end", source = folder_.path("source");
  write_all(source, text);
  auto writer = begin(1);
  EXPECT_EQ((OwnFile{"copy", {}, source}).bytes(), text.size());
  writer->add_file({"copy", {}, source});
  expect_error(ErrorCode::kNotFound, {"'gone'"}, [&] { writer->add_file({"other", {}, "gone"}); });
  const std::string folder = writer->commit({});
  const CheckpointReader reader(io_, folder, ahead_);
  EXPECT_EQ(reader.verified("copy"), std::nullopt) << "a copy that is changed is no defect";
  EXPECT_EQ(read_all(folder + "/copy"), text);
}

TEST_F(CheckpointTest, AFileBeyondTheProcesssLimitIsToldBeforeItIsWritten) {
  struct rlimit before = {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const struct rlimit small = {kMiB, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  check_file_limit(std::vector<std::uint64_t>{1000, kMiB});
  expect_error(ErrorCode::kBudget, {"2.00 MiB", "1.00 MiB", "ulimit -f"}, [] {
    check_file_limit(std::vector<std::uint64_t>{1000, 2 * kMiB});
  });
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
}

TEST_F(CheckpointTest, RoomIsCheckedBefore) {
  const std::uint64_t sizes[] = {std::uint64_t{1} << 60, 100};
  EXPECT_GE(bytes_needed(sizes), (std::uint64_t{1} << 60) + 100);
  expect_error(ErrorCode::kBudget, {out(), "are free", "missing"}, [&] {
    CheckpointWriter(io_, {out(), 1, bytes_needed(sizes)});
  });
  EXPECT_FALSE(fs::exists(out()));
}

TEST_F(CheckpointTest, BytesNeededCoversWhatIsWritten) {
  const std::string path = save(1, 9 * kMiB);
  std::uint64_t on_disk = 0;
  for (const auto& entry : fs::directory_iterator(path)) on_disk += round_up(entry.file_size(), kDiskBlock);
  const std::uint64_t sizes[] = {fs::file_size(path + "/model.safetensors"),
                                 fs::file_size(path + "/config.json")};
  EXPECT_GE(bytes_needed(sizes), on_disk);
  EXPECT_LE(bytes_needed(sizes), on_disk + 100 * kKiB);
}

TEST_F(CheckpointTest, PruneKeepsTheNewest) {
  for (const std::uint64_t step : {1u, 2u, 3u, 4u}) save(step);
  fs::create_directories(out() + "/step-00000009");  // a broken one is neither counted nor deleted
  prune(out(), 2);
  EXPECT_EQ(steps(), (Steps{3, 4}));
  EXPECT_EQ(entries(), (Names{"step-00000003", "step-00000004", "step-00000009"}));
  prune(out(), 5);
  EXPECT_EQ(steps(), (Steps{3, 4}));
  expect_error(ErrorCode::kInvalidArgument, {out()}, [&] { prune(out(), 0); });
}

TEST_F(CheckpointTest, PruneSparesOneMoreAndTellsWhatIsGone) {
  for (const std::uint64_t step : {1u, 2u, 3u, 4u}) save(step);
  EXPECT_EQ(prune(out(), 2, 1), (Names{out() + "/step-00000002"}));
  EXPECT_EQ(steps(), (Steps{1, 3, 4}));
  EXPECT_EQ(prune(out(), 2, 4), (Names{out() + "/step-00000001"}));
  EXPECT_EQ(prune(out(), 1, 9), (Names{out() + "/step-00000003"}));
  EXPECT_EQ(steps(), (Steps{4}));
}

TEST_F(CheckpointTest, LeftoversOfDeadRunsAreRemovedAndOfLiveOnesNot) {
  save(1);
  auto live = begin(2);
  add_text(*live, "config.json", "{}");
  fs::create_directories(out() + "/.step-00000003.partial-4194305");
  write_all(out() + "/.step-00000003.partial-4194305/manifest.json", "{");
  fs::create_directories(out() + "/.step-00000001.removed-1");
  fs::create_directories(out() + "/.git");
  fs::create_directories(out() + "/.step-x.partial-1");
  EXPECT_EQ(remove_leftovers(out()), (Names{".step-00000001.removed-1", ".step-00000003.partial-4194305"}));
  live->commit({});
  EXPECT_EQ(steps(), (Steps{1, 2}));
  EXPECT_TRUE(fs::exists(out() + "/.git"));
  EXPECT_TRUE(remove_leftovers(out()).empty());
  EXPECT_TRUE(remove_leftovers(folder_.path("absent")).empty());
}

TEST_F(CheckpointTest, WhatOthersPutInTheFolderIsNeitherFollowedNorChanged) {
  fs::create_directories(out());
  write_all(out() + "/victim", "mine");
  fs::create_symlink("victim", out() + "/.lock");
  expect_error(ErrorCode::kInvalidArgument, {out() + "/.lock", "a link"}, [&] { RunLock{out()}; });
  fs::remove(out() + "/.lock");
  fs::create_hard_link(out() + "/victim", out() + "/.lock");
  expect_error(ErrorCode::kInvalidArgument, {out() + "/.lock", "another name"}, [&] { RunLock{out()}; });
  fs::remove(out() + "/.lock");
  ASSERT_EQ(::mkfifo((out() + "/.lock").c_str(), 0644), 0);
  expect_error(ErrorCode::kInvalidArgument, {out() + "/.lock", "a named pipe"}, [&] { RunLock{out()}; });
  EXPECT_EQ(read_text_file(out() + "/victim"), "mine");
}

TEST_F(CheckpointTest, NoTwoFoldersThatAreWrittenOrDeletedHaveOneName) {
  EXPECT_NE(partial_name(5), partial_name(5));
  EXPECT_NE(removed_name("step-00000005"), removed_name("step-00000005"));
  auto one = begin(5), other = begin(5);
  one->commit({});
  other->commit({});
  EXPECT_EQ(steps(), Steps{5});
  EXPECT_EQ(entries(), (Names{"step-00000005"}));
}

// Saves steps 1, 2, 3, ... (each also replacing its own first version) and prunes, until it is killed.
[[noreturn]] void save_for_ever(const std::string& out) {
  allocator::Ledger ledger;
  HeldFiles io;
  for (std::uint64_t step = 1;; ++step)
    for (int version = 0; version < 2; ++version) {
      CheckpointWriter writer(io, {out, step, 1000});
      add_model(writer, io, ledger, pattern(100'000, static_cast<std::uint32_t>(step)));
      writer.commit({{"step", step}});
      prune(out, 2);
    }
}

TEST_F(CheckpointTest, AKillAtAnyInstantLeavesWholeCheckpoints) {
  save(0);
  std::uint64_t newest = 0;
  for (int kill_number = 0; kill_number < 20; ++kill_number) {
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) save_for_ever(out());
    // The first child lives until it has saved, however slow the disk is; the others die at any instant.
    while (kill_number == 0 && list_checkpoints(out()).whole.back().step == 0) ::usleep(1000);
    ::usleep(3000 + static_cast<unsigned>(kill_number) * 1777);
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    const CheckpointList list = list_checkpoints(out());
    EXPECT_TRUE(list.broken.empty()) << list.broken.at(0).reason;
    ASSERT_FALSE(list.whole.empty());
    for (const auto& whole : list.whole) CheckpointReader(io_, whole.path, ahead_).verify();
    newest = std::max(newest, list.whole.back().step);
    remove_leftovers(out());
    for (const std::string& name : entries()) EXPECT_TRUE(checkpoint_step(name)) << name;
  }
  EXPECT_GT(newest, 0u);  // checkpoints were saved
}

TEST_F(CheckpointTest, TwoRunsCannotShareAFolder) {
  auto lock = std::make_unique<RunLock>(out());
  expect_error(ErrorCode::kInvalidArgument, {out(), std::to_string(::getpid())},
               [&] { RunLock second(out()); });
  lock.reset();
  RunLock again(out());
  write_all(folder_.path("file"), "");
  expect_error(ErrorCode::kIo, {folder_.path("file")}, [&] { RunLock bad(folder_.path("file")); });
}

TEST_F(CheckpointTest, ALockLeavesNothing) {
  const std::string inner = folder_.path("made/for/this");
  {
    RunLock lock(inner);
    expect_error(ErrorCode::kInvalidArgument, {inner}, [&] { RunLock second(inner); });
    EXPECT_TRUE(std::filesystem::exists(inner + "/.lock"));  // the refused run removed nothing
  }
  EXPECT_FALSE(std::filesystem::exists(folder_.path("made")));
  std::filesystem::create_directories(folder_.path("there"));
  { RunLock lock(folder_.path("there/inner")); }
  EXPECT_TRUE(std::filesystem::is_empty(folder_.path("there")));
  {
    RunLock lock(inner);
    write_all(inner + "/kept", "");
  }
  EXPECT_TRUE(std::filesystem::exists(inner + "/kept"));
  EXPECT_FALSE(std::filesystem::exists(inner + "/.lock"));
}

TEST_F(CheckpointTest, TextThatIsNotUtf8IsRefused) {
  auto writer = begin(12);
  expect_error(ErrorCode::kInvalidArgument, {"step 12"}, [&] { writer->commit({{"note", "\xff"}}); });
}

}  // namespace checkpoint_test
}  // namespace sluice::engine
