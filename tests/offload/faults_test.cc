// Tests of files that inject faults, of groups of transfers, and of how a short system call is continued.

#include "offload/test_files.h"
#include "offload/transfer.h"
#include "offload/watch.h"
#include "testing.h"
#include "tests/offload/support.h"

namespace sluice::offload::faults_test {

using namespace testing;

// Returns which of 200 writes failed.
std::vector<bool> failures(const Faults& faults) {
  const std::unique_ptr<File> inner = make_memory_file("inner");
  const std::unique_ptr<File> file = make_faulty_file(*inner, faults);
  Buffer data(kDiskBlock);
  std::vector<bool> result;
  for (std::uint64_t i = 0; i < 200; ++i)
    result.push_back(error_of([&] { write_now(*file, i * kDiskBlock, data.all()); }).code() ==
                     ErrorCode::kIo);
  return result;
}

TEST(FaultyFileTest, FaultsAreAFunctionOfTheSeed) {
  const std::vector<bool> first = failures({.seed = 5, .write_error = 0.3});
  EXPECT_EQ(first, failures({.seed = 5, .write_error = 0.3}));
  EXPECT_NE(first, failures({.seed = 6, .write_error = 0.3}));
  const auto count = std::count(first.begin(), first.end(), true);
  EXPECT_GT(count, 30);
  EXPECT_LT(count, 90);
}

TEST(FaultyFileTest, FailAfterCountsReadsAndWrites) {
  const std::unique_ptr<File> inner = make_memory_file("inner");
  const std::unique_ptr<File> file = make_faulty_file(*inner, {.fail_after = 3});
  Buffer data(kDiskBlock);
  write_now(*file, 0, data.all());
  read_now(*file, 0, data.all());
  write_now(*file, 0, data.all());
  EXPECT_THAT(error_of([&] { write_now(*file, 0, data.all()); }).what(), HasSubstr(errno_text(ENOSPC)));
  EXPECT_THAT(error_of([&] { read_now(*file, 0, data.all()); }).what(), HasSubstr(errno_text(EIO)));
}

TEST(VolatileFileTest, SyncedWritesSurviveAndTheOthersInPart) {
  constexpr std::size_t kBlocks = 256;
  const auto survivors = [](std::uint64_t seed) {
    const std::unique_ptr<VolatileFile> file = make_volatile_file("volatile");
    Buffer old(kBlocks * kDiskBlock), data(kBlocks * kDiskBlock), back(kBlocks * kDiskBlock);
    fill(old.all(), 1);
    fill(data.all(), 2);
    write_now(*file, 0, old.all());
    file->sync();
    write_now(*file, 0, data.all());
    file->power_cut(seed);
    read_now(*file, 0, back.all());
    std::vector<bool> result;
    for (std::size_t i = 0; i < kBlocks; ++i) {
      const auto block = back.part(i * kDiskBlock, kDiskBlock);
      const bool is_new = equal(block, data.part(i * kDiskBlock, kDiskBlock));
      EXPECT_TRUE(is_new || equal(block, old.part(i * kDiskBlock, kDiskBlock)));
      result.push_back(is_new);
    }
    return result;
  };
  const std::vector<bool> first = survivors(1);
  EXPECT_EQ(first, survivors(1));
  EXPECT_NE(first, survivors(2));
  const auto count = std::count(first.begin(), first.end(), true);
  EXPECT_GT(count, 64);
  EXPECT_LT(count, 192);
}

TEST(VolatileFileTest, ASyncedFileLosesNothing) {
  const std::unique_ptr<VolatileFile> file = make_volatile_file("volatile");
  Buffer data(kMiB), back(kMiB);
  fill(data.all(), 3);
  write_now(*file, 0, data.all());
  file->sync();
  for (std::uint64_t seed = 0; seed < 10; ++seed) file->power_cut(seed);
  read_now(*file, 0, back.all());
  EXPECT_TRUE(equal(data.all(), back.all()));
}

TEST(VolatileFileTest, AFileThatWasNeverSyncedMayLoseItsEnd) {
  bool lost = false;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const std::unique_ptr<VolatileFile> file = make_volatile_file("volatile");
    Buffer data(kDiskBlock);
    write_now(*file, 0, data.all());
    file->power_cut(seed);
    lost = lost || file->size() == 0;
  }
  EXPECT_TRUE(lost);
}

TEST(TransferGroupTest, TheFirstErrorIsThrownAfterAllHaveEnded) {
  TransferGroup group;
  Done a = group.add(), b = group.add(), c = group.add();
  b(std::make_exception_ptr(Error(ErrorCode::kIo, "first")));
  a(nullptr);
  EXPECT_FALSE(group.finished());
  c(std::make_exception_ptr(Error(ErrorCode::kIo, "second")));
  EXPECT_TRUE(group.finished());
  EXPECT_STREQ(error_of([&] { group.wait(); }).what(), "first");
  group.wait();  // does not throw the error a second time
}

TEST(TransferGroupTest, ARefusedTransferIsAnErrorNotAHang) {
  TransferGroup group;
  const std::unique_ptr<File> file = make_memory_file("file");
  Buffer data(kDiskBlock);
  EXPECT_THROW(file->read(1, data.all(), group.add()), Error);
  EXPECT_TRUE(group.finished());
  EXPECT_EQ(error_of([&] { group.wait(); }).code(), ErrorCode::kState);
}

TEST(TransferGroupTest, AMovedGroupWaits) {
  TransferGroup group;
  Done done = group.add();
  TransferGroup moved(std::move(group));
  EXPECT_FALSE(moved.finished());
  done(nullptr);
  moved.wait();
}

// A transfer whose system calls the test answers.
class BlockTest : public ::testing::Test {
 protected:
  Block make(Direction direction, std::size_t bytes) {
    const Extent extent{-1, direction, Urgency::kNow, 8 * kDiskBlock, nullptr, bytes};
    transfer_ =
        std::make_shared<Transfer>(extent, nullptr, kMiB, name_, open_, watch_, [](std::exception_ptr) {});
    BlockQueue queue;
    queue.push(transfer_);
    return *queue.take();
  }
  Error error() const {
    return error_of([&] {
      if (error_ != nullptr) std::rethrow_exception(error_);
    });
  }
  const std::string name_ = "played";
  OpenTransfers open_;
  Watch watch_{std::chrono::minutes(5)};
  std::shared_ptr<Transfer> transfer_;
  std::exception_ptr error_;
};

TEST_F(BlockTest, InterruptedAndShortCallsAreContinued) {
  for (const Direction direction : {Direction::kRead, Direction::kWrite}) {
    Block block = make(direction, 8 * kDiskBlock);
    EXPECT_EQ(block.advance(-EINTR, &error_), Block::Outcome::kAgain);
    EXPECT_EQ(block.advance(-EAGAIN, &error_), Block::Outcome::kAgain);
    EXPECT_EQ(block.moved, 0u);
    EXPECT_EQ(block.advance(3 * kDiskBlock, &error_), Block::Outcome::kAgain);
    EXPECT_EQ(block.moved, 3 * kDiskBlock);
    EXPECT_EQ(block.advance(5 * kDiskBlock, &error_), Block::Outcome::kEnded);
    EXPECT_EQ(error_, nullptr);
  }
}

class BlockQueueTest : public BlockTest {
 protected:
  void push(Direction direction, std::uint64_t offset, std::size_t blocks, Urgency urgency = Urgency::kNow) {
    const Extent extent{-1, direction, urgency, offset, nullptr, blocks * kMiB};
    queue_.push(
        std::make_shared<Transfer>(extent, nullptr, kMiB, name_, open_, watch_, [](std::exception_ptr) {}));
  }
  std::vector<std::uint64_t> take(std::size_t most = SIZE_MAX) {
    std::vector<std::uint64_t> offsets;
    while (offsets.size() < most && !queue_.empty()) offsets.push_back(queue_.take()->offset / kMiB);
    return offsets;
  }

 private:
  BlockQueue queue_;
};

TEST_F(BlockQueueTest, ReadsAndWritesTakeTurns) {
  push(Direction::kWrite, 0, 3);
  push(Direction::kWrite, 10 * kMiB, 1);
  push(Direction::kRead, 20 * kMiB, 2);
  EXPECT_THAT(take(), ::testing::ElementsAre(20, 0, 21, 1, 2, 10))
      << "each direction in the order of its calls";
}

TEST_F(BlockQueueTest, WhatIsNeededNowComesBeforeTheRestOfWhatIsStreamed) {
  push(Direction::kRead, 0, 3, Urgency::kLater);
  push(Direction::kWrite, 10 * kMiB, 2, Urgency::kLater);
  EXPECT_THAT(take(2), ::testing::ElementsAre(0, 10));
  push(Direction::kWrite, 20 * kMiB, 1);
  push(Direction::kRead, 30 * kMiB, 2);
  EXPECT_THAT(take(), ::testing::ElementsAre(30, 20, 31, 1, 11, 2));
  push(Direction::kRead, 0, 2, Urgency::kLater);
  push(Direction::kWrite, 10 * kMiB, 2, Urgency::kLater);
  std::vector<std::uint64_t> order;
  for (int i = 0; i < 4; ++i) {
    push(Direction::kRead, 20 * kMiB, 1);
    for (const std::uint64_t offset : take(2)) order.push_back(offset);
  }
  EXPECT_THAT(order, ::testing::ElementsAre(20, 10, 20, 0, 20, 11, 20, 1))
      << "in turns beside urgent reads, too";
}

TEST_F(BlockTest, AShortWriteGoesOnAtAWholeDiskBlock) {
  Block block = make(Direction::kWrite, 8 * kDiskBlock);
  EXPECT_EQ(block.advance(kDiskBlock + 512, &error_), Block::Outcome::kAgain);
  EXPECT_EQ(block.moved, kDiskBlock);
}

TEST_F(BlockTest, TheEndOfTheFileIsAnError) {
  Block block = make(Direction::kRead, 8 * kDiskBlock);
  EXPECT_EQ(block.advance(2 * kDiskBlock, &error_), Block::Outcome::kAgain);
  EXPECT_EQ(block.advance(0, &error_), Block::Outcome::kEnded);
  EXPECT_EQ(error().code(), ErrorCode::kIo);
  EXPECT_THAT(error().what(), HasSubstr("found 8192"));
}

TEST_F(BlockTest, AnErrorNamesWhereItHappened) {
  Block block = make(Direction::kWrite, 8 * kDiskBlock);
  EXPECT_EQ(block.advance(2 * kDiskBlock, &error_), Block::Outcome::kAgain);
  EXPECT_EQ(block.advance(-EIO, &error_), Block::Outcome::kEnded);
  EXPECT_THAT(error().what(), HasSubstr("played: write at offset 40960"));
  EXPECT_THAT(error().what(), HasSubstr(errno_text(EIO)));
}

TEST_F(BlockTest, CallsThatNeverMoveAnythingDoNotHang) {
  Block block = make(Direction::kWrite, kDiskBlock);
  int calls = 1;
  while (block.advance(0, &error_) == Block::Outcome::kAgain) ASSERT_LT(++calls, 10'000);
  EXPECT_EQ(error().code(), ErrorCode::kIo);
}

}  // namespace sluice::offload::faults_test
