#pragma once
#include <functional>
#include <string>
#include <vector>

#include "bindings/cli/bench.h"
#include "kernels/limits.h"

// Benchmarks of loops over memory, each measured in turn with the limits of the machine for it.
namespace sluice::cli {

using MemoryPass = std::vector<kernels::MemoryStream>;  // streams that one loop goes through side by side
std::size_t bytes_moved(const std::vector<MemoryPass>& passes);

// Runs one round: calls for about `seconds`. Returns bytes per second, where one call moves `bytes`.
double rate_of(std::size_t bytes, double seconds, const std::function<void()>& call);

struct MemoryWork {
  std::string name;
  std::vector<MemoryPass> passes;  // the memory traffic that a call cannot avoid, pass by pass
  std::function<void()> call;      // runs the loop that is measured
  // Returns bytes per second of the same work on data in the caches, in a round of `seconds`; may be empty.
  std::function<double(double seconds)> arithmetic;
  std::function<void()> products;  // runs only a call's matrix products; empty where it has none
};

// Measures works together. A work's limit is the slower of two: that of memory (loops that only move the same
// bytes, with the best stores and turns, followed by the matrix products, if any) and that of arithmetic.
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

// An array with a multiple of this many elements consists of whole stream blocks, in f32 and in narrower
// types.
inline constexpr std::size_t kElementGrain = 64 * kernels::kStreamBlocks;
int thread_count(const BenchOptions& options);

}  // namespace sluice::cli
