// Tests of the disk tier on real folders: striping, checks of folders, limits and space.
#include <unistd.h>

#include "offload/records.h"
#include "testing.h"
#include "tests/offload/support.h"
#include "thrown.h"

namespace sluice::offload::disk_records_test {

using allocator::Ledger;
using allocator::Purpose;
using allocator::Tier;
using namespace testing;

constexpr std::size_t kBlock = RecordStore::kBlock;

class DiskRecords : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!a_.found() || !b_.found()) GTEST_SKIP() << testing::kNoDirectFolder;
    service_ = make_io_service({});
  }
  void expect_refused(const std::string& folder, ErrorCode code, const std::vector<std::string>& parts) {
    expect_error(code, parts, [&] { RecordStore(*service_, {{a_.path(), kGiB}, {folder, kGiB}}, ledger_); });
  }
  DirectFolder a_, b_;
  std::unique_ptr<IoService> service_;
  Ledger ledger_;
};

TEST_F(DiskRecords, StripedOverFoldersFromSeveralThreads) {
  RecordStore store(*service_, {{a_.path(), kGiB}, {b_.path(), kGiB}}, ledger_);
  constexpr std::size_t kBytes = 3 * kBlock + 7 * kDiskBlock;
  std::vector<RecordId> records;
  for (int i = 0; i < 6; ++i)
    records.push_back(store.define("r" + std::to_string(i), kBytes, Purpose::kParameter));
  store.allocate();
  std::atomic<int> good = 0;
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < records.size(); ++t)
    threads.emplace_back([&, t] {
      Buffer data(kBytes), back(kBytes);
      for (std::uint64_t round = 0; round < 5; ++round) {
        fill(data.all(), t * 10 + round);
        put(store, records[t], 0, data.all());
        get(store, records[t], 0, back.all());
        good += equal(data.all(), back.all()) ? 1 : 0;
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(good, 30);
}

TEST_F(DiskRecords, TheStoreWaitsForItsTransfers) {
  Buffer data(16 * kBlock);
  std::atomic<bool> ended = false;
  {
    RecordStore store(*service_, {{a_.path(), kGiB}}, ledger_);
    const RecordId record = store.define("r", 16 * kBlock, Purpose::kParameter);
    store.allocate();
    store.write(record, 0, data.all(), [&](std::exception_ptr error) { ended = error == nullptr; });
  }
  EXPECT_TRUE(ended);
}

TEST_F(DiskRecords, FoldersAreCheckedAtOnceAndNamed) {
  expect_refused(b_.file("missing"), ErrorCode::kNotFound, {b_.file("missing")});
  std::ofstream(b_.file("plain")) << "text";
  expect_refused(b_.file("plain"), ErrorCode::kInvalidArgument, {"not a folder"});
  expect_error(ErrorCode::kInvalidArgument, {}, [&] { RecordStore(*service_, {}, ledger_); });
}

TEST_F(DiskRecords, AFolderInMemoryIsRefused) {
  if (::access("/dev/shm", W_OK) != 0) GTEST_SKIP() << "no /dev/shm";
  expect_refused("/dev/shm", ErrorCode::kInvalidArgument, {"/dev/shm", "in memory"});
}

TEST_F(DiskRecords, ALimitThatIsTooSmallSaysWhatIsMissing) {
  RecordStore store(*service_, {{a_.path(), 4 * kMiB}, {b_.path(), 2 * kMiB}}, ledger_);
  store.define("r", 10 * kBlock, Purpose::kParameter);
  expect_error(ErrorCode::kBudget, {a_.path(), b_.path(), "1.00 MiB are missing", "3.00 MiB are missing"},
               [&] { store.allocate(); });
}

TEST_F(DiskRecords, ADiskThatIsTooSmallSaysWhatIsFreeAndNothingIsKept) {
  RecordStore store(*service_, {{a_.path(), UINT64_MAX}}, ledger_);
  const std::uint64_t beyond = round_up(std::filesystem::space(a_.path()).available + 64 * kGiB, kDiskBlock);
  store.define("r", beyond, Purpose::kParameter);
  expect_error(ErrorCode::kBudget, {a_.path(), "free", "too little"}, [&] { store.allocate(); });
  EXPECT_EQ(ledger_.snapshot().total[static_cast<std::size_t>(Tier::kDisk)].current, 0u);
}

}  // namespace sluice::offload::disk_records_test
