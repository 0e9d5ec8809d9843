#pragma once
#include <functional>
#include <string>
#include <vector>

#include "bindings/cli/bench.h"
#include "kernels/limits.h"

// Measures loops over memory, each in turn with what limits it.
namespace sluice::cli {

using MemoryPass = std::vector<kernels::MemoryStream>;  // the streams that one loop goes through side by side
std::size_t bytes_moved(const std::vector<MemoryPass>& passes);

// Runs one round: as many calls as take so many seconds. Returns bytes per second, where one call moves
// `bytes`.
double rate_of(std::size_t bytes, double seconds, const std::function<void()>& call);

struct MemoryWork {
  std::string name;
  std::vector<MemoryPass> passes;  // the bytes that a call must move, one pass after another
  std::function<void()> call;      // does the work
  // Returns bytes per second of the same work in the caches, in a round of so many seconds; may be empty.
  std::function<double(double seconds)> arithmetic;
  std::function<void()> products;  // does a call's matrix products alone; empty where it has none
};

// Measures works together. A work's limit is the slower of memory's (loops that only move the same bytes,
// with the best stores and turns, and then the products, if it has any) and the arithmetic's.
class MemoryBench {
 public:
  MemoryBench(Threads& threads, BenchReport& report) : threads_(threads), report_(report) {}
  void add(MemoryWork work) { works_.push_back(std::move(work)); }
  // Measures all works in `seconds` together, and adds a row for each to the report.
  void measure(double seconds, BenchProgress& progress);

 private:
  double memory_rate(const MemoryWork& work, kernels::Turns turns);
  std::vector<double> limits(const MemoryWork& work);
  BenchRow row_of(const MemoryWork& work, double reached, const std::vector<double>& limits) const;

  Threads& threads_;
  BenchReport& report_;
  std::vector<MemoryWork> works_;
  double round_ = 0;  // seconds
};

// Arrays of a multiple of this many elements are whole numbers of stream blocks, whether f32 or narrower.
inline constexpr std::size_t kElementGrain = 64 * kernels::kStreamBlocks;
int thread_count(const BenchOptions& options);

}  // namespace sluice::cli
