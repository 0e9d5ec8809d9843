// Measures calls of two ranks that are threads of this process, beside a copy of the same bytes within one
// thread. Each rank has two threads, so that two cores are shared by four. "Bytes" are those of the array.
// Under mpirun each process is a rank, and all exchange bytes through MPI, or those of a host through memory
// that they share where SLUICE_BENCH_SHARED is set. CPU is the time of all threads of rank 0.
#include <benchmark/benchmark.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "comm/host_links.h"
#include "comm/local_links.h"
#include "comm/mpi_links.h"
#include "core/bytes.h"

namespace {

using namespace sluice;
using namespace sluice::comm;

constexpr std::size_t kRing = kMiB;

// The communicator of the rank that this process is under mpirun; null elsewhere.
std::unique_ptr<Communicator> launched;

// Ranks whose calls are all made by one thread, which waits for them; under mpirun, the own one.
class Ranks {
 public:
  explicit Ranks(int count) {
    if (launched != nullptr) return;
    memory_ = std::make_unique<LocalMemory>(count, kRing);
    for (int rank = 0; rank < count; ++rank)
      comms_.push_back(
          std::make_unique<Communicator>(make_local_links(*memory_, rank), Deadlines(), ledger_));
  }
  template <class Call>
  void run(Call&& call) {
    TransferGroup group;
    if (launched != nullptr) call(*launched, group.add());
    for (const auto& comm : comms_) call(*comm, group.add());
    group.wait();
  }

 private:
  allocator::Ledger ledger_;
  std::unique_ptr<LocalMemory> memory_;
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

benchmark::internal::Benchmark* add(const char* name, void (*function)(benchmark::State&)) {
  auto* const made = benchmark::RegisterBenchmark(name, function)->UseRealTime()->MeasureProcessCPUTime();
  return made->Unit(benchmark::kMillisecond);
}

void add_all() {
  add("copy", copy)->ArgName("KiB")->Arg(64 << 10);
  add("all_reduce", all_reduce)
      ->ArgNames({"KiB", "ranks"})
      ->Args({64 << 10, 2})
      ->Args({64 << 10, 4})
      ->Args({1, 2});
  add("all_gather", all_gather)->ArgName("KiB")->Arg(64 << 10)->Arg(1);
}

// All ranks must do everything equally often.
void add_launched() {
  const int ranks = launched->size();
  add("all_reduce", all_reduce)->ArgNames({"KiB", "ranks"})->Args({64 << 10, ranks})->Iterations(20);
  add("all_reduce", all_reduce)->ArgNames({"KiB", "ranks"})->Args({1, ranks})->Iterations(500);
  if (ranks == 2) {
    add("all_gather", all_gather)->ArgName("KiB")->Arg(64 << 10)->Iterations(20);
    add("all_gather", all_gather)->ArgName("KiB")->Arg(1)->Iterations(500);
  }
}

}  // namespace

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  std::unique_ptr<Mpi> mpi;
  allocator::Ledger ledger;
  if (find_mpi_launcher()) {
    mpi = load_mpi();
    std::unique_ptr<Links> links = mpi->make_links({});
    std::vector<int> hosts;
    if (std::getenv("SLUICE_BENCH_SHARED") != nullptr) {
      HostLinks shared = make_host_links(std::move(links), kRing, std::chrono::minutes(1));
      links = std::move(shared.links);
      hosts = std::move(shared.hosts);
    }
    launched = std::make_unique<Communicator>(std::move(links), Deadlines(), ledger, hosts);
    if (launched->rank() > 0 && std::freopen("/dev/null", "w", stdout) == nullptr) return 1;
    add_launched();
  } else {
    add_all();
  }
  benchmark::RunSpecifiedBenchmarks();
  launched.reset();
}
