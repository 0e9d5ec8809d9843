// Tests that every File keeps the contract of offload/file.h.

#include <future>

#include "offload/test_files.h"
#include "testing.h"
#include "tests/offload/support.h"
#include "thrown.h"

namespace sluice::offload::file_test {

using namespace testing;

enum class Kind { kUring, kThreads, kMemory, kVolatile, kFaultless, kDelayed };

std::string name_of(Kind kind) {
  static const char* const kNames[] = {"uring", "threads", "memory", "volatile", "faultless", "delayed"};
  return kNames[static_cast<int>(kind)];
}

class FileTest : public ::testing::TestWithParam<Kind> {
 protected:
  void SetUp() override {
    switch (GetParam()) {
      case Kind::kUring:
        return set_up_service(true);
      case Kind::kThreads:
        return set_up_service(false);
      case Kind::kMemory:
        file_ = make_memory_file("memory");
        return;
      case Kind::kVolatile:
        file_ = make_volatile_file("volatile");
        return;
      case Kind::kFaultless:
        return set_up_faulty(0);
      case Kind::kDelayed:
        return set_up_faulty(200);
    }
  }
  void set_up_service(bool uring) {
    if (!folder_.found()) GTEST_SKIP() << testing::kNoDirectFolder;
    std::string why;
    if (uring && !uring_available(&why)) GTEST_SKIP() << why;
    // Depth and block size are small, so that transfers are cut and queued.
    const IoOptions options{.queue_depth = 4, .block_bytes = 64 * kKiB, .threads = 3};
    service_ = uring ? make_uring_service(options) : make_thread_service(options);
    file_ = service_->open(folder_.path(), OpenMode::kUnnamed);
  }
  void set_up_faulty(unsigned delay) {
    inner_ = make_memory_file("inner");
    Faults faults;
    faults.delay_microseconds = delay;
    file_ = make_faulty_file(*inner_, faults);
  }

  DirectFolder folder_;
  std::unique_ptr<IoService> service_;
  std::unique_ptr<File> inner_;
  std::unique_ptr<File> file_;
};

TEST_P(FileTest, ReadsWhatWasWritten) {
  Buffer data(kMiB + 3 * kDiskBlock), back(data.all().size());
  fill(data.all(), 1);
  write_now(*file_, 5 * kDiskBlock, data.all());
  EXPECT_EQ(file_->size(), 5 * kDiskBlock + data.all().size());
  file_->sync();
  read_now(*file_, 5 * kDiskBlock, back.all());
  EXPECT_TRUE(equal(data.all(), back.all()));
}

TEST_P(FileTest, ManyTransfersOfRandomSizeAtATime) {
  constexpr std::size_t kBytes = 16 * kMiB;
  Buffer data(kBytes), back(kBytes);
  fill(data.all(), 2);
  file_->allocate(kBytes);
  EXPECT_EQ(file_->size(), kBytes);
  const CounterRandom random(3, 0);
  const auto in_pieces = [&](std::uint64_t stream, auto&& transfer) {
    TransferGroup group;
    std::size_t offset = 0;
    for (std::uint64_t i = 0; offset < kBytes; ++i) {
      const std::size_t blocks = 1 + random.block(stream * 100000 + i)[0] % 100;
      const std::size_t bytes = std::min(blocks * kDiskBlock, kBytes - offset);
      transfer(offset, bytes, group.add());
      offset += bytes;
    }
    group.wait();
    EXPECT_TRUE(group.finished());
  };
  in_pieces(0, [&](auto offset, auto bytes, Done done) {
    file_->write(offset, data.part(offset, bytes), std::move(done));
  });
  in_pieces(1, [&](auto offset, auto bytes, Done done) {
    file_->read(offset, back.part(offset, bytes), std::move(done));
  });
  EXPECT_TRUE(equal(data.all(), back.all()));
}

TEST_P(FileTest, SeveralThreadsMayCall) {
  constexpr std::size_t kShare = kMiB;
  Buffer data(4 * kShare), back(4 * kShare);
  fill(data.all(), 4);
  file_->allocate(4 * kShare);
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      for (std::size_t at = 0; at < kShare; at += 128 * kKiB) {
        const std::size_t offset = t * kShare + at;
        write_now(*file_, offset, data.part(offset, 128 * kKiB));
        read_now(*file_, offset, back.part(offset, 128 * kKiB));
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(equal(data.all(), back.all()));
}

TEST_P(FileTest, AMisalignedCallIsRefusedAndItsDoneIsNotCalled) {
  Buffer data(4 * kDiskBlock);
  file_->allocate(4 * kDiskBlock);
  std::atomic<int> calls = 0;
  const Done count = [&](std::exception_ptr) { ++calls; };
  const auto expect_refused = [&](auto&& call) {
    expect_error(ErrorCode::kInvalidArgument, {file_->name(), "4096"}, call);
  };
  expect_refused([&] { file_->read(512, data.part(0, kDiskBlock), count); });
  expect_refused([&] { file_->read(0, data.part(0, 1000), count); });
  expect_refused([&] { file_->read(0, data.part(8, kDiskBlock), count); });
  expect_refused([&] { file_->write(512, data.part(0, kDiskBlock), count); });
  expect_refused([&] { file_->write(0, data.part(0, 1000), count); });
  expect_refused([&] { file_->write(0, data.part(8, kDiskBlock), count); });
  EXPECT_EQ(calls, 0);
}

TEST_P(FileTest, AReadPastTheEndIsAnErrorThroughOneCallOfDone) {
  Buffer data(2 * kMiB);
  write_now(*file_, 0, data.part(0, kMiB));
  std::atomic<int> calls = 0;
  std::promise<std::exception_ptr> ended;
  file_->read(kMiB - kDiskBlock, data.part(0, kMiB), [&](std::exception_ptr error) {
    if (++calls == 1) ended.set_value(error);
  });
  expect_error(ErrorCode::kIo, {file_->name(), "offset", "expected", "found"}, [&] {
    if (const std::exception_ptr thrown = ended.get_future().get()) std::rethrow_exception(thrown);
  });
  file_.reset();  // waits, so that a second call would be seen
  EXPECT_EQ(calls, 1);
}

TEST_P(FileTest, ReadsWhollyBeyondTheEndFail) {
  Buffer data(kDiskBlock);
  expect_error(ErrorCode::kIo, {}, [&] { read_now(*file_, 64 * kMiB, data.all()); });
}

TEST_P(FileTest, AnEmptyTransferEnds) {
  read_now(*file_, 0, {});
  write_now(*file_, 0, {});
  EXPECT_EQ(file_->size(), 0u);
}

TEST_P(FileTest, DestructionWaitsForTransfers) {
  Buffer data(8 * kMiB);
  std::atomic<int> ended = 0;
  for (std::size_t i = 0; i < 8; ++i)
    file_->write(i * kMiB, data.part(i * kMiB, kMiB), [&](std::exception_ptr error) {
      EXPECT_EQ(error, nullptr);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      ++ended;
    });
  file_.reset();
  EXPECT_EQ(ended, 8);
}

TEST_P(FileTest, ADoneMayBeginTheNextTransfer) {
  Buffer data(kMiB), back(kMiB);
  fill(data.all(), 5);
  TransferGroup group;
  Done last = group.add();
  file_->write(0, data.all(), [&](std::exception_ptr error) {
    EXPECT_EQ(error, nullptr);
    file_->read(0, back.all(), last);
  });
  group.wait();
  EXPECT_TRUE(equal(data.all(), back.all()));
}

TEST_P(FileTest, AllocateMakesRoomAndShrinks) {
  Buffer data(2 * kMiB), back(kMiB);
  fill(data.all(), 6);
  file_->allocate(4 * kMiB);
  EXPECT_EQ(file_->size(), 4 * kMiB);
  write_now(*file_, 0, data.all());
  EXPECT_EQ(file_->size(), 4 * kMiB);
  file_->allocate(kMiB);
  EXPECT_EQ(file_->size(), kMiB);
  read_now(*file_, 0, back.all());
  EXPECT_TRUE(equal(data.part(0, kMiB), back.all()));
  expect_error(ErrorCode::kIo, {}, [&] { read_now(*file_, kMiB, back.all()); });
}

INSTANTIATE_TEST_SUITE_P(All, FileTest,
                         ::testing::Values(Kind::kUring, Kind::kThreads, Kind::kMemory, Kind::kVolatile,
                                           Kind::kFaultless, Kind::kDelayed),
                         [](const auto& test) { return name_of(test.param); });

}  // namespace sluice::offload::file_test
