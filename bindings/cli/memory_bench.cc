#include "bindings/cli/memory_bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "core/bytes.h"
#include "core/system.h"

namespace sluice::cli {
namespace {

constexpr std::size_t kBeyondCaches = 128 * kMiB;

using Clock = std::chrono::steady_clock;
using Touch = kernels::MemoryStream::Touch;

// Seconds of a round, where time allows: shorter rounds measure the clock and the waking of threads.
constexpr double kRound = 0.05;

// Indices of a work's limits in the result of MemoryBench::limits().
enum Limit : std::size_t { kMemory, kByLines, kArithmetic, kProducts, kLimits };

std::string streams_of(const std::vector<MemoryPass>& passes) {
  std::string text;
  for (const MemoryPass& pass : passes) {
    const auto count = [&](Touch touch) {
      return std::ranges::count_if(pass, [&](const auto& stream) { return stream.touch == touch; });
    };
    const auto reads = count(Touch::kRead), writes = count(Touch::kWrite), updates = count(Touch::kUpdate);
    text += fmt::format("{}{} streams read, {} written", text.empty() ? "" : "; ", reads + updates,
                        writes + updates);
  }
  return text;
}

}  // namespace

std::size_t bytes_moved(const std::vector<MemoryPass>& passes) {
  std::size_t bytes = 0;
  for (const MemoryPass& pass : passes)
    for (const kernels::MemoryStream& stream : pass) bytes += stream.moved();
  return bytes;
}

double rate_of(std::size_t bytes, double seconds, const std::function<void()>& call) {
  const Clock::time_point begin = Clock::now();
  double passed = 0;
  std::size_t calls = 0;
  do {
    call();
    ++calls;
    passed = std::chrono::duration<double>(Clock::now() - begin).count();
  } while (passed < seconds);
  return static_cast<double>(bytes * calls) / passed;
}

double MemoryBench::memory_rate(const MemoryWork& work, kernels::Turns turns) {
  double best = 0;
  for (const auto stores : {kernels::Stores::kPlain, kernels::Stores::kPastCaches})
    best = std::max(best, rate_of(bytes_moved(work.passes), round_, [&] {
                      for (const MemoryPass& pass : work.passes)
                        kernels::go_through(threads_, pass, stores, turns);
                    }));
  return best;
}

std::vector<double> MemoryBench::limits(const MemoryWork& work) {
  std::vector<double> rates(kLimits, 0);
  rates[kMemory] = memory_rate(work, kernels::Turns::kPages);
  rates[kByLines] = memory_rate(work, kernels::Turns::kLines);
  if (work.arithmetic) rates[kArithmetic] = work.arithmetic(round_);
  if (work.products) rates[kProducts] = rate_of(bytes_moved(work.passes), round_, work.products);
  return rates;
}

BenchRow MemoryBench::row_of(const MemoryWork& work, double reached,
                             const std::vector<double>& limits) const {
  const double moving = std::max(limits[kMemory], limits[kByLines]);
  BenchRow row{work.name, BenchUnit::kBytesPerSecond, reached, moving, {}, {}};
  row.limit_is = fmt::format("{} ({:.2f} GB/s by lines)", streams_of(work.passes), limits[kByLines] / 1e9);
  if (work.products) {
    row.limit = 1 / (1 / moving + 1 / limits[kProducts]);
    row.limit_is = "the products alone, and then " + row.limit_is;
    row.more["limit_products"] = limits[kProducts];
  }
  row.more["limit_memory_by_lines"] = limits[kByLines];
  if (work.arithmetic || work.products) row.more["limit_memory"] = moving;
  if (!work.arithmetic) return row;
  row.more["limit_arithmetic"] = limits[kArithmetic];
  if (limits[kArithmetic] < row.limit) {
    row.limit = limits[kArithmetic];
    row.limit_is = fmt::format("the same in the caches ({:.2f} GB/s from memory)", moving / 1e9);
  }
  return row;
}

void MemoryBench::measure(double seconds, BenchProgress& progress) {
  round_ = std::min(kRound, seconds / static_cast<double>(works_.size()));
  std::vector<BenchWork> rounds;
  for (const MemoryWork& work : works_) {
    rounds.push_back({work.name, [&] {
                        return std::vector<double>{rate_of(bytes_moved(work.passes), round_, work.call)};
                      }});
    rounds.push_back({work.name + ", limit", [&] { return limits(work); }});
  }
  const auto found = medians_in_turn(rounds, seconds, progress);
  for (std::size_t i = 0; i < works_.size(); ++i)
    report_.rows.push_back(row_of(works_[i], found[2 * i][0], found[2 * i + 1]));
  const auto small = [](const MemoryWork& work) { return bytes_moved(work.passes) < kBeyondCaches; };
  if (!std::ranges::any_of(works_, small)) return;
  const std::string note = fmt::format(
      "less than {} is moved at a time: it may stay in the processor's caches, so that shares of memory's "
      "rate say little",
      format_size(kBeyondCaches));
  if (!std::ranges::count(report_.notes, note)) report_.notes.push_back(note);
}

int thread_count(const BenchOptions& options) {
  return options.threads == 0 ? usable_cpus() : options.threads;
}

}  // namespace sluice::cli
