#include <CLI/CLI.hpp>

#include "bindings/cli/bench.h"
#include "core/error.h"

namespace sluice::cli {
namespace {

void bind_common(CLI::App& bench, BenchOptions& options) {
  Flags flags(bench);
  flags.real("--seconds", options.seconds, "time to measure in, for at least three rounds");
  flags.toggle("--json", options.json, "print JSON (docs/formats/bench.md)");
}

void bind_disk(CLI::App& bench, BenchOptions& options) {
  bench.add_option("folder", options.folder, "a folder on the disk to measure; nothing is left in it")
      ->type_name("FOLDER");
  Flags flags(bench);
  flags.size("--size", options.size, "size of the file that is written (1GiB)");
  flags.size("--block", options.block, "size of a transfer (the best that is known or measured now)");
  flags.whole("--depth", options.depth,
              "how many transfers are under way (the best that is known or measured now)");
  bind_common(bench, options);
}

void bind_copy(CLI::App& bench, BenchOptions& options) {
  Flags flags(bench);
  flags.size("--size", options.size, "size of an array of f32, of which there are two (256MiB)");
  flags.whole("--threads", options.threads, "compute threads (the cores that this process may use)");
  bind_common(bench, options);
}

void bind_link(CLI::App& bench, BenchOptions& options) {
  Flags flags(bench);
  flags.index("--device", options.device, "which GPU, counted from 0 among those that this process may use");
  flags.size("--size", options.size, "bytes that are copied in each direction (512MiB)");
  bind_common(bench, options);
}

void bind_optimizer(CLI::App& bench, BenchOptions& options) {
  Flags flags(bench);
  flags.choice("--optimizer", options.optimizer, optim::optimizer_names(), "optimizer to measure");
  flags.choice("--dtype", options.dtype, {"f32", "bf16", "f16"},
               "type of parameters and gradients (all in turn)");
  flags.choice("--state", options.state, optim::state_type_names(),
               "type of the optimizer's state (all in turn)");
  flags.choice("--master", options.master, {"f32", "none"},
               "whether bf16 parameters have f32 masters or are rounded stochastically (both in turn)");
  flags.whole("--elements", options.elements, "parameters that are updated");
  flags.whole("--threads", options.threads, "compute threads (the cores that this process may use)");
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
  if (bench.get_name() == "link") return bench_link(options, progress);
  if (bench.get_name() == "optimizer") return bench_optimizer(options, progress);
  models::TrainSettings settings = options.step.settings;
  read_choices(options.step, settings);
  return bench_step(settings, options.seconds, progress);
}

}  // namespace

void add_bench_commands(CLI::App& app) {
  app.add_subcommand("disk",
                     "compare sequential reads and writes with checksums with io_uring alone and fio");
  app.add_subcommand("copy", "compare copies, conversions and sums in memory with its bandwidth");
  app.add_subcommand("link",
                     "compare copies between host and GPU unit by unit with one copy, and with mapping "
                     "and registering memory, alone and while copies run");
  app.add_subcommand(
      "optimizer",
      "compare updates in memory with loops that only move the same bytes, and with the arithmetic alone");
  app.add_subcommand("step",
                     "compare training steps on random tokens with the peak of products, memory and disk");
}

void bind_bench(CLI::App& app, BenchOptions& options) {
  bind_disk(*app.get_subcommand("disk"), options);
  bind_copy(*app.get_subcommand("copy"), options);
  bind_link(*app.get_subcommand("link"), options);
  bind_optimizer(*app.get_subcommand("optimizer"), options);
  bind_step(*app.get_subcommand("step"), options);
}

void run_bench(CLI::App& app, const BenchOptions& options, std::FILE* out) {
  const auto chosen = app.get_subcommands();
  if (chosen.size() != 1)
    fail(ErrorCode::kInvalidArgument,
         "say what to measure: sluice bench disk FOLDER, copy, link, optimizer or step MODEL; one at a time");
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
