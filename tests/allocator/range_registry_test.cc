#include "allocator/range_registry.h"

#include <set>

#include "tests/allocator/support.h"

namespace sluice::allocator::range_registry_test {

// Addresses at which nothing is mapped.
constexpr std::uintptr_t kBase = std::uintptr_t{1} << 46;

void put(std::uintptr_t begin, std::size_t bytes) {
  register_range(reinterpret_cast<const void*>(begin), bytes, bytes, RangeKind::kBuffer, "a range");
}
void remove(std::uintptr_t begin) { unregister_range(reinterpret_cast<const void*>(begin)); }

bool found_at(std::uintptr_t address, std::uintptr_t begin) {
  const RegisteredRange* range = find_range(address);
  return range != nullptr && range->begin.load() == begin;
}

TEST(RangeRegistryTest, ARangeIsFoundFromItsFirstAddressToItsLast) {
  put(kBase, kHugePage);
  EXPECT_TRUE(found_at(kBase, kBase));
  EXPECT_TRUE(found_at(kBase + kHugePage - 1, kBase));
  EXPECT_EQ(find_range(kBase - 1), nullptr);
  EXPECT_EQ(find_range(kBase + kHugePage), nullptr);
  remove(kBase);
  EXPECT_EQ(find_range(kBase), nullptr);
}

TEST(RangeRegistryTest, ThousandsComeAndGoInAnyOrder) {
  constexpr std::uintptr_t kRanges = 3000;
  const auto begin_of = [](std::uintptr_t i) { return kBase + i * kHugePage; };
  std::set<std::uintptr_t> there;
  std::set<const RegisteredRange*> entries;
  const auto expect_these = [&] {
    for (std::uintptr_t i = 0; i < 2 * kRanges; ++i) {
      const RegisteredRange* range = find_range(begin_of(i) + 1);
      ASSERT_EQ(range != nullptr && range->begin.load() == begin_of(i), there.contains(i)) << i;
      ASSERT_EQ(range_that_begins_at(reinterpret_cast<const void*>(begin_of(i))), range) << i;
      if (range != nullptr) entries.insert(range);
    }
  };
  const auto add = [&](std::uintptr_t i) { put(begin_of(i), kHugePage), there.insert(i); };
  const auto end = [&](std::uintptr_t i) { remove(begin_of(i)), there.erase(i); };

  for (std::uintptr_t i = 0; i < kRanges; ++i) add(i * 7 % kRanges);
  expect_these();
  for (std::uintptr_t i = 0; i < kRanges; i += 2) end(i * 11 % kRanges);
  expect_these();
  for (std::uintptr_t i = 0; i < kRanges / 2; ++i) add(kRanges + i);
  expect_these();
  EXPECT_EQ(entries.size(), kRanges) << "a range does not take the place of one that ended";
  while (!there.empty()) end(*there.rbegin());
  expect_these();
}

// A thread must find its own addresses, although ranges above them come and go meanwhile.
TEST(RangeRegistryTest, ARangeThatComesAndGoesIsNotFoundElsewhere) {
  std::atomic<bool> over{false};
  std::thread other([&] {
    while (!over) {
      put(kBase + kHugePage, kHugePage);
      remove(kBase + kHugePage);
    }
  });
  bool found = false;
  const auto end =
      std::chrono::steady_clock::now() + std::chrono::milliseconds(1500);  // time enough to run at once
  while (!found && std::chrono::steady_clock::now() < end) found = find_range(kBase) != nullptr;
  over = true;
  other.join();
  EXPECT_FALSE(found);
}

}  // namespace sluice::allocator::range_registry_test
