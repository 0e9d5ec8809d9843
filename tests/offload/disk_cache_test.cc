#include "offload/disk_cache.h"

#include <gmock/gmock.h>
#include <sys/stat.h>

#include <thread>
#include <vector>

#include "core/json.h"
#include "core/text_file.h"
#include "offload/support.h"

namespace sluice::offload {
namespace {
using namespace sluice::offload::testing;

constexpr std::uint64_t kSample = 64 * kMiB;  // the least that is kept

// A service that counts what it opens, so that a measurement shows.
class CountingService final : public IoService {
 public:
  std::unique_ptr<File> open(const std::string& path, OpenMode mode) override {
    ++opened;
    return service_->open(path, mode);
  }
  std::string name() const override { return service_->name(); }
  int opened = 0;

 private:
  std::unique_ptr<IoService> service_ = make_thread_service({});
};

class DiskCacheTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!folder_.found()) GTEST_SKIP() << kNoDirectFolder;
    cache_ = folder_.file("cache");
    ::setenv("XDG_CACHE_HOME", cache_.c_str(), 1);
    ::unsetenv("SLUICE_MEASURE_DISK");
  }
  void TearDown() override {
    ::unsetenv("XDG_CACHE_HOME");
    ::unsetenv("SLUICE_MEASURE_DISK");
  }
  // The one entry, once something is kept.
  std::string entry() const {
    for (const auto& file : std::filesystem::directory_iterator(cache_ + "/sluice"))
      return file.path().string();
    return {};
  }
  void change(const std::string& key, const Json& value) const {
    Json json = read_json_file(entry());
    json[key] = value;
    write_text_file(entry(), json.dump());
  }
  DirectFolder folder_;
  std::string cache_;
  CountingService io_;
};

TEST_F(DiskCacheTest, WhatWasMeasuredIsKeptAndNotMeasuredAgain) {
  const DiskKnowledge first = know_disk(io_, folder_.path(), kSample);
  EXPECT_EQ(io_.opened, 1);
  EXPECT_GT(first.rates.read, 0);
  EXPECT_GT(first.rates.write, 0);
  EXPECT_GE(first.in_flight, kMeasuredShape.block);
  EXPECT_LE(first.in_flight, kMeasuredShape.bytes());
  const DiskKnowledge second = know_disk(io_, folder_.path(), kSample);
  EXPECT_EQ(io_.opened, 1);
  EXPECT_EQ(second.rates.read, first.rates.read);
  EXPECT_EQ(second.rates.write, first.rates.write);
  EXPECT_EQ(second.in_flight, first.in_flight);
}

TEST_F(DiskCacheTest, AnEntryThatDoesNotCountIsMeasuredAnewAndWrittenOver) {
  know_disk(io_, folder_.path(), kSample);
  const std::string whole = read_text_file(entry());
  const auto now = Json::parse(whole).at("measured").get<std::int64_t>();
  const std::vector<std::pair<std::string, Json>> changes = {{"version", 2},
                                                             {"measured", now - 8 * 24 * 3600},
                                                             {"measured", now + 3600},
                                                             {"disk", "another"},
                                                             {"read", 0},
                                                             {"write", "fast"},
                                                             {"in_flight", 0},
                                                             {"in_flight", 1 << 30},
                                                             {"measured", nullptr}};
  int measured = io_.opened;
  for (const auto& [key, value] : changes) {
    change(key, value);
    know_disk(io_, folder_.path(), kSample);
    EXPECT_EQ(io_.opened, ++measured) << key << " " << value;
    know_disk(io_, folder_.path(), kSample);
    EXPECT_EQ(io_.opened, measured) << "not written over: " << key;
  }
  for (const std::string& text : {std::string(), std::string("{"), whole.substr(0, whole.size() / 2)}) {
    write_text_file(entry(), text);
    know_disk(io_, folder_.path(), kSample);
    EXPECT_EQ(io_.opened, ++measured) << text;
  }
}

TEST_F(DiskCacheTest, ItIsMeasuredAnewWhereThatIsAskedFor) {
  know_disk(io_, folder_.path(), kSample);
  ::setenv("SLUICE_MEASURE_DISK", "0", 1);
  know_disk(io_, folder_.path(), kSample);
  EXPECT_EQ(io_.opened, 1);
  ::setenv("SLUICE_MEASURE_DISK", "1", 1);
  know_disk(io_, folder_.path(), kSample);
  EXPECT_EQ(io_.opened, 2);
}

TEST_F(DiskCacheTest, WhereNothingCanBeKeptEachRunMeasures) {
  write_text_file(cache_, "no folder");
  EXPECT_GT(know_disk(io_, folder_.path(), kSample).in_flight, 0u);
  EXPECT_GT(know_disk(io_, folder_.path(), kSample).in_flight, 0u);
  EXPECT_EQ(io_.opened, 2);
  std::string why;
  EXPECT_FALSE(keep_disk(io_, folder_.path(), {{1, 1}, kMiB}, &why));
  EXPECT_FALSE(why.empty());
  ::setenv("XDG_CACHE_HOME", "relative", 1);  // which the standard tells to ignore
  const char* home = std::getenv("HOME");
  const std::string before = home == nullptr ? "" : home;
  ::unsetenv("HOME");
  EXPECT_FALSE(keep_disk(io_, folder_.path(), {{1, 1}, kMiB}, &why));
  EXPECT_FALSE(kept_disk(io_, folder_.path()));
  ::setenv("HOME", before.c_str(), 1);
}

TEST_F(DiskCacheTest, AShortMeasurementIsNotKept) {
  know_disk(io_, folder_.path(), 4 * kMiB);
  EXPECT_FALSE(kept_disk(io_, folder_.path()));
}

TEST_F(DiskCacheTest, ManyWritersLeaveOneWholeEntry) {
  std::vector<std::thread> writers;
  for (int i = 1; i <= 8; ++i)
    writers.emplace_back([this, i] {
      std::string why;
      for (int round = 0; round < 20; ++round)
        EXPECT_TRUE(keep_disk(io_, folder_.path(), {{i * 1e6, i * 1e6}, kMiB}, &why)) << why;
    });
  for (int i = 0; i < 50; ++i)
    if (const auto kept = kept_disk(io_, folder_.path())) {
      EXPECT_EQ(kept->rates.read, kept->rates.write);
    }
  for (std::thread& writer : writers) writer.join();
  EXPECT_TRUE(kept_disk(io_, folder_.path()));
  std::size_t files = 0;
  for ([[maybe_unused]] const auto& file : std::filesystem::directory_iterator(cache_ + "/sluice")) ++files;
  EXPECT_EQ(files, 1u);
}

}  // namespace
}  // namespace sluice::offload
