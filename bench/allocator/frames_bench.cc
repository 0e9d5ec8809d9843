// Measures what it costs to place memory under a home and to take it away, by the sizes of home and extents.
// The "together" extents follow each other in the pool and move in one call; no two "scattered" ones do.
#include <benchmark/benchmark.h>

#include <vector>

#include "allocator/memory.h"
#include "core/bytes.h"

namespace {

using namespace sluice;
using namespace sluice::allocator;

void place_and_shrink(benchmark::State& state, FramePool& pool, Home& home, std::size_t bytes) {
  for (auto _ : state) {
    pool.place(home, bytes, Purpose::kParameter);
    pool.shrink(home, 0);
  }
  double share = 0;
  pool.place(home, bytes, Purpose::kParameter);
  if (huge_pages_given(home.data(), home.placed(), &share)) state.counters["huge"] = share;
  state.counters["moved/s"] =
      benchmark::Counter(static_cast<double>(bytes) * static_cast<double>(state.iterations()),
                         benchmark::Counter::kIsRate, benchmark::Counter::kIs1024);
}

void together(benchmark::State& state) {
  const std::size_t bytes = static_cast<std::size_t>(state.range(0)) * kMiB;
  const std::size_t extent = static_cast<std::size_t>(state.range(1)) * kMiB;
  Ledger ledger;
  FramePool pool(ledger, extent, bytes / extent);
  Home home("bench", bytes);
  place_and_shrink(state, pool, home, bytes);
}

// Other homes hold every second extent.
void scattered(benchmark::State& state) {
  const std::size_t bytes = static_cast<std::size_t>(state.range(0)) * kMiB;
  const std::size_t extent = static_cast<std::size_t>(state.range(1)) * kMiB;
  const std::size_t count = bytes / extent;
  Ledger ledger;
  FramePool pool(ledger, extent, 2 * count);
  Home home("bench", bytes);
  std::vector<Home> homes;
  for (std::size_t i = 0; i < 2 * count; ++i) {
    homes.emplace_back("other", extent);
    pool.place(homes.back(), extent, Purpose::kGradient);
  }
  for (std::size_t i = 0; i < homes.size(); i += 2) pool.shrink(homes[i], 0);
  place_and_shrink(state, pool, home, bytes);
}

void sizes(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"MiB", "extent"})->Unit(benchmark::kMicrosecond);
  for (const int mib : {16, 128, 1024})
    for (const int extent : {2, 16, 64})
      if (extent <= mib) bench->Args({mib, extent});
}

BENCHMARK(together)->Apply(sizes);
BENCHMARK(scattered)->Apply(sizes);

}  // namespace

BENCHMARK_MAIN();
