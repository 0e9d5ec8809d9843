// Measures what an access costs the pager, by the number of holdings. Each is used in forward and backward,
// written behind and fetched ahead, and its backing ends transfers at once. Moving pages is included.
#include <benchmark/benchmark.h>

#include <vector>

#include "core/bytes.h"
#include "engine/memory/pager.h"

namespace {

using namespace sluice;
using namespace sluice::engine;

class Nothing final : public Backing {
 public:
  void fetch(std::uint64_t, std::span<std::byte>, Done done) override { done(nullptr); }
  void store(std::uint64_t, std::span<const std::byte>, Done done) override { done(nullptr); }
  void fetch_unchecked(std::uint64_t, std::span<std::byte>, Done done) override { done(nullptr); }
  void check(std::uint64_t, std::span<const std::byte>, Threads&) override {}
  void store(std::uint64_t, std::span<const std::byte>, Threads&, Done done) override { done(nullptr); }
};

class Nowhere final : public Backings {
 public:
  std::unique_ptr<Backing> make(const BackingSpec&) override { return std::make_unique<Nothing>(); }
  void allocate() override {}
};

void access(benchmark::State& state) {
  const auto holdings = static_cast<std::size_t>(state.range(0));
  allocator::Ledger ledger;
  Nowhere backings;
  Waits waits(nullptr);
  Pager pager(ledger, backings, waits);
  std::vector<std::vector<HoldingId>> schedule;
  for (std::size_t i = 0; i < holdings; ++i)
    schedule.push_back(
        {pager.define({.name = "holding", .bytes = kHugePage, .tier = allocator::Tier::kDisk})});
  const std::vector<std::vector<HoldingId>> backward(schedule.rbegin(), schedule.rend());
  schedule.insert(schedule.end(), backward.begin(), backward.end());
  pager.start(kHugePage, 64);
  pager.set_schedule(schedule);
  std::size_t position = 0;
  for (auto _ : state) {
    const HoldingId id = schedule[position].front();
    pager.set_position(position);
    pager.acquire(id, Pager::Use::kModify);
    pager.prefetch(2);
    pager.written(id, kHugePage);
    pager.release(id);
    position = (position + 1) % schedule.size();
  }
}
BENCHMARK(access)
    ->ArgName("holdings")
    ->Arg(100)
    ->Arg(1000)
    ->Arg(5000)
    ->Arg(20000)
    ->Unit(benchmark::kMicrosecond);

}  // namespace

BENCHMARK_MAIN();
