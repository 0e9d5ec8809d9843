#pragma once
#include <functional>
#include <string>
#include <vector>

#include "bindings/cli/bench.h"
#include "kernels/limits.h"

// Loops over memory, each in turn with what bounds it.
namespace sluice::cli {

using MemoryPass = std::vector<kernels::MemoryStream>;  // what one loop goes through, side by side
std::size_t bytes_moved(const std::vector<MemoryPass>& passes);

// A round of the work: as many calls as take a while. Bytes per second, where one call moves `bytes`.
double rate_of(std::size_t bytes, const std::function<void()>& call);

struct MemoryWork {
  std::string name;
  std::vector<MemoryPass> passes;      // what has to move, one pass after another
  std::function<void()> call;          // moves it
  std::function<double()> arithmetic;  // bytes per second of the same work in the caches; none: not measured
  std::function<void()> products;      // those of a call, alone; none: it has none
};

// Works that are measured together. The limit of a work is the slower of memory's (loops that only move the
// same bytes, with the best of both kinds of stores and of turns, and then the products, where there are any)
// and the arithmetic's.
class MemoryBench {
 public:
  MemoryBench(Threads& threads, BenchReport& report) : threads_(threads), report_(report) {}
  void add(MemoryWork work) { works_.push_back(std::move(work)); }
  // Measures all and adds a row for each to the report. `seconds`: of all together.
  void measure(double seconds, BenchProgress& progress);

 private:
  double memory_rate(const MemoryWork& work, kernels::Turns turns);
  std::vector<double> limits(const MemoryWork& work);
  BenchRow row_of(const MemoryWork& work, double reached, const std::vector<double>& limits) const;

  Threads& threads_;
  BenchReport& report_;
  std::vector<MemoryWork> works_;
};

// A whole number of pieces, of f32 and of anything narrower.
inline constexpr std::size_t kElementGrain = 64 * kernels::kStreamBlocks;
int thread_count(const BenchOptions& options);

}  // namespace sluice::cli
