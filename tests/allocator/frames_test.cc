#include <sys/wait.h>
#include <unistd.h>

#include "tests/allocator/support.h"

namespace sluice::allocator::frames_test {

constexpr std::size_t kExtent = kHugePage;

TEST(Home, HasAnAlignedRangeAndNoMemory) {
  const std::size_t before = resident_bytes();
  const Home home("h.0", 512 * kMiB + 1);
  EXPECT_EQ(home.name(), "h.0");
  EXPECT_EQ(home.size(), 514 * kMiB);
  EXPECT_EQ(home.placed(), 0u);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(home.data()) % kHugePage, 0u);
  EXPECT_LT(resident_bytes(), before + 16 * kMiB);
}

TEST(Home, WithoutARangeIsRefused) {
  Ledger ledger;
  FramePool pool(ledger, kExtent, 1);
  Home empty;
  EXPECT_EQ(empty.data(), nullptr);
  EXPECT_EQ(empty.size(), 0u);
  EXPECT_EQ(empty.name(), "");
  EXPECT_EQ(thrown_by([&] { pool.place(empty, 1, Purpose::kParameter); }).code, ErrorCode::kState);
  pool.shrink(empty, 0);
  EXPECT_EQ(thrown_by([] { Home("none", 0); }).code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(thrown_by([] { Home("all", SIZE_MAX); }).code, ErrorCode::kInvalidArgument);
}

TEST(Home, MoveKeepsAddressAndFrames) {
  Ledger ledger;
  FramePool pool(ledger, kExtent, 4);
  Home first("first", 4 * kExtent);
  std::byte* const data = first.data();
  ASSERT_TRUE(pool.place(first, 2 * kExtent, Purpose::kGradient));
  stamp(data, 2 * kExtent, 7);
  Home second("second", 2 * kExtent);
  ASSERT_TRUE(pool.place(second, 2 * kExtent, Purpose::kGradient));
  second = std::move(first);
  EXPECT_EQ(pool.free_extents(), 2u) << "the home that was overwritten gives its frames back";
  EXPECT_EQ(second.name(), "first");
  EXPECT_EQ(second.data(), data);
  EXPECT_TRUE(has_stamp(second.data(), 2 * kExtent, 7));
  EXPECT_EQ(first.data(), nullptr);
  const Home third = std::move(second);
  EXPECT_EQ(third.placed(), 2 * kExtent);
}

TEST(Home, DestructorGivesFramesBack) {
  Ledger ledger;
  FramePool pool(ledger, kExtent, 3);
  {
    Home home("short", 3 * kExtent);
    ASSERT_TRUE(pool.place(home, 3 * kExtent, Purpose::kOptimizerState));
    EXPECT_EQ(pool.free_extents(), 0u);
  }
  EXPECT_EQ(pool.free_extents(), 3u);
  EXPECT_EQ(held(ledger, Purpose::kOptimizerState), 0u);
  EXPECT_EQ(held(ledger, Purpose::kParameter), 3 * kExtent);
}

TEST(FramePool, SizesThatAreNotPossibleAreRefused) {
  Ledger ledger;
  for (const std::size_t extent : {std::size_t{0}, std::size_t{4096}, kHugePage + 4096, 66 * kMiB, SIZE_MAX})
    EXPECT_EQ(thrown_by([&] { FramePool(ledger, extent, 1); }).code, ErrorCode::kInvalidArgument) << extent;
  EXPECT_EQ(thrown_by([&] { FramePool(ledger, kHugePage, SIZE_MAX); }).code, ErrorCode::kBudget);
  EXPECT_EQ(host_total(ledger).peak, 0u);
}

TEST(FramePool, OverBudgetIsRefusedAndChangesNothing) {
  Ledger ledger;
  ledger.set_budget(Tier::kHost, 3 * kExtent);
  EXPECT_EQ(thrown_by([&] { FramePool(ledger, kExtent, 4); }).code, ErrorCode::kBudget);
  EXPECT_EQ(host_total(ledger).peak, 0u);
  Ledger boundless;
  const std::size_t too_many = available_memory_bytes() / kExtent * 2;
  EXPECT_EQ(thrown_by([&] { FramePool(boundless, kExtent, too_many); }).code, ErrorCode::kBudget);
  EXPECT_EQ(host_total(boundless).current, 0u);
}

TEST(FramePool, WithoutExtentsPlacesNothing) {
  Ledger ledger;
  FramePool pool(ledger, kExtent, 0);
  Home home("h", kExtent);
  EXPECT_FALSE(pool.place(home, 1, Purpose::kParameter));
  EXPECT_TRUE(pool.place(home, 0, Purpose::kParameter));
  EXPECT_EQ(home.placed(), 0u);
}

TEST(FramePool, LedgerFollowsWhatIsPlaced) {
  Ledger ledger;
  FramePool pool(ledger, 2 * kHugePage, 8);
  EXPECT_EQ(pool.extents_for(1), 1u);
  EXPECT_EQ(pool.extents_for(0), 0u);
  EXPECT_EQ(pool.extents_for(4 * kHugePage + 1), 3u);
  Home home("h", 10 * kHugePage);
  ASSERT_TRUE(pool.place(home, 9 * kHugePage, Purpose::kGradient));
  EXPECT_EQ(home.placed(), 10 * kHugePage);
  EXPECT_EQ(held(ledger, Purpose::kGradient), 10 * kHugePage);
  EXPECT_EQ(held(ledger, Purpose::kParameter), 6 * kHugePage);
  pool.shrink(home, 3 * kHugePage);
  EXPECT_EQ(home.placed(), 4 * kHugePage);
  EXPECT_EQ(held(ledger, Purpose::kGradient), 4 * kHugePage);
  pool.shrink(home, SIZE_MAX);
  EXPECT_EQ(home.placed(), 4 * kHugePage);
  pool.shrink(home, 0);
  EXPECT_EQ(home.placed(), 0u);
  EXPECT_EQ(pool.free_extents(), 8u);
  EXPECT_EQ(held(ledger, Purpose::kParameter), 16 * kHugePage);
  EXPECT_EQ(host_total(ledger).peak, 16 * kHugePage);
}

TEST(FramePool, LastExtentMayPassTheEndOfTheHome) {
  Ledger ledger;
  FramePool pool(ledger, 64 * kMiB, 1);
  Home home("small", kHugePage);
  ASSERT_TRUE(pool.place(home, 1, Purpose::kParameter));
  EXPECT_EQ(home.placed(), 64 * kMiB);
  stamp(home.data(), home.placed(), 3);
  EXPECT_TRUE(has_stamp(home.data(), home.placed(), 3));
}

TEST(FramePool, TooFewExtentsChangeNothing) {
  Ledger ledger;
  FramePool pool(ledger, kExtent, 2);
  Home home("big", 3 * kExtent);
  EXPECT_FALSE(pool.place(home, 3 * kExtent, Purpose::kGradient));
  EXPECT_EQ(home.placed(), 0u);
  EXPECT_EQ(pool.free_extents(), 2u);
  EXPECT_EQ(held(ledger, Purpose::kGradient), 0u);
  EXPECT_TRUE(pool.place(home, 2 * kExtent, Purpose::kGradient));
}

TEST(FramePool, MisuseIsAnErrorThatNamesTheHome) {
  Ledger ledger;
  FramePool pool(ledger, kExtent, 4), other(ledger, kExtent, 4);
  Home home("block.3", 2 * kExtent);
  ASSERT_TRUE(pool.place(home, kExtent, Purpose::kParameter));
  for (FramePool* again : {&pool, &other}) {
    const Thrown thrown = thrown_by([&] { again->place(home, kExtent, Purpose::kParameter); });
    EXPECT_EQ(thrown.code, ErrorCode::kState);
    EXPECT_NE(thrown.text.find("block.3"), std::string::npos) << thrown.text;
  }
  EXPECT_EQ(thrown_by([&] { other.shrink(home, 0); }).code, ErrorCode::kState);
  EXPECT_EQ(home.placed(), kExtent);
  pool.shrink(home, 0);
  EXPECT_EQ(thrown_by([&] { pool.place(home, 2 * kExtent + 1, Purpose::kParameter); }).code,
            ErrorCode::kInvalidArgument);
  EXPECT_TRUE(other.place(home, kExtent, Purpose::kParameter)) << "another pool may follow";
}

struct Tenant {
  Home home;
  std::byte* data;
  FramePool* pool = nullptr;
  std::uint64_t value = 0;
};

std::vector<Tenant> make_tenants(std::size_t count) {
  std::vector<Tenant> tenants;
  for (std::size_t i = 0; i < count; ++i) {
    Home home("tenant." + std::to_string(i), (1 + i) * kHugePage);
    std::byte* const data = home.data();
    tenants.push_back({std::move(home), data});
  }
  return tenants;
}

void expect_undisturbed(const std::vector<Tenant>& tenants, const Ledger& ledger) {
  std::uint64_t under = 0;
  for (const Tenant& tenant : tenants) {
    ASSERT_EQ(tenant.home.data(), tenant.data);
    ASSERT_TRUE(has_stamp(tenant.data, tenant.home.placed(), tenant.value)) << tenant.home.name();
    under += tenant.home.placed();
  }
  ASSERT_EQ(held(ledger, Purpose::kActivation), under);
  ASSERT_EQ(host_total(ledger).current, 20 * kHugePage);
}

// Homes of different sizes come and go in random order, with frames from two pools. What is written under a
// home stays until its frames are taken away, whatever else moves; the memory held never changes.
TEST(FramePool, PagesKeepTheirContentUnderRandomMoves) {
  Ledger ledger;
  FramePool small(ledger, kHugePage, 12), large(ledger, 2 * kHugePage, 4);
  std::vector<Tenant> tenants = make_tenants(7);
  std::mt19937 random(20240607);
  const std::size_t before = resident_bytes();
  int placed = 0, refused = 0;
  for (std::uint64_t round = 1; round <= 3000; ++round) {
    Tenant& tenant = tenants[random() % tenants.size()];
    if (tenant.pool != nullptr) {
      tenant.pool->shrink(tenant.home, random() % 2 == 0 ? 0 : random() % tenant.home.placed());
      if (tenant.home.placed() == 0) tenant.pool = nullptr;
    } else if (FramePool& pool = random() % 3 == 0 ? large : small;
               pool.place(tenant.home, 1 + random() % tenant.home.size(), Purpose::kActivation)) {
      ++placed;
      tenant.pool = &pool;
      tenant.value = round;
      stamp(tenant.data, tenant.home.placed(), round);
    } else {
      ++refused;
    }
    ASSERT_NO_FATAL_FAILURE(expect_undisturbed(tenants, ledger)) << "in round " << round;
  }
  EXPECT_GT(placed, 500);
  EXPECT_GT(refused, 50);
#ifndef __SANITIZE_THREAD__  // its shadow memory counts as resident
  EXPECT_LT(resident_bytes(), before + 8 * kMiB) << "moves may not take memory of their own";
#else
  static_cast<void>(before);
#endif
}

TEST(FramePool, AHomeThatLeavesKeepsItsAddressAndContents) {
  Ledger ledger;
  FormerHome former;
  std::byte* data = nullptr;
  {
    FramePool pool(ledger, kExtent, 6);
    Home leaving("leaving", 4 * kExtent), staying("staying", 2 * kExtent);
    ASSERT_TRUE(pool.place(leaving, leaving.size(), Purpose::kParameter));
    ASSERT_TRUE(pool.place(staying, staying.size(), Purpose::kParameter));
    data = leaving.data();
    stamp(data, leaving.size(), 3);
    stamp(staying.data(), staying.size(), 4);
    pool.protect(leaving, FramePool::Access::kRead);
    former = pool.leave(leaving);
    EXPECT_EQ(pool.free_extents(), 4u);
    ASSERT_TRUE(pool.place(leaving = Home("next", 4 * kExtent), 4 * kExtent, Purpose::kParameter));
    stamp(leaving.data(), leaving.size(), 6);
    pool.shrink(leaving, 0);
    const std::size_t before = resident_bytes();
    pool.give_back(3);
    EXPECT_EQ(pool.extents(), 3u);
    EXPECT_EQ(pool.free_extents(), 1u);
    EXPECT_EQ(host_total(ledger).current, 3 * kExtent);
    EXPECT_LE(resident_bytes() + 2 * kExtent, before);
    pool.give_back(0);
    EXPECT_EQ(pool.extents(), 2u) << "what is under a home is not given back";
    EXPECT_TRUE(has_stamp(staying.data(), staying.size(), 4));
  }
  EXPECT_EQ(former.data(), data);
  EXPECT_TRUE(has_stamp(data, 4 * kExtent, 3));
  stamp(data, 4 * kExtent, 5);
  const pid_t child = ::fork();
  if (child == 0) ::_exit(has_stamp(data, 4 * kExtent, 5) ? 0 : 1);
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0) << "it is memory like any other, also in a child";
  Ledger other;
  FramePool pool(other, kExtent, 1);
  Home absent("absent", kExtent);
  EXPECT_EQ(thrown_by([&] { pool.leave(absent); }).code, ErrorCode::kState);
}

TEST(FramePool, TakesMoreUpToItsCapacity) {
  Ledger ledger;
  ledger.set_budget(Tier::kHost, 10 * kExtent);
  {
    FramePool pool(ledger, kExtent, 2, 16);
    EXPECT_EQ(pool.extents(), 2u);
    EXPECT_EQ(held(ledger, Purpose::kParameter), 2 * kExtent);
    Home home("home", 2 * kExtent), large("large", 6 * kExtent);
    ASSERT_TRUE(pool.place(home, 2 * kExtent, Purpose::kParameter));
    stamp(home.data(), home.size(), 3);
    const std::size_t before = resident_bytes();
    for (int round = 0; round < 3; ++round) {
      EXPECT_FALSE(pool.place(large, 6 * kExtent, Purpose::kParameter));
      pool.take_more(8);
      EXPECT_EQ(pool.free_extents(), 6u);
      EXPECT_EQ(host_total(ledger).current, 8 * kExtent);
      EXPECT_GE(resident_bytes() + 2 * kExtent, before + 6 * kExtent);
      ASSERT_TRUE(pool.place(large, 6 * kExtent, Purpose::kParameter));
      stamp(large.data(), large.size(), 4);
      EXPECT_TRUE(has_stamp(large.data(), large.size(), 4));
      pool.shrink(large, 0);
      pool.give_back(2);
      EXPECT_EQ(host_total(ledger).current, 2 * kExtent);
      EXPECT_LE(resident_bytes(), before + 2 * kExtent);
    }
    EXPECT_TRUE(has_stamp(home.data(), home.size(), 3));
    EXPECT_EQ(thrown_by([&] { pool.take_more(11); }).code, ErrorCode::kBudget);
    EXPECT_EQ(thrown_by([&] { pool.take_more(17); }).code, ErrorCode::kBudget);
  }
  EXPECT_EQ(host_total(ledger).current, 0u);
}

TEST(FramePool, HugePagesSurviveTheMoves) {
  Ledger ledger;
  FramePool pool(ledger, kExtent, 16);
  Home whole("whole", 16 * kExtent);
  ASSERT_TRUE(pool.place(whole, whole.size(), Purpose::kParameter));
  double at_first = 0;
  if (!huge_pages_given(whole.data(), whole.placed(), &at_first) || at_first == 0)
    GTEST_SKIP() << "the system gives no huge pages here";
  pool.shrink(whole, 0);
  std::array<Home, 4> homes = {Home("a", 4 * kExtent), Home("b", 4 * kExtent), Home("c", 4 * kExtent),
                               Home("d", 4 * kExtent)};
  for (int round = 0; round < 20; ++round) {
    for (Home& home : homes) ASSERT_TRUE(pool.place(home, home.size(), Purpose::kParameter));
    std::rotate(homes.begin(), homes.begin() + 1, homes.end());
    for (Home& home : homes) pool.shrink(home, static_cast<std::size_t>(round % 3) * kExtent);
    for (Home& home : homes) pool.shrink(home, 0);
  }
  ASSERT_TRUE(pool.place(whole, whole.size(), Purpose::kParameter));
  double at_last = 0;
  ASSERT_TRUE(huge_pages_given(whole.data(), whole.placed(), &at_last));
  EXPECT_DOUBLE_EQ(at_last, at_first);
}

}  // namespace sluice::allocator::frames_test
