#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "core/descriptor.h"
#include "tests/allocator/support.h"

namespace sluice::allocator {
namespace region_test {

TEST(Region, IsZeroAlignedRoundedAndCharged) {
  Ledger ledger;
  {
    const Region region(ledger, Purpose::kActivation, kHugePage + 1);
    EXPECT_EQ(region.size(), 2 * kHugePage);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(region.data()) % kHugePage, 0u);
    EXPECT_TRUE(std::all_of(region.bytes().begin(), region.bytes().end(),
                            [](std::byte b) { return b == std::byte{0}; }));
    EXPECT_EQ(held(ledger, Purpose::kActivation), 2 * kHugePage);
  }
  EXPECT_EQ(host_total(ledger).current, 0u);
  EXPECT_EQ(host_total(ledger).peak, 2 * kHugePage);
}

// Several threads take parts of it, which are no multiple of anything.
TEST(Region, IsAllThereAlsoWhereItIsLarge) {
  Ledger ledger;
  const Region region(ledger, Purpose::kOptimizerState, 263 * kHugePage);
  std::vector<unsigned char> there(region.size() / 4096);
  ASSERT_EQ(::mincore(region.data(), region.size(), there.data()), 0);
  EXPECT_EQ(std::ranges::count_if(there, [](unsigned char page) { return (page & 1) != 0; }),
            static_cast<std::ptrdiff_t>(there.size()));
}

TEST(Region, OfZeroBytesHoldsNothing) {
  Ledger ledger;
  ledger.set_budget(Tier::kHost, 0);
  const Region region(ledger, Purpose::kStaging, 0);
  EXPECT_EQ(region.size(), 0u);
  EXPECT_TRUE(region.bytes().empty());
}

TEST(Region, GrowsAndShrinksWhereItIs) {
  Ledger ledger;
  ledger.set_budget(Tier::kHost, 20 * kHugePage);
  Region region(ledger, Purpose::kOptimizerState, 0, 32 * kHugePage);
  EXPECT_EQ(region.size(), 0u);
  std::byte* const data = region.data();
  [[maybe_unused]] const std::size_t before = resident_bytes();
  for (const std::size_t pages : {16, 8, 16, 1, 20, 0, 4}) {
    const std::size_t kept = std::min(region.size(), pages * kHugePage);
    if (kept > 0) stamp(region.data(), kept, 5);
    region.resize(pages * kHugePage - 1 + (pages == 0 ? 1 : 0));
    EXPECT_EQ(region.data(), data);
    EXPECT_EQ(region.size(), pages * kHugePage);
    EXPECT_EQ(held(ledger, Purpose::kOptimizerState), pages * kHugePage);
    EXPECT_TRUE(kept == 0 || has_stamp(data, kept, 5));
    EXPECT_TRUE(
        std::all_of(data + kept, data + region.size(), [](std::byte b) { return b == std::byte{0}; }));
#ifndef __SANITIZE_THREAD__  // its shadow memory counts as resident
    EXPECT_NEAR(static_cast<double>(resident_bytes()), static_cast<double>(before + region.size()),
                4.0 * kMiB);
#endif
  }
  EXPECT_EQ(thrown_by([&] { region.resize(21 * kHugePage); }).code, ErrorCode::kBudget);
  EXPECT_EQ(region.size(), 4 * kHugePage);
  EXPECT_EQ(thrown_by([&] { region.resize(33 * kHugePage); }).code, ErrorCode::kInternal);
}

TEST(Region, MovesKeepAddressAndCharge) {
  Ledger ledger;
  Region first(ledger, Purpose::kStaging, kHugePage);
  std::byte* const data = first.data();
  stamp(data, kHugePage, 42);
  Region second(ledger, Purpose::kStaging, kHugePage);
  second = std::move(first);
  EXPECT_EQ(second.data(), data);
  EXPECT_TRUE(has_stamp(second.data(), kHugePage, 42));
  EXPECT_EQ(held(ledger, Purpose::kStaging), kHugePage);
  const Region third = std::move(second);
  EXPECT_EQ(third.data(), data);
}

TEST(Region, IsPopulatedWhenItIsTaken) {
  Ledger ledger;
  const std::size_t before = resident_bytes();
  const Region region(ledger, Purpose::kStaging, 32 * kMiB);
  EXPECT_GE(resident_bytes() + 4 * kMiB, before + region.size());
  EXPECT_GE(peak_resident_bytes() + 4 * kMiB, before + region.size());
}

TEST(Region, OverBudgetIsRefusedBeforeMemoryIsTaken) {
  Ledger ledger;
  ledger.set_budget(Tier::kHost, 3 * kHugePage);
  const Region kept(ledger, Purpose::kStaging, 2 * kHugePage);
  EXPECT_EQ(thrown_by([&] { Region(ledger, Purpose::kStaging, kHugePage + 1); }).code, ErrorCode::kBudget);
  EXPECT_EQ(host_total(ledger).current, 2 * kHugePage);
  EXPECT_EQ(host_total(ledger).peak, 2 * kHugePage);
}

TEST(Region, BeyondWhatTheSystemHasIsABudgetError) {
  Ledger ledger;
  for (const std::size_t bytes :
       {available_memory_bytes() * 2, std::size_t{1} << 60, SIZE_MAX, SIZE_MAX - kHugePage}) {
    EXPECT_EQ(thrown_by([&] { Region(ledger, Purpose::kActivation, bytes); }).code, ErrorCode::kBudget)
        << bytes;
    EXPECT_EQ(host_total(ledger).current, 0u);
  }
}

TEST(ProcessMemory, AgreesWithTheSystem) {
  // The system also counts what the process that started this one held, which is less than this.
  EXPECT_EQ(std::vector<char>(256 * kMiB, 1).back(), 1);
  struct rusage usage = {};
  ASSERT_EQ(::getrusage(RUSAGE_SELF, &usage), 0);
  const auto peak = static_cast<std::size_t>(usage.ru_maxrss) * kKiB;
  EXPECT_NEAR(static_cast<double>(peak_resident_bytes()), static_cast<double>(peak), 4.0 * kMiB);
  EXPECT_GT(resident_bytes(), kMiB);
  EXPECT_LE(resident_bytes(), peak_resident_bytes());
  EXPECT_GT(available_memory_bytes(), 0u);
}

// This runs in a child, since the system's peak counts it for ever.
TEST(ProcessMemory, IsWithoutThatOfOthers) {
  const pid_t child = ::fork();
  if (child == 0) {
    const std::size_t bytes = 96 * kMiB, room = 8 * kMiB;
    const Descriptor file(::memfd_create("others", MFD_CLOEXEC));
    EXPECT_EQ(::posix_fallocate(file.get(), 0, static_cast<off_t>(bytes)), 0);
    const std::size_t before = resident_bytes();
    for (const bool writable : {false, true}) {
      const std::size_t peak = peak_resident_bytes();
      const OthersMemory others(file.get(), bytes, writable);
      EXPECT_EQ(others.data()[bytes - 1], std::byte{0});
      EXPECT_NEAR(static_cast<double>(resident_bytes()), static_cast<double>(before), room);
      EXPECT_LE(peak_resident_bytes(), peak + room);
      rusage usage = {};
      EXPECT_EQ(::getrusage(RUSAGE_SELF, &usage), 0);
      EXPECT_GE(static_cast<std::size_t>(usage.ru_maxrss) * kKiB + room, before + bytes);
      {
        Ledger ledger;  // no vector, whose memory AddressSanitizer would keep
        const Region region(ledger, Purpose::kStaging, 2 * bytes);
        std::fill_n(region.data(), region.size(), std::byte{1});
      }
      EXPECT_GE(peak_resident_bytes() + room, before + 2 * bytes);
#ifndef __SANITIZE_THREAD__  // its shadow memory counts as resident
      EXPECT_LE(peak_resident_bytes(), std::max(peak, before + 2 * bytes) + room);
#endif
    }
    EXPECT_NEAR(static_cast<double>(resident_bytes()), static_cast<double>(before), room);
    std::fflush(nullptr);
    ::_exit(testing::Test::HasFailure() ? 1 : 0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0) << "the child's own output says why";
}

TEST(HugePages, ShareOfARegion) {
  std::ifstream setting("/sys/kernel/mm/transparent_hugepage/enabled");
  std::string text;
  std::getline(setting, text);
  if (text.find("[never]") != std::string::npos || text.empty())
    GTEST_SKIP() << "no transparent huge pages here: " << text;
  Ledger ledger;
  const Region region(ledger, Purpose::kStaging, 4 * kHugePage);
  double share = -1;
  ASSERT_TRUE(huge_pages_given(region.data(), region.size(), &share));
  if (share == 0) GTEST_SKIP() << "the system gave no huge pages now";
  EXPECT_LE(share, 1.0);
  EXPECT_FALSE(huge_pages_given(region.data(), 0, &share));
}

}  // namespace region_test
}  // namespace sluice::allocator
