// Measures calls of two ranks that are threads of this process, beside a copy of the same bytes within one
// thread. Each rank has two threads, so that two cores are shared by four. "Bytes" are those of the array.
#include <benchmark/benchmark.h>

#include <array>
#include <cstring>
#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "comm/local_links.h"
#include "core/bytes.h"

namespace {

using namespace sluice;
using namespace sluice::comm;

constexpr std::size_t kRing = kMiB;

// Ranks whose calls are all made by one thread, which waits for them.
class Ranks {
 public:
  explicit Ranks(int count) : memory_(count, kRing) {
    for (int rank = 0; rank < count; ++rank)
      comms_.push_back(std::make_unique<Communicator>(make_local_links(memory_, rank), Deadlines(), ledger_));
  }
  template <class Call>
  void run(Call&& call) {
    TransferGroup group;
    for (const auto& comm : comms_) call(*comm, group.add());
    group.wait();
  }

 private:
  allocator::Ledger ledger_;
  LocalMemory memory_;
  std::vector<std::unique_ptr<Communicator>> comms_;
};

void count_bytes(benchmark::State& state, std::size_t bytes) {
  state.SetBytesProcessed(static_cast<std::int64_t>(bytes) * static_cast<std::int64_t>(state.iterations()));
}

void copy(benchmark::State& state) {
  const std::size_t bytes = static_cast<std::size_t>(state.range(0)) * kKiB;
  std::vector<std::byte> from(bytes), to(bytes);
  for (auto _ : state) {
    std::memcpy(to.data(), from.data(), bytes);
    benchmark::ClobberMemory();
  }
  count_bytes(state, bytes);
}

void all_reduce(benchmark::State& state) {
  const std::size_t bytes = static_cast<std::size_t>(state.range(0)) * kKiB;
  const auto ranks = static_cast<std::size_t>(state.range(1));
  std::vector<std::vector<float>> values(ranks, std::vector<float>(bytes / sizeof(float)));
  Ranks run(static_cast<int>(ranks));
  for (auto _ : state)
    run.run([&](Communicator& comm, Done done) {
      std::vector<float>& own = values[static_cast<std::size_t>(comm.rank())];
      comm.all_reduce(1, "bench", {own.data(), Dtype::kF32}, own.size(), std::move(done));
    });
  count_bytes(state, bytes);
}

void all_gather(benchmark::State& state) {
  const std::size_t bytes = static_cast<std::size_t>(state.range(0)) * kKiB;
  std::array<std::vector<std::byte>, 2> values{std::vector<std::byte>(bytes), std::vector<std::byte>(bytes)};
  const std::array<std::size_t, 3> borders{0, bytes / 2, bytes};
  Ranks run(2);
  for (auto _ : state)
    run.run([&](Communicator& comm, Done done) {
      comm.all_gather(1, "bench", {values[static_cast<std::size_t>(comm.rank())].data(), Dtype::kU8}, borders,
                      std::move(done));
    });
  count_bytes(state, bytes);
}

BENCHMARK(copy)->ArgName("KiB")->Arg(64 << 10)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK(all_reduce)
    ->ArgNames({"KiB", "ranks"})
    ->Args({64 << 10, 2})
    ->Args({64 << 10, 4})
    ->Args({1, 2})
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);
BENCHMARK(all_gather)->ArgName("KiB")->Arg(64 << 10)->Arg(1)->UseRealTime()->Unit(benchmark::kMillisecond);

}  // namespace

BENCHMARK_MAIN();
