#include <CLI/CLI.hpp>

#include "bindings/cli/bench.h"
#include "core/error.h"

namespace sluice::cli {
namespace {

void bind_common(CLI::App& bench, BenchOptions& options) {
  Flags flags(bench);
  flags.real("--seconds", options.seconds, "time to measure in; at least three rounds are taken");
  flags.toggle("--json", options.json, "print JSON (docs/formats/bench.md)");
}

void bind_disk(CLI::App& bench, BenchOptions& options) {
  bench.add_option("folder", options.folder, "a folder on the disk to measure; nothing is left in it")
      ->type_name("FOLDER");
  Flags flags(bench);
  flags.size("--size", options.size, "of the file that is written (1GiB)");
  flags.size("--block", options.block, "of a transfer; without it what is known to be best, or measured now");
  flags.whole("--depth", options.depth, "transfers under way; likewise");
  bind_common(bench, options);
}

void bind_copy(CLI::App& bench, BenchOptions& options) {
  Flags flags(bench);
  flags.size("--size", options.size, "of an array of f32; two are taken (256MiB)");
  flags.whole("--threads", options.threads,
              "compute threads; without it the cores that this process may use");
  bind_common(bench, options);
}

void bind_optimizer(CLI::App& bench, BenchOptions& options) {
  Flags flags(bench);
  flags.choice("--optimizer", options.optimizer, optim::optimizer_names(), "what is measured");
  flags.choice("--dtype", options.dtype, {"f32", "bf16", "f16"},
               "type of parameters and gradients; without it each");
  flags.choice("--state", options.state, optim::state_type_names(),
               "type of the optimizer's state; without it each");
  flags.choice("--master", options.master, {"f32", "none"},
               "copies of bf16 parameters, or stochastic rounding; without it both");
  flags.whole("--elements", options.elements, "parameters that are updated");
  flags.whole("--threads", options.threads,
              "compute threads; without it the cores that this process may use");
  bind_common(bench, options);
}

void bind_step(CLI::App& bench, BenchOptions& options) {
  bench
      .add_option("model", options.step.settings.model, "a preset (gpt2-124m, ...) or a Hugging Face folder")
      ->type_name("MODEL");
  bind_step_bench(bench, options.step);
  bind_common(bench, options);
}

BenchReport measure(const CLI::App& bench, const BenchOptions& options, BenchProgress& progress) {
  if (bench.get_name() == "disk") return bench_disk(options, progress);
  if (bench.get_name() == "copy") return bench_copy(options, progress);
  if (bench.get_name() == "optimizer") return bench_optimizer(options, progress);
  models::TrainSettings settings = options.step.settings;
  read_choices(options.step, settings);
  return bench_step(settings, options.seconds, progress);
}

}  // namespace

void add_bench_commands(CLI::App& app) {
  app.add_subcommand("disk", "sequential reads and writes with checksums, against io_uring alone and fio");
  app.add_subcommand("copy", "copies, conversions and sums in memory, against its bandwidth");
  app.add_subcommand(
      "optimizer",
      "updates in memory, against loops that only move the same bytes, and the arithmetic alone");
  app.add_subcommand("step",
                     "training steps on random tokens, against the peak of products, memory and disk");
}

void bind_bench(CLI::App& app, BenchOptions& options) {
  bind_disk(*app.get_subcommand("disk"), options);
  bind_copy(*app.get_subcommand("copy"), options);
  bind_optimizer(*app.get_subcommand("optimizer"), options);
  bind_step(*app.get_subcommand("step"), options);
}

void run_bench(CLI::App& app, const BenchOptions& options, std::FILE* out) {
  const auto chosen = app.get_subcommands();
  if (chosen.size() != 1)
    fail(ErrorCode::kInvalidArgument,
         "say what to measure: sluice bench disk FOLDER, copy, optimizer or step MODEL; one at a time");
  refuse_unknown(*chosen.front());
  refuse_repeated(*chosen.front());
  check_seconds(options.seconds);
  BenchReport report;
  {
    BenchProgress progress;
    report = measure(*chosen.front(), options, progress);
  }
  fmt::print(out, "{}", options.json ? json_text(to_json(report)) + "\n" : to_text(report));
}

}  // namespace sluice::cli
