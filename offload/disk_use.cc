#include "offload/disk_use.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "allocator/memory.h"
#include "core/bytes.h"
#include "core/checksum.h"
#include "core/system.h"
#include "kernels/limits.h"
#include "offload/disk_trials.h"

namespace sluice::offload {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int kTimings = 3;  // how many times a checksum is timed
// In seconds: timing the cores' work alone; reading until the disk's rate is sustained; measuring each
// direction.
constexpr double kAlone = 0.06, kToSteady = 4, kEachWay = 0.4;
constexpr std::uint64_t kTwoWays = std::uint64_t{64} << 20;  // a smaller file gets one pass in each direction

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// Keeps all cores busy while it lives.
class Work {
 public:
  Work() : threads_(usable_cpus()), runner_([this] { run(); }) {}
  ~Work() {
    ends_ = true;
    runner_.join();
  }
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;

  int cores() const { return threads_.count(); }
  std::uint64_t done() const { return done_; }  // the number of finished calls, which do equal work

 private:
  void run() {
    constexpr std::size_t kRoundsPerCall = 50'000;  // about half a millisecond
    while (!ends_) {
      kernels::multiply_add(threads_, kRoundsPerCall);
      ++done_;
    }
  }
  Threads threads_;
  std::atomic<bool> ends_ = false;
  std::atomic<std::uint64_t> done_ = 0;
  std::thread runner_;  // last, since it uses the members above
};

// The rate over the second half of as many passes as fit into `seconds`, and the bytes of all passes.
struct Passes {
  double rate = 0;
  double bytes = 0;
};
template <class Pass>
Passes passes_for(double seconds, std::uint64_t bytes, const Pass& pass) {
  std::vector<double> took;
  for (const Clock::time_point begin = Clock::now(); took.empty() || seconds_since(begin) < seconds;)
    took.push_back(static_cast<double>(bytes) / pass());
  const auto last = static_cast<std::ptrdiff_t>(took.size() / 2);
  const double half = std::accumulate(took.begin() + last, took.end(), 0.0);
  const auto count = static_cast<double>(took.size() - took.size() / 2);
  return {count * static_cast<double>(bytes) / half, static_cast<double>(took.size() * bytes)};
}

// Returns the checksum's seconds for each byte, in memory that `read` has just filled.
template <class Read>
double checksum_seconds(std::span<const std::byte> bytes, const Read& read) {
  double least = 1;
  for (int round = 0; round < kTimings; ++round) {
    read();
    const Clock::time_point begin = Clock::now();
    volatile std::uint64_t sum = checksum(bytes);
    (void)sum;
    least = std::min(least, seconds_since(begin) / static_cast<double>(bytes.size()));
  }
  return least;
}

}  // namespace

DiskUse use_disk(const std::string& folder, std::uint64_t bytes, const IoOptions& io) {
  allocator::Ledger unlimited;
  const allocator::Region memory(unlimited, allocator::Purpose::kStaging, kMostInFlight);
  fill_for_measuring(memory.bytes());
  BareFile bare(folder, bytes);
  const auto service = make_io_service(io);
  const auto file = bare.open_in(*service);
  // All of the memory is used in turn, with as many blocks in flight as fit into it.
  const StreamShape shape{io.block_bytes, kMostInFlight / io.block_bytes};
  measure_file(*file, bytes, shape, memory.bytes());  // the first writes into preallocated space are slower

  DiskUse use;
  {
    const Work work;
    const auto rate_of_work = [&](const auto& meanwhile) {
      const std::uint64_t before = work.done();
      const Clock::time_point begin = Clock::now();
      meanwhile();
      return static_cast<double>(work.done() - before) / seconds_since(begin);
    };
    const double alone =
        rate_of_work([] { std::this_thread::sleep_for(std::chrono::duration<double>(kAlone)); });
    const Clock::time_point begin = Clock::now();
    double moved = 0;
    const double beside = rate_of_work([&] {
      const auto rate_of = [&](double seconds, const auto& pass) {
        const Passes passes = passes_for(bytes < kTwoWays ? 0 : seconds, bytes, pass);
        moved += passes.bytes;
        return passes.rate;
      };
      use.rates.read = rate_of(kToSteady, [&] { return measure_reads(*file, bytes, shape, memory.bytes()); });
      use.rates.write =
          rate_of(kEachWay, [&] { return measure_writes(*file, bytes, shape, memory.bytes()); });
      use.rates.together =
          rate_of(kEachWay, [&] { return measure_together(*file, bytes, shape, memory.bytes()); });
    });
    use.processor_seconds = std::max(0.0, 1 - beside / alone) * seconds_since(begin) * work.cores() / moved;
  }
  use.processor_seconds +=
      checksum_seconds(memory.bytes(), [&] { measure_reads(*file, bytes, shape, memory.bytes()); });
  return use;
}

}  // namespace sluice::offload
