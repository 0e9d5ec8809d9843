#include "offload/measure.h"

#include "offload/support.h"
#include "offload/test_files.h"
#include "testing.h"
#include "thrown.h"

namespace sluice::offload::measure_test {
using namespace sluice::offload::testing;

constexpr StreamShape kShape{64 * kKiB, 4};

class Measure : public ::testing::Test {
 protected:
  Buffer memory_{kShape.bytes()};
};

// A File that counts the bytes it moves.
class CountingFile final : public ForwardingFile {
 public:
  using ForwardingFile::ForwardingFile;
  void read(std::uint64_t offset, std::span<std::byte> into, Done done, Urgency urgency) override {
    read_ += into.size();
    ForwardingFile::read(offset, into, std::move(done), urgency);
  }
  void write(std::uint64_t offset, std::span<const std::byte> from, Done done, Urgency urgency) override {
    written_ += from.size();
    ForwardingFile::write(offset, from, std::move(done), urgency);
  }
  std::uint64_t read_ = 0, written_ = 0;
};

TEST_F(Measure, AFileIsWrittenAndReadOnceWhole) {
  const std::uint64_t bytes = 10 * kShape.block + kDiskBlock;  // makes the last transfer shorter
  const auto inner = make_memory_file("m");
  CountingFile file(*inner);
  file.allocate(bytes);
  const DiskRates rates = measure_file(file, bytes, kShape, memory_.all());
  EXPECT_EQ(file.written_, bytes);
  EXPECT_EQ(file.read_, bytes);
  EXPECT_GT(rates.read, 0);
  EXPECT_GT(rates.write, 0);
}

TEST_F(Measure, MeasureTogetherReadsOneHalfAndWritesTheOther) {
  const std::uint64_t bytes = 10 * kShape.block;
  const auto inner = make_memory_file("m");
  CountingFile file(*inner);
  file.allocate(bytes);
  measure_file(file, bytes, kShape, memory_.all());
  file.read_ = file.written_ = 0;
  EXPECT_GT(measure_together(file, bytes, kShape, memory_.all()), 0);
  EXPECT_EQ(file.read_, bytes / 2);
  EXPECT_EQ(file.written_, bytes / 2);
}

TEST_F(Measure, AnErrorOfATransferIsThrown) {
  const auto inner = make_memory_file("m");
  inner->allocate(16 * kShape.block);
  Faults faults;
  faults.fail_after = 20;
  const auto file = make_faulty_file(*inner, faults);
  EXPECT_THROW(measure_file(*file, 16 * kShape.block, kShape, memory_.all()), Error);
}

TEST_F(Measure, TooLittleMemoryIsRefused) {
  const auto file = make_memory_file("m");
  EXPECT_THROW(measure_file(*file, kShape.block, {kShape.block, 8}, memory_.all()), Error);
}

TEST_F(Measure, ABareFileIsSeenByOthersAndHasNoName) {
  const DirectFolder folder;
  if (!folder.found()) GTEST_SKIP() << kNoDirectFolder;
  std::string why;
  if (!uring_available(&why)) GTEST_SKIP() << why;
  BareFile file(folder.path(), 4 * kShape.block);
  const DiskRates rates = file.measure(kShape, memory_.all());
  EXPECT_GT(rates.read, 0);
  EXPECT_GT(rates.write, 0);
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
  std::ifstream seen(file.path(), std::ios::binary | std::ios::ate);
  EXPECT_EQ(static_cast<std::uint64_t>(seen.tellg()), 4 * kShape.block);
}

TEST_F(Measure, AFileBeyondTheDiskIsRefusedWithWhatIsMissing) {
  const DirectFolder folder;
  if (!folder.found()) GTEST_SKIP() << kNoDirectFolder;
  expect_error(ErrorCode::kBudget, {"too little"}, [&] { BareFile(folder.path(), std::uint64_t{1} << 50); });
}

}  // namespace sluice::offload::measure_test
