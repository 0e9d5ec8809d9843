#include "offload/records.h"

#include <unistd.h>

#include "offload/test_files.h"
#include "testing.h"
#include "tests/offload/support.h"
#include "thrown.h"

namespace sluice::offload::records_test {

using allocator::Ledger;
using allocator::Purpose;
using allocator::Tier;
using namespace testing;

constexpr std::size_t kBlock = RecordStore::kBlock;

// Notes the urgency of each call.
class NotingFile final : public ForwardingFile {
 public:
  NotingFile(File& file, std::vector<Urgency>& noted) : ForwardingFile(file), noted_(noted) {}
  void read(std::uint64_t offset, std::span<std::byte> into, Done done, Urgency urgency) override {
    noted_.push_back(urgency);
    ForwardingFile::read(offset, into, std::move(done), urgency);
  }
  void write(std::uint64_t offset, std::span<const std::byte> from, Done done, Urgency urgency) override {
    noted_.push_back(urgency);
    ForwardingFile::write(offset, from, std::move(done), urgency);
  }

 private:
  std::vector<Urgency>& noted_;
};

std::vector<std::unique_ptr<File>> memory_files(std::size_t count) {
  std::vector<std::unique_ptr<File>> files;
  for (std::size_t i = 0; i < count; ++i) files.push_back(make_memory_file("file " + std::to_string(i)));
  return files;
}

// A store owns its files, and these tests keep theirs.
std::vector<std::unique_ptr<File>> borrowed(File& file) {
  return alone(std::make_unique<ForwardingFile>(file));
}

TEST(RecordStoreTest, RecordsOfAnySizeOverAnyNumberOfFiles) {
  for (const std::size_t files : {1u, 2u, 3u, 5u}) {
    Ledger ledger;
    RecordStore store(memory_files(files), ledger);
    const std::vector<std::size_t> sizes = {
        kDiskBlock, kBlock, kBlock + kDiskBlock,         7 * kBlock - kDiskBlock,
        2 * kBlock, 0,      11 * kBlock + 5 * kDiskBlock};
    for (std::size_t i = 0; i < sizes.size(); ++i)
      store.define("r" + std::to_string(i), sizes[i], Purpose::kParameter);
    store.allocate();
    std::size_t total = 0;
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      Buffer data(sizes[i]);
      fill(data.all(), 100 + i);
      put(store, static_cast<RecordId>(i), 0, data.all());
      total += sizes[i];
    }
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      Buffer data(sizes[i]), back(sizes[i]);
      fill(data.all(), 100 + i);
      get(store, static_cast<RecordId>(i), 0, back.all());
      EXPECT_TRUE(equal(data.all(), back.all())) << files << " files, record " << i;
    }
    EXPECT_EQ(store.counters().bytes_written, total);
    EXPECT_EQ(store.counters().bytes_read, total);
  }
}

class OneRecord : public ::testing::Test {
 protected:
  static constexpr std::size_t kBytes = 4 * kBlock + 2 * kDiskBlock;
  OneRecord() : inner_(make_memory_file("swap.bin")) { fill(data_.all(), 1), fill(newer_.all(), 2); }

  void open(const Faults& faults = {}) {
    store_.reset();
    faulty_ = make_faulty_file(*inner_, faults);
    store_ = std::make_unique<RecordStore>(borrowed(*faulty_), ledger_);
    record_ = store_->define("layer 3 state", kBytes, Purpose::kOptimizerState);
    store_->allocate();
  }
  void TearDown() override { store_.reset(); }

  Ledger ledger_;
  std::unique_ptr<File> inner_, faulty_;
  std::unique_ptr<RecordStore> store_;
  RecordId record_ = 0;
  Buffer data_{kBytes}, newer_{kBytes}, back_{kBytes};
};

TEST_F(OneRecord, PartsAreWrittenAndReadAlone) {
  open();
  put(*store_, record_, 0, data_.all());
  put(*store_, record_, kBlock, newer_.part(kBlock, kBlock));
  put(*store_, record_, 4 * kBlock, newer_.part(4 * kBlock, 2 * kDiskBlock));
  get(*store_, record_, 0, back_.part(0, 3 * kBlock));
  get(*store_, record_, 3 * kBlock, back_.part(3 * kBlock, kBlock + 2 * kDiskBlock));
  EXPECT_TRUE(equal(back_.part(0, kBlock), data_.part(0, kBlock)));
  EXPECT_TRUE(equal(back_.part(kBlock, kBlock), newer_.part(kBlock, kBlock)));
  EXPECT_TRUE(equal(back_.part(2 * kBlock, 2 * kBlock), data_.part(2 * kBlock, 2 * kBlock)));
  EXPECT_TRUE(equal(back_.part(4 * kBlock, 2 * kDiskBlock), newer_.part(4 * kBlock, 2 * kDiskBlock)));
}

TEST(RecordStoreTest, ARecordMayHaveBlocksOfItsOwnSize) {
  constexpr std::size_t kOwn = kBlock + 4 * kDiskBlock, kBytes = 3 * kOwn + kDiskBlock;
  Ledger ledger;
  RecordStore store(memory_files(2), ledger);
  const RecordId usual = store.define("usual", 2 * kBlock, Purpose::kParameter);
  const RecordId own = store.define("own", kBytes, Purpose::kOptimizerState, kOwn);
  expect_error(ErrorCode::kInvalidArgument, {}, [&] { store.define("r", 0, Purpose::kParameter, 1000); });
  expect_error(ErrorCode::kInvalidArgument, {}, [&] { store.define("r", 0, Purpose::kParameter, 0); });
  store.allocate();
  Buffer first(2 * kBlock), data(kBytes), newer(kBytes), back(kBytes);
  fill(first.all(), 1), fill(data.all(), 2), fill(newer.all(), 3);
  put(store, usual, 0, first.all());
  put(store, own, 0, data.all());
  put(store, own, kOwn, newer.part(kOwn, kOwn));
  get(store, own, 0, back.all());
  EXPECT_TRUE(equal(back.part(0, kOwn), data.part(0, kOwn)));
  EXPECT_TRUE(equal(back.part(kOwn, kOwn), newer.part(kOwn, kOwn)));
  EXPECT_TRUE(equal(back.part(2 * kOwn, kBytes - 2 * kOwn), data.part(2 * kOwn, kBytes - 2 * kOwn)));
  expect_error(ErrorCode::kInvalidArgument, {}, [&] { get(store, own, kBlock, back.part(0, kOwn)); });
  expect_error(ErrorCode::kInvalidArgument, {}, [&] { get(store, own, 0, back.part(0, kBlock)); });
  get(store, usual, 0, back.part(0, 2 * kBlock));
  EXPECT_TRUE(equal(back.part(0, 2 * kBlock), first.all()));
}

TEST_F(OneRecord, ATransferOfPartsOfBlocksIsRefused) {
  open();
  put(*store_, record_, 0, data_.all());
  const auto expect_refused = [&](std::uint64_t offset, std::span<std::byte> bytes) {
    SCOPED_TRACE(fmt::format("{} {}", offset, bytes.size()));
    expect_error(ErrorCode::kInvalidArgument, {"layer 3 state"},
                 [&] { get(*store_, record_, offset, bytes); });
  };
  expect_refused(kDiskBlock, back_.part(0, kBlock));
  expect_refused(0, back_.part(0, kBlock + kDiskBlock));
  expect_refused(4 * kBlock, back_.part(0, kBlock));
  expect_refused(4 * kBlock, back_.part(0, kDiskBlock));
  expect_refused(64 * kBlock, back_.part(0, kBlock));
  expect_refused(0, back_.part(8, kBlock));
  expect_error(ErrorCode::kInvalidArgument, {}, [&] { get(*store_, 7, 0, back_.all()); });
  get(*store_, record_, 0, back_.all());  // no block is still claimed
  EXPECT_TRUE(equal(back_.all(), data_.all()));
}

TEST_F(OneRecord, ABlockThatWasNeverWrittenCannotBeRead) {
  open();
  put(*store_, record_, 0, data_.part(0, 2 * kBlock));
  expect_error(ErrorCode::kState, {"layer 3 state", "block 2", "never written"},
               [&] { get(*store_, record_, 0, back_.all()); });
  get(*store_, record_, 0, back_.part(0, 2 * kBlock));
  EXPECT_TRUE(equal(back_.part(0, 2 * kBlock), data_.part(0, 2 * kBlock)));
}

TEST_F(OneRecord, TransfersThatOverlapAreMisuse) {
  open({.delay_microseconds = 20'000});
  TransferGroup group;
  store_->write(record_, kBlock, data_.part(kBlock, 2 * kBlock), group.add());
  expect_error(ErrorCode::kState, {"layer 3 state", "block 1"},
               [&] { put(*store_, record_, 0, data_.all()); });
  store_->write(record_, 3 * kBlock, data_.part(3 * kBlock, kBlock),
                group.add());  // other blocks may be written
  store_->write(record_, 0, data_.part(0, kBlock), group.add());
  group.wait();
  get(*store_, record_, 0, back_.part(0, 4 * kBlock));
  EXPECT_TRUE(equal(back_.part(0, 4 * kBlock), data_.part(0, 4 * kBlock)));
}

TEST_F(OneRecord, AFlippedBitAnywhereIsFound) {
  open();
  const CounterRandom random(9, 0);
  for (std::uint64_t i = 0; i < 20; ++i) {
    put(*store_, record_, 0, data_.all());
    const auto words = random.block(i);
    const std::uint64_t at = words[0] % kBytes;
    Buffer block(kDiskBlock);
    const std::uint64_t disk_block = at / kDiskBlock * kDiskBlock;
    testing::read_now(*inner_, disk_block, block.all());
    block.all()[at % kDiskBlock] ^= std::byte{1} << (words[1] % 8);
    testing::write_now(*inner_, disk_block, block.all());
    const Error error = error_of([&] { get(*store_, record_, 0, back_.all()); });
    ASSERT_EQ(error.code(), ErrorCode::kCorrupt);
    EXPECT_THAT(
        error.what(),
        AllOf(HasSubstr("swap.bin"), HasSubstr("layer 3 state"), HasSubstr("expected"), HasSubstr("found"),
              HasSubstr("offset " + std::to_string(at / kBlock * kBlock)), Not(HasSubstr("stale"))));
  }
}

TEST_F(OneRecord, ReadAndWriteFlipsAreFound) {
  open({.seed = 1, .read_flip = 1});
  put(*store_, record_, 0, data_.all());
  expect_error(ErrorCode::kCorrupt, {}, [&] { get(*store_, record_, 0, back_.all()); });
  open({.seed = 1, .write_flip = 1});
  put(*store_, record_, 0, data_.all());
  expect_error(ErrorCode::kCorrupt, {}, [&] { get(*store_, record_, 0, back_.all()); });
}

// Tests of callers that check with threads of their own.
class CheckedByTheCaller : public OneRecord {
 protected:
  void write(std::uint64_t offset, std::span<const std::byte> from) {
    TransferGroup group;
    store_->write(record_, offset, from, threads_, group.add());
    group.wait();
  }
  std::span<std::byte> read(std::uint64_t offset, std::size_t bytes) {
    TransferGroup group;
    store_->read_unchecked(record_, offset, back_.part(offset, bytes), group.add());
    group.wait();
    return back_.part(offset, bytes);
  }
  Threads threads_{2};
};

TEST_F(CheckedByTheCaller, ReadsWhatWasWrittenWithOrWithoutThreads) {
  open();
  write(0, data_.all());
  get(*store_, record_, 0, back_.all());
  EXPECT_TRUE(equal(back_.all(), data_.all()));
  put(*store_, record_, kBlock, newer_.part(kBlock, kBlock));
  store_->check(record_, 0, read(0, kBytes), threads_);
  EXPECT_TRUE(equal(back_.part(kBlock, kBlock), newer_.part(kBlock, kBlock)));
  EXPECT_TRUE(
      equal(back_.part(2 * kBlock, kBytes - 2 * kBlock), data_.part(2 * kBlock, kBytes - 2 * kBlock)));
}

TEST_F(CheckedByTheCaller, AFlippedBitIsFoundInItsBlock) {
  open();
  write(0, data_.all());
  for (std::size_t block = 0; block < 5; ++block) {
    read(0, kBytes);
    back_.all()[block * kBlock + 5] ^= std::byte{16};
    expect_error(ErrorCode::kCorrupt,
                 {"swap.bin", "layer 3 state", "expected", fmt::format("block {} ", block)},
                 [&] { store_->check(record_, 0, back_.all(), threads_); });
  }
  get(*store_, record_, 0, back_.all());  // the blocks are not claimed any more
}

TEST_F(CheckedByTheCaller, ABlockCannotBeWrittenBeforeItIsChecked) {
  open();
  write(0, data_.all());
  read(kBlock, kBlock);
  expect_error(ErrorCode::kState, {"layer 3 state", "block 1", "check()"}, [&] { write(0, newer_.all()); });
  write(0, newer_.part(0, kBlock));  // other blocks may be written
  store_->check(record_, kBlock, back_.part(kBlock, kBlock), threads_);
  write(0, newer_.all());
  read(0, kBytes);
  get(*store_, record_, 0, back_.all());  // a read that checks allows it, too
  write(0, data_.all());
}

TEST_F(CheckedByTheCaller, ABlockCannotBeCheckedDuringATransfer) {
  open({.delay_microseconds = 20'000});
  write(0, data_.all());
  TransferGroup group;
  store_->read_unchecked(record_, 0, back_.all(), group.add());
  expect_error(ErrorCode::kState, {},
               [&] { store_->check(record_, kBlock, data_.part(kBlock, kBlock), threads_); });
  group.wait();
  store_->check(record_, 0, back_.all(), threads_);
}

TEST(RecordStoreTest, ReadsToUseAndWritesOfParametersAreUrgent) {
  Ledger ledger;
  Threads threads(1);
  const std::unique_ptr<File> file = make_memory_file("swap.bin");
  std::vector<Urgency> noted;
  RecordStore store(alone(std::make_unique<NotingFile>(*file, noted)), ledger);
  const RecordId state = store.define("state", kBlock, Purpose::kOptimizerState);
  const RecordId values = store.define("values", kBlock, Purpose::kParameter);
  store.allocate();
  Buffer bytes(kBlock);
  for (const RecordId record : {state, values}) {
    TransferGroup group;
    put(store, record, 0, bytes.all());
    get(store, record, 0, bytes.all());
    store.read_unchecked(record, 0, bytes.all(), group.add());
    store.check(record, 0, bytes.all(), threads);
    store.write(record, 0, bytes.all(), threads, group.add());
    group.wait();
  }
  using enum Urgency;
  EXPECT_THAT(noted, ElementsAre(kLater, kNow, kLater, kLater, kNow, kNow, kLater, kNow));
}

TEST_F(OneRecord, ALostWriteIsStale) {
  open();
  put(*store_, record_, 0, data_.all());
  put(*store_, record_, 0, data_.all());
  Buffer old(kBlock);
  testing::read_now(*inner_, 2 * kBlock, old.all());
  put(*store_, record_, 0, newer_.all());
  testing::write_now(*inner_, 2 * kBlock, old.all());
  expect_error(ErrorCode::kCorrupt, {"stale", "generation 2", "generation 3", "block 2", "layer 3 state"},
               [&] { get(*store_, record_, 0, back_.all()); });
}

TEST_F(OneRecord, ALostFirstWriteIsFound) {
  open({.lost_write = 1});
  put(*store_, record_, 0, data_.all());
  expect_error(ErrorCode::kCorrupt, {"only zeros"}, [&] { get(*store_, record_, 0, back_.all()); });
}

TEST_F(OneRecord, FailuresOfTheFileAreReportedAndTheRecordCanBeWrittenAgain) {
  open({.read_error = 1});
  put(*store_, record_, 0, data_.all());
  expect_error(ErrorCode::kIo, {"layer 3 state", "swap.bin", errno_text(EIO)},
               [&] { get(*store_, record_, 0, back_.all()); });
  open({.fail_after = 2});
  expect_error(ErrorCode::kIo, {"layer 3 state", "swap.bin", errno_text(ENOSPC)},
               [&] { put(*store_, record_, 0, data_.all()); });
  EXPECT_EQ(store_->counters().bytes_written, 0u);
  open({.write_error = 1});
  expect_error(ErrorCode::kIo, {}, [&] { put(*store_, record_, 0, data_.all()); });
  expect_error(ErrorCode::kIo, {}, [&] { put(*store_, record_, 0, data_.all()); });
}

TEST_F(OneRecord, ATruncatedFileIsReported) {
  open();
  put(*store_, record_, 0, data_.all());
  inner_->allocate(2 * kBlock);
  expect_error(ErrorCode::kIo, {"swap.bin"}, [&] { get(*store_, record_, 0, back_.all()); });
}

// After any fault, a read without an error must return what was written.
TEST_F(OneRecord, NoFaultIsEverSilent) {
  std::size_t noticed = 0, whole = 0;
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    const unsigned delay = seed % 4 == 0 ? 50 : 0;
    open({.seed = seed,
          .read_error = 0.02,
          .write_error = 0.02,
          .read_flip = 0.02,
          .write_flip = 0.02,
          .lost_write = 0.02,
          .fail_after = seed % 8 == 1 ? 12 : UINT64_MAX,
          .delay_microseconds = delay});
    try {
      put(*store_, record_, 0, data_.all());
      put(*store_, record_, 0, newer_.all());
      get(*store_, record_, 0, back_.all());
      EXPECT_TRUE(equal(back_.all(), newer_.all())) << "seed " << seed;
      ++whole;
    } catch (const Error& error) {
      EXPECT_TRUE(error.code() == ErrorCode::kIo || error.code() == ErrorCode::kCorrupt) << error.what();
      ++noticed;
    }
    store_.reset();
  }
  EXPECT_GT(noticed, 5u);
  EXPECT_GT(whole, 5u);
}

TEST(RecordStoreTest, CallsInTheWrongOrderAreRefused) {
  Ledger ledger;
  RecordStore store(memory_files(1), ledger);
  const RecordId record = store.define("early", kBlock, Purpose::kParameter);
  Buffer data(kBlock);
  expect_error(ErrorCode::kState, {}, [&] { put(store, record, 0, data.all()); });
  expect_error(ErrorCode::kInvalidArgument, {}, [&] { store.define("odd", 1000, Purpose::kParameter); });
  store.allocate();
  store.allocate();
  put(store, record, 0, data.all());
  const RecordId late = store.define("late", kBlock, Purpose::kParameter);
  expect_error(ErrorCode::kState, {}, [&] { put(store, late, 0, data.all()); });
  store.allocate();
  put(store, late, 0, data.all());
}

TEST(RecordStoreTest, LaterRecordsLeaveEarlierOnesUnchanged) {
  Ledger ledger;
  ledger.set_budget(Tier::kDisk, 4 * kBlock);
  const auto on_disk = [&] { return ledger.snapshot().total[static_cast<std::size_t>(Tier::kDisk)].current; };
  const std::unique_ptr<File> file = make_memory_file("file");
  RecordStore store(borrowed(*file), ledger);
  Buffer first(2 * kBlock), second(kBlock), back(2 * kBlock);
  fill(first.all(), 1), fill(second.all(), 2);
  const RecordId early = store.define("early", 2 * kBlock, Purpose::kParameter);
  store.allocate();
  put(store, early, 0, first.all());
  for (int attempt = 0; attempt < 2; ++attempt) {
    const RecordId large = store.define("large", 3 * kBlock, Purpose::kParameter);
    expect_error(ErrorCode::kBudget, {}, [&] { store.allocate(); });
    expect_error(ErrorCode::kInvalidArgument, {}, [&] { put(store, large, 0, first.all()); });
    EXPECT_EQ(on_disk(), 2 * kBlock);
    EXPECT_EQ(file->size(), 2 * kBlock);
  }
  const RecordId late = store.define("late", kBlock, Purpose::kParameter);
  store.allocate();
  EXPECT_EQ(on_disk(), 3 * kBlock);
  put(store, late, 0, second.all());
  get(store, early, 0, back.all());
  EXPECT_TRUE(equal(back.all(), first.all()));
  get(store, late, 0, back.part(0, kBlock));
  EXPECT_TRUE(equal(back.part(0, kBlock), second.all()));
}

TEST(RecordStoreTest, TheLedgerHoldsDiskSpaceByPurposeAndMetadata) {
  Ledger ledger;
  const auto line = [&](Tier tier, Purpose purpose) {
    return ledger.snapshot().lines[static_cast<std::size_t>(tier)][static_cast<std::size_t>(purpose)].current;
  };
  {
    RecordStore store(memory_files(2), ledger);
    store.define("p", 3 * kBlock + kDiskBlock, Purpose::kParameter);
    store.define("o", 2 * kBlock, Purpose::kOptimizerState);
    EXPECT_EQ(line(Tier::kDisk, Purpose::kParameter), 0u);
    EXPECT_GT(line(Tier::kHost, Purpose::kBase), 0u);
    store.allocate();
    EXPECT_EQ(line(Tier::kDisk, Purpose::kParameter), 3 * kBlock + kDiskBlock);
    EXPECT_EQ(line(Tier::kDisk, Purpose::kOptimizerState), 2 * kBlock);
  }
  EXPECT_EQ(line(Tier::kDisk, Purpose::kParameter), 0u);
  EXPECT_EQ(line(Tier::kDisk, Purpose::kOptimizerState), 0u);
  EXPECT_EQ(line(Tier::kHost, Purpose::kBase), 0u);
}

TEST(RecordStoreTest, ADiskBudgetIsEnforcedBeforeSpaceIsTaken) {
  Ledger ledger;
  ledger.set_budget(Tier::kDisk, kBlock);
  const std::unique_ptr<File> file = make_memory_file("file");
  RecordStore store(borrowed(*file), ledger);
  store.define("p", kBlock, Purpose::kParameter);
  store.define("q", kBlock, Purpose::kParameter);
  expect_error(ErrorCode::kBudget, {}, [&] { store.allocate(); });
  EXPECT_EQ(file->size(), 0u);
  EXPECT_EQ(ledger.snapshot().total[static_cast<std::size_t>(Tier::kDisk)].current, 0u);
}

}  // namespace sluice::offload::records_test
