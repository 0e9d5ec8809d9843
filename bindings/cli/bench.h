#pragma once
#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include "bindings/cli/bench_report.h"
#include "bindings/cli/commands.h"

// The benchmarks of `sluice bench`. Each measures the machine's limits and Sluice's speed in one run.
namespace sluice::cli {

struct BenchOptions {
  bool json = false;
  double seconds = 10;
  int threads = 0;  // 0 means the cores that this process may use
  std::string folder;
  std::uint64_t size = 0;   // 0 means the bench's own size
  std::uint64_t block = 0;  // 0 means the best one measured
  int depth = 0;            // 0 means the best one measured
  int device = 0;           // of `bench link`: which GPU
  std::uint64_t elements = std::uint64_t{32} << 20;
  std::string optimizer = "adamw";
  std::optional<std::string> dtype, state, master;
  TrainOptions step;  // for `bench step`
};

BenchReport bench_disk(const BenchOptions& options, BenchProgress& progress);
BenchReport bench_copy(const BenchOptions& options, BenchProgress& progress);
BenchReport bench_link(const BenchOptions& options, BenchProgress& progress);
BenchReport bench_optimizer(const BenchOptions& options, BenchProgress& progress);
BenchReport bench_step(const models::TrainSettings& settings, double seconds, BenchProgress& progress);

// Adds the subcommands of `sluice bench`. bind_bench() adds their flags.
void add_bench_commands(CLI::App& app);
void bind_bench(CLI::App& app, BenchOptions& options);  // REQUIRES: add_bench_commands(app) was called
void run_bench(CLI::App& app, const BenchOptions& options, std::FILE* out);

}  // namespace sluice::cli
