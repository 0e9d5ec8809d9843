#include "offload/disk_cache.h"

#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

#include "core/json.h"
#include "core/text_file.h"
#include "offload/support.h"
#include "testing.h"
#include "variable.h"

// Takes the system's place: with what flock() fails in these tests; 0: it does what it is asked.
static std::atomic<int> flock_fails_with = 0;
extern "C" int flock(int descriptor, int operation) noexcept {
  if (flock_fails_with == 0) return static_cast<int>(::syscall(SYS_flock, descriptor, operation));
  errno = flock_fails_with;
  return -1;
}

namespace sluice::offload::disk_cache_test {
using namespace sluice::offload::testing;

constexpr std::uint64_t kSample = 64 * kMiB;  // shorter measurements are not kept

class DiskCacheTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!folder_.found()) GTEST_SKIP() << kNoDirectFolder;
    cache_ = folder_.file("cache");
    cached_in_.emplace("XDG_CACHE_HOME", cache_);
    as_usual_.emplace("SLUICE_MEASURE_DISK", std::nullopt);
  }
  // Returns the path of the one entry, once something is kept.
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
  // Calls know_disk() with a measurement that finds something else each time.
  DiskKnowledge know(std::uint64_t bytes = kSample) {
    return know_disk(folder_.path(), bytes, [this](const std::string& folder, std::uint64_t size) {
      EXPECT_EQ(folder, folder_.path());
      EXPECT_GT(size, 0u);
      ++measured_;
      return known_of(1e9 + measured_, disturbed_);
    });
  }
  static DiskKnowledge known_of(double rate, bool disturbed = false) {
    DiskKnowledge known;
    known.rates = {rate, 2 * rate, 1.5 * rate};
    known.processor_seconds = 1e-10;
    known.io.way = IoWay::kThreads;
    known.io.block_bytes = 256 * kKiB;
    known.io.threads = 12;
    known.disturbed = disturbed;
    return known;
  }
  DirectFolder folder_;
  std::string cache_;
  std::optional<Variable> cached_in_, as_usual_;
  int measured_ = 0;
  bool disturbed_ = false;
};

TEST_F(DiskCacheTest, AMeasurementIsKeptAndNotRepeated) {
  const DiskKnowledge first = know(), second = know();
  EXPECT_EQ(measured_, 1);
  for (const DiskKnowledge& known : {first, second}) {
    EXPECT_EQ(known.rates.read, 1e9 + 1);
    EXPECT_EQ(known.rates.write, 2e9 + 2);
    EXPECT_EQ(known.rates.together, 1.5e9 + 1.5);
    EXPECT_EQ(known.processor_seconds, 1e-10);
    EXPECT_EQ(known.io.way, IoWay::kThreads);
    EXPECT_EQ(known.io.block_bytes, 256 * kKiB);
    EXPECT_EQ(known.io.threads, 12u);
    EXPECT_FALSE(known.disturbed);
  }
}

// Ranks of one machine start together, and would measure each other.
TEST_F(DiskCacheTest, OneMeasuresAndTheOthersWaitForIt) {
  std::atomic<int> measured = 0;
  std::vector<double> found(4);
  {
    std::vector<std::jthread> all;
    for (double& rate : found)
      all.emplace_back([&] {
        const auto measure = [&](const std::string&, std::uint64_t) {
          ++measured;
          std::this_thread::sleep_for(std::chrono::milliseconds(50));
          return known_of(2e9);
        };
        rate = know_disk(folder_.path(), kSample, measure).rates.read;
      });
  }
  EXPECT_EQ(measured, 1);
  EXPECT_EQ(found, std::vector<double>(4, 2e9));
}

// Lustre has none where it is mounted without -o flock. Only another one that measures is waited for.
TEST_F(DiskCacheTest, NobodyWaitsWhereTheFileSystemHasNoLocks) {
  for (const int error : {ENOSYS, ENOLCK}) {
    flock_fails_with = error;
    const auto begin = std::chrono::steady_clock::now();
    know(4 * kMiB);
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(30)) << error;
    flock_fails_with = 0;
  }
}

TEST_F(DiskCacheTest, ByDefaultTheDiskIsMeasured) {
  const DiskKnowledge known = know_disk(folder_.path(), kSample);
  EXPECT_GT(known.rates.read, 0);
  EXPECT_GT(known.rates.write, 0);
  const auto kept = kept_disk(folder_.path());
  ASSERT_TRUE(kept);
  EXPECT_EQ(kept->rates.read, known.rates.read);
  EXPECT_EQ(in_flight(kept->io), in_flight(known.io));
}

TEST_F(DiskCacheTest, AnInvalidEntryIsMeasuredAnewAndOverwritten) {
  know();
  const std::string whole = read_text_file(entry());
  const auto now = Json::parse(whole).at("measured").get<std::int64_t>();
  const std::vector<std::pair<std::string, Json>> changes = {{"version", 3},
                                                             {"measured", now - 8 * 24 * 3600},
                                                             {"measured", now + 3600},
                                                             {"disk", "another"},
                                                             {"read", 0},
                                                             {"write", "fast"},
                                                             {"together", 0},
                                                             {"processor_seconds_per_byte", -1},
                                                             {"under_way", 0},
                                                             {"under_way", 1 << 20},
                                                             {"block", 1000},
                                                             {"service", 3},
                                                             {"disturbed", "no"},
                                                             {"measured", nullptr}};
  for (const auto& [key, value] : changes) {
    change(key, value);
    const int before = measured_;
    know();
    EXPECT_EQ(measured_, before + 1) << key << " " << value;
    know();
    EXPECT_EQ(measured_, before + 1) << "not written over: " << key;
  }
  for (const std::string& text : {std::string(), std::string("{"), whole.substr(0, whole.size() / 2)}) {
    write_text_file(entry(), text);
    const int before = measured_;
    know();
    EXPECT_EQ(measured_, before + 1) << text;
  }
}

TEST_F(DiskCacheTest, ADisturbedMeasurementCountsForAnHour) {
  disturbed_ = true;
  EXPECT_TRUE(know().disturbed);
  EXPECT_TRUE(know().disturbed);
  EXPECT_EQ(measured_, 1);
  const auto now = read_json_file(entry()).at("measured").get<std::int64_t>();
  change("measured", now - 2 * 3600);
  know();
  EXPECT_EQ(measured_, 2);
  disturbed_ = false;
  change("measured", now - 2 * 3600);
  know();
  change("measured", now - 2 * 3600);
  know();
  EXPECT_EQ(measured_, 3);
}

TEST_F(DiskCacheTest, RoundsThatVaryCountAsDisturbed) {
  std::vector<DiskTrial> trial(1);
  trial[0].rates = {1e9, 1e9};
  trial[0].steady = 0.9;
  EXPECT_FALSE(knowledge_of(folder_.path(), kMiB, trial).disturbed);
  trial[0].steady = 0.5;
  EXPECT_TRUE(knowledge_of(folder_.path(), kMiB, trial).disturbed);
}

TEST_F(DiskCacheTest, TheEnvironmentCanAskForANewMeasurement) {
  know();
  const Variable no("SLUICE_MEASURE_DISK", "0");
  know();
  EXPECT_EQ(measured_, 1);
  const Variable yes("SLUICE_MEASURE_DISK", "1");
  know();
  EXPECT_EQ(measured_, 2);
}

TEST_F(DiskCacheTest, EveryRunMeasuresWhereNothingCanBeKept) {
  write_text_file(cache_, "no folder");
  know();
  know();
  EXPECT_EQ(measured_, 2);
  std::string why;
  EXPECT_FALSE(keep_disk(folder_.path(), known_of(1), &why));
  EXPECT_FALSE(why.empty());
  // The standard says to ignore relative paths.
  const Variable relative("XDG_CACHE_HOME", "relative"), none("HOME", std::nullopt);
  EXPECT_FALSE(keep_disk(folder_.path(), known_of(1), &why));
  EXPECT_FALSE(kept_disk(folder_.path()));
}

TEST_F(DiskCacheTest, AShortMeasurementIsNotKept) {
  know(4 * kMiB);
  EXPECT_FALSE(kept_disk(folder_.path()));
}

TEST_F(DiskCacheTest, OneServiceForSeveralDisksHasAsMuchUnderWayAsTheyNeed) {
  DiskKnowledge slow = known_of(1e9), fast = known_of(3e9);
  slow.io = {.way = IoWay::kUring, .queue_depth = 8, .block_bytes = kMiB};
  const std::vector<DiskKnowledge> both = {fast, slow};
  const IoOptions io = options_for(both);
  EXPECT_EQ(io.way, IoWay::kUring);
  EXPECT_EQ(io.block_bytes, kMiB);
  EXPECT_EQ(io.queue_depth, 8u + 3u);
  EXPECT_EQ(in_flight(options_for({})), in_flight(IoOptions{}));
}

TEST_F(DiskCacheTest, ManyWritersLeaveOneWholeEntry) {
  std::vector<std::thread> writers;
  for (int i = 1; i <= 8; ++i)
    writers.emplace_back([this, i] {
      std::string why;
      for (int round = 0; round < 20; ++round)
        EXPECT_TRUE(keep_disk(folder_.path(), known_of(i * 1e6), &why)) << why;
    });
  for (int i = 0; i < 50; ++i)
    if (const auto kept = kept_disk(folder_.path())) {
      EXPECT_EQ(2 * kept->rates.read, kept->rates.write);
    }
  for (std::thread& writer : writers) writer.join();
  EXPECT_TRUE(kept_disk(folder_.path()));
  std::size_t files = 0;
  for ([[maybe_unused]] const auto& file : std::filesystem::directory_iterator(cache_ + "/sluice")) ++files;
  EXPECT_EQ(files, 1u);
}

}  // namespace sluice::offload::disk_cache_test
