#include "allocator/range_registry.h"

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "tests/allocator/support.h"

namespace sluice::allocator {
namespace {

// Addresses that nothing is mapped at.
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

// Each thread has its own addresses, so that what it sees of them must not depend on the others.
TEST(RangeRegistryTest, ThreadsThatComeAndGoDoNotTakeEachOthersRanges) {
  constexpr int kThreads = 4, kRounds = 40000;
  std::atomic<int> wrong{0};
  const auto work = [&](int number) {
    const std::uintptr_t begin = kBase + static_cast<std::uintptr_t>(number) * kHugePage;
    try {
      for (int round = 0; round < kRounds && wrong == 0; ++round) {
        put(begin, kHugePage);
        if (!found_at(begin + 4096, begin)) ++wrong;
        remove(begin);
        if (find_range(begin + 4096) != nullptr) ++wrong;
      }
    } catch (const Error&) {
      ++wrong;
    }
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) threads.emplace_back(work, i);
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0) << "a range was lost, or stayed after its end";
}

}  // namespace
}  // namespace sluice::allocator
