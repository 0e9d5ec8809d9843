#include "allocator/address_space.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstdarg>

#include "tests/allocator/support.h"

namespace sluice::allocator::address_space_test {

int calls = 0;
int calls_allowed = 0;  // calls that succeed before the process has no more mappings

// Behaves as Linux before 6.17 for a range of several mappings: EFAULT, after it has unmapped the target.
void* one_mapping_mremap(void* from, std::size_t old_size, std::size_t new_size, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  void* to = va_arg(rest, void*);
  va_end(rest);
  if (old_size > kHugePage) {
    ::munmap(to, old_size);
    errno = EFAULT;
    return MAP_FAILED;
  }
  if (++calls == calls_allowed + 1) {
    errno = ENOMEM;
    return MAP_FAILED;
  }
  return ::mremap(from, old_size, new_size, flags, to);
}

constexpr std::size_t kRange = 4 * kHugePage;

struct TwoRanges {
  Reservation from{kRange, kRange, RangeKind::kBuffer, "from"};
  Reservation to{kRange, kRange, RangeKind::kBuffer, "to"};
  TwoRanges() {
    take_memory(from.data(), kRange, "a test");
    for (std::size_t i = 0; i < 4; ++i) stamp(from.data() + i * kHugePage, kHugePage, 100 + i);
  }
};

TEST(MovePages, FallsBackToOneExtentAtATime) {
  const TwoRanges ranges;
  calls = 0;
  calls_allowed = 4;
  move_pages(ranges.from.data(), ranges.to.data(), kRange, kHugePage, one_mapping_mremap);
  EXPECT_EQ(calls, 4);
  for (std::size_t i = 0; i < 4; ++i)
    EXPECT_TRUE(has_stamp(ranges.to.data() + i * kHugePage, kHugePage, 100 + i));
}

TEST(MovePages, AFailureBetweenExtentsMovesThemBack) {
  const TwoRanges ranges;
  calls = 0;
  calls_allowed = 2;
  expect_error(ErrorCode::kBudget, {"max_map_count"}, [&] {
    move_pages(ranges.from.data(), ranges.to.data(), kRange, kHugePage, one_mapping_mremap);
  });
  for (std::size_t i = 0; i < 4; ++i)
    EXPECT_TRUE(has_stamp(ranges.from.data() + i * kHugePage, kHugePage, 100 + i));
  calls_allowed = 100;
  move_pages(ranges.from.data(), ranges.to.data(), kRange, kHugePage, one_mapping_mremap);
  EXPECT_TRUE(has_stamp(ranges.to.data() + 3 * kHugePage, kHugePage, 103));
}

TEST(MovePages, LosesNoAddressToOthers) {
  const TwoRanges ranges;
  for (int round = 0; round < 50; ++round) {
    move_pages(ranges.from.data(), ranges.to.data(), kRange, kHugePage);
    void* probe = ::mmap(ranges.from.data(), kRange, PROT_NONE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    ASSERT_EQ(probe, MAP_FAILED) << "the address that was given up is free";
    ASSERT_EQ(errno, EEXIST);
    move_pages(ranges.to.data(), ranges.from.data(), kRange, kHugePage);
  }
  EXPECT_TRUE(has_stamp(ranges.from.data(), kHugePage, 100));
}

TEST(RangeRegistry, FindsManyRangesByAddressUntilTheyEnd) {
  std::vector<Reservation> ranges;
  for (int i = 0; i < 600; ++i)
    ranges.emplace_back(kHugePage, 4096, RangeKind::kHome, "r" + std::to_string(i));
  for (int i = 0; i < 600; ++i) {
    const auto first = reinterpret_cast<std::uintptr_t>(ranges[static_cast<std::size_t>(i)].data());
    for (const std::uintptr_t address : {first, first + kHugePage - 1}) {
      const RegisteredRange* found = find_range(address);
      ASSERT_NE(found, nullptr);
      EXPECT_EQ(found->name, "r" + std::to_string(i));
    }
  }
  const auto gone = reinterpret_cast<std::uintptr_t>(ranges.front().data());
  ranges.clear();
  EXPECT_EQ(find_range(gone), nullptr);
}

TEST(RangeRegistry, CutsLongNames) {
  const Reservation range(kHugePage, 1, RangeKind::kHome, std::string(500, 'x'));
  EXPECT_EQ(find_range(reinterpret_cast<std::uintptr_t>(range.data()))->name, std::string(95, 'x'));
}

}  // namespace sluice::allocator::address_space_test
