#include "engine/memory/pager.h"

#include "core/bytes.h"
#include "core/error.h"
#include "testing.h"

namespace sluice::engine::pager_test {

constexpr std::size_t kBytes = kHugePage;  // one extent for each holding

// A backing that counts transfers, which end at once or at let_go().
class MemoryBacking final : public Backing {
 public:
  struct Counts {
    std::size_t fetched = 0, stored = 0;
    std::size_t most_bytes = 0;  // of one transfer of a backing that has fewer than kBytes
    bool holds = false;          // transfers that begin now do not end before let_go()
    std::vector<std::function<void()>> held;
    void let_go() {
      for (const auto& end : std::exchange(held, {})) end();
    }
  };
  MemoryBacking(std::size_t bytes, Counts& counts) : contents_(bytes), counts_(counts) {}

  void fetch(std::uint64_t offset, std::span<std::byte> into, Done done) override {
    ++counts_.fetched;
    check_room(offset, into.size());
    finish([=, this] { std::memcpy(into.data(), contents_.data() + offset, into.size()); }, std::move(done));
  }
  void store(std::uint64_t offset, std::span<const std::byte> from, Done done) override {
    ++counts_.stored;
    check_room(offset, from.size());
    finish([=, this] { std::memcpy(contents_.data() + offset, from.data(), from.size()); }, std::move(done));
  }
  void fetch_unchecked(std::uint64_t offset, std::span<std::byte> into, Done done) override {
    fetch(offset, into, std::move(done));
  }
  void check(std::uint64_t, std::span<const std::byte>, Threads&) override {}
  void store(std::uint64_t offset, std::span<const std::byte> from, Threads&, Done done) override {
    store(offset, from, std::move(done));
  }

 private:
  void check_room(std::uint64_t offset, std::size_t bytes) {
    ASSERT_LE(offset + bytes, contents_.size());
    if (contents_.size() < kBytes) counts_.most_bytes = std::max(counts_.most_bytes, bytes);
  }
  void finish(std::function<void()> copy, Done done) {
    const auto end = [copy = std::move(copy), done = std::move(done)] {
      copy();
      done(nullptr);
    };
    if (counts_.holds)
      counts_.held.push_back(end);
    else
      end();
  }
  std::vector<std::byte> contents_;
  Counts& counts_;
};

class MemoryBackings final : public Backings {
 public:
  std::unique_ptr<Backing> make(const BackingSpec& spec) override {
    return std::make_unique<MemoryBacking>(spec.bytes, counts);
  }
  void allocate() override {}
  MemoryBacking::Counts counts;
};

class PagerTest : public testing::Test {
 protected:
  ~PagerTest() override { backings_.counts.let_go(); }
  HoldingId define(bool stored = true) {
    return pager_.define(
        {.name = "holding", .bytes = kBytes, .tier = allocator::Tier::kDisk, .stored = stored});
  }
  std::vector<HoldingId> define_many(std::size_t count) {
    std::vector<HoldingId> ids;
    for (std::size_t i = 0; i < count; ++i) ids.push_back(define());
    return ids;
  }
  // Each holding begins with its number and with how often it was changed.
  struct Mark {
    HoldingId id;
    std::uint32_t version;
    bool operator==(const Mark&) const = default;
  };
  Mark read(HoldingId id) {
    Mark mark;
    std::memcpy(&mark, pager_.acquire(id, Pager::Use::kRead), sizeof(mark));
    pager_.release(id);
    return mark;
  }
  void write(HoldingId id, std::uint32_t version) {
    const Mark mark{id, version};
    std::memcpy(pager_.acquire(id, Pager::Use::kModify), &mark, sizeof(mark));
    pager_.written(id, kBytes);
    pager_.release(id);
  }

  allocator::Ledger ledger_;
  MemoryBackings backings_;
  Waits waits_{nullptr};
  Pager pager_{ledger_, backings_, waits_};
};

// Returns the fewest fetches that any choice of evictions allows, where everything is only read (Belady,
// 1966).
std::size_t fewest_fetches(const std::vector<HoldingId>& accesses, std::size_t frames) {
  std::set<HoldingId> present;
  std::size_t fetches = 0;
  const auto next_use = [&](HoldingId id, std::size_t after) {
    std::size_t i = after;
    while (i < accesses.size() && accesses[i] != id) ++i;
    return i;
  };
  for (std::size_t i = 0; i < accesses.size(); ++i) {
    if (present.contains(accesses[i])) continue;
    ++fetches;
    if (present.size() == frames)
      present.erase(*std::ranges::max_element(present, {}, [&](HoldingId id) { return next_use(id, i); }));
    present.insert(accesses[i]);
  }
  return fetches;
}

TEST_F(PagerTest, FetchesNoMoreThanTheBestChoiceOfWhatLeaves) {
  constexpr std::size_t kHoldings = 12, kFrames = 5, kCycles = 6;
  const auto ids = define_many(kHoldings);
  std::mt19937 random(3);
  std::vector<std::vector<HoldingId>> schedule;
  for (int i = 0; i < 40; ++i) schedule.push_back({ids[random() % kHoldings]});
  pager_.start(kHugePage, kFrames);
  for (const HoldingId id : ids) write(id, 0);
  pager_.prefetch(0);  // without a schedule it stores all that was changed
  pager_.wait_all();
  pager_.set_schedule(schedule);
  std::vector<HoldingId> all;
  for (std::size_t cycle = 0; cycle < kCycles; ++cycle)
    for (const auto& access : schedule) all.push_back(access.front());
  backings_.counts.fetched = 0;
  for (std::size_t cycle = 0; cycle < kCycles; ++cycle)
    for (std::size_t i = 0; i < schedule.size(); ++i) {
      pager_.set_position(i);
      EXPECT_EQ(read(schedule[i].front()), (Mark{schedule[i].front(), 0}));
    }
  // The pager begins with other holdings in its frames, and looks one cycle ahead.
  EXPECT_LE(backings_.counts.fetched, fewest_fetches(all, kFrames) + kFrames);
}

TEST_F(PagerTest, WhatIsGivenUpIsNeverWritten) {
  const auto ids = define_many(3);
  pager_.start(kHugePage, 1);
  pager_.set_schedule({{ids[0]}, {ids[1]}, {ids[2]}});
  for (const HoldingId id : ids) {
    write(id, 1);
    pager_.discard(id);
  }
  EXPECT_EQ(backings_.counts.stored, 0u);
}

TEST_F(PagerTest, WhatIsParkedIsLeftToItsReader) {
  const auto ids = define_many(3);
  pager_.follow(ids[1], ids[0]);
  pager_.start(kHugePage, 2);
  pager_.set_schedule({{ids[0]}, {ids[1]}, {ids[2]}});
  write(ids[1], 1);
  pager_.park(ids[1]);
  write(ids[0], 1);
  pager_.set_position(2);
  write(ids[2], 1);  // one of the two must leave, and both are needed next
  pager_.wait_all();
  pager_.set_position(0);
  pager_.prefetch(2);
  EXPECT_EQ(read(ids[0]), (Mark{ids[0], 1}));
  if (!pager_.present(ids[1])) {
    Mark mark;
    TransferGroup batch;
    std::vector<std::byte> found(kBytes);
    pager_.backing(ids[1]).fetch(0, found, batch.add());
    batch.wait();
    std::memcpy(&mark, found.data(), sizeof(mark));
    EXPECT_EQ(mark, (Mark{ids[1], 1}));
  }
}

// The backing of a gradient whose shard alone is kept has room for no more.
TEST_F(PagerTest, NoMoreIsTransferredThanIsStored) {
  constexpr std::size_t kStored = kHugePage / 2 + 3 * kDiskBlock;
  const HoldingId part = pager_.define(
      {.name = "a part", .bytes = kBytes, .tier = allocator::Tier::kDisk, .stored_bytes = kStored});
  const HoldingId other = define();
  pager_.start(kHugePage, 1);
  pager_.set_schedule({{part}, {other}});
  const Mark mark{part, 3};
  std::memcpy(pager_.acquire(part, Pager::Use::kModify), &mark, sizeof mark);
  pager_.written(part, kStored);
  pager_.release(part);
  write(other, 1);
  EXPECT_EQ(backings_.counts.stored, 1u);
  EXPECT_EQ(read(part), mark);
  EXPECT_EQ(backings_.counts.most_bytes, kStored);
}

}  // namespace sluice::engine::pager_test
