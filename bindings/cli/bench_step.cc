#include <chrono>
#include <filesystem>
#include <fstream>
#include <numeric>

#include "bindings/cli/bench.h"
#include "bindings/cli/signals.h"
#include "core/bytes.h"
#include "core/error.h"
#include "core/random.h"
#include "engine/machine/machine_rates.h"
#include "engine/planner/placement.h"
#include "models/run/training_run.h"

namespace sluice::cli {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::size_t kLeastSteps = 3;  // counted steps, after a first one that is not

// A file of random tokens, in a folder that is removed with this object.
class RandomTokens {
 public:
  RandomTokens(std::uint64_t count, std::size_t vocabulary) {
    std::string pattern = (std::filesystem::temp_directory_path() / "sluice-bench-XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr)
      fail(ErrorCode::kIo, "cannot make a folder for the tokens in '{}': {}; name another by TMPDIR",
           std::filesystem::temp_directory_path().string(), errno_text(errno));
    folder_ = pattern;
    try {
      write(count, vocabulary);
    } catch (...) {
      remove();
      throw;
    }
  }
  ~RandomTokens() { remove(); }
  RandomTokens(const RandomTokens&) = delete;
  RandomTokens& operator=(const RandomTokens&) = delete;
  std::string path() const { return folder_ + "/tokens.bin"; }
  // Removes the file; a process that has opened it can still read it.
  void remove() {
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }

 private:
  static constexpr std::uint64_t kBetweenLooks = 1 << 16;
  // In llm.c's format: docs/formats/tokens.md.
  void write(std::uint64_t count, std::size_t vocabulary) const {
    const bool wide = vocabulary > std::size_t{1} << 16;
    std::vector<std::int32_t> header(256, 0);
    header[0] = wide ? 20240801 : 20240520;
    header[1] = wide ? 7 : 1;
    header[2] = static_cast<std::int32_t>(count);
    std::ofstream file(path(), std::ios::binary);
    file.write(reinterpret_cast<const char*>(header.data()), static_cast<std::streamsize>(4 * header.size()));
    const CounterRandom random(1, 0);
    for (std::uint64_t i = 0; i < count && file; ++i) {
      if (i % kBetweenLooks == 0 && StopSignals::requested())
        fail(ErrorCode::kState, "stopped by {} before a step was measured", StopSignals::name());
      const auto token = static_cast<std::uint32_t>(random.block(i)[0] % vocabulary);
      file.write(reinterpret_cast<const char*>(&token), wide ? 4 : 2);
    }
    if (!file.flush())
      fail(ErrorCode::kIo,
           "the tokens of the steps ({}) cannot be written to '{}': {}; name another folder by TMPDIR",
           format_size(count * (wide ? 4 : 2)), path(), errno_text(errno));
  }

  std::string folder_;
};

struct StepLimit {
  double compute = 0, optimizer = 0, disk = 0;  // seconds
  double total() const { return std::max(compute + optimizer, disk); }
};

// Returns the limit of a step: arithmetic at the peak rate of products plus memory traffic at full bandwidth,
// without gaps; or the disk's traffic.
StepLimit limit_of(const models::Setup& setup, const engine::MachineRates& rates) {
  const engine::Plan& plan = setup.plan.plan;
  engine::PlanRequest request = setup.settings.plan;
  request.clip = plan.clip;
  const engine::Placement placement(setup.plan.profile, *setup.optimizer, request);
  StepLimit limit;
  for (const engine::Visit& visit : placement.visits(plan.units, plan.group, placement.times(rates))) {
    limit.compute += visit.compute;
    limit.optimizer += visit.before.seconds + visit.after.seconds;
  }
  limit.disk = static_cast<double>(plan.step_bytes_read) / rates.disk_read +
               static_cast<double>(plan.step_bytes_written) / rates.disk_write;
  return limit;
}

struct Steps {
  std::vector<double> seconds;
  double wait = 0, optimizer = 0;  // sums
};

Steps run_steps(models::Setup& setup, double seconds, BenchProgress& progress) {
  Steps steps;
  const Clock::time_point begin = Clock::now();
  const auto passed = [&] { return std::chrono::duration<double>(Clock::now() - begin).count(); };
  models::TrainEvents events;
  events.stop = [&] {
    return StopSignals::requested() || (steps.seconds.size() >= kLeastSteps && passed() >= seconds);
  };
  events.step = [&](const models::StepReport& report) {
    progress.show(fmt::format("step {}: {:.3f} s ({:.0f} of {:.0f} s)", report.step, report.seconds, passed(),
                              std::max(seconds, passed())));
    if (report.step == 1) return;
    steps.seconds.push_back(report.seconds);
    steps.wait += report.read_wait_seconds + report.write_wait_seconds;
    steps.optimizer += report.optimizer_seconds;
  };
  progress.show("taking and filling the model's memory");
  models::RunRanks alone(setup.settings);
  models::TrainingRun run(setup, alone, events);
  run.load_initial();
  run.train();
  return steps;
}

void check_model(const models::TrainSettings& s) {
  if (s.model.empty())
    fail(ErrorCode::kInvalidArgument,
         "say which model: sluice bench step MODEL, a preset or a Hugging Face folder");
  models::check_settings(s);
}

}  // namespace

BenchReport bench_step(const models::TrainSettings& given, double seconds, BenchProgress& progress) {
  check_model(given);
  const StopSignals signals;
  StopSignals::begin_steps();  // earlier measurements have left files
  models::TrainSettings settings = given;
  const models::ModelConfig config = models::resolve_training_model(settings);
  if (settings.length == 0) settings.length = std::min<std::size_t>(config.context, 1024);
  settings.steps = UINT32_MAX;  // until the time is over
  settings.held_out = 0;
  const std::uint64_t step_tokens = settings.batch * settings.accumulate * settings.length;
  RandomTokens tokens(4 * step_tokens + 1, config.vocabulary);
  settings.data = {tokens.path()};
  progress.show("planning");
  models::Setup setup = models::prepare(settings);
  tokens.remove();
  progress.show("measuring what the machine can do");
  engine::Tools& tools = *setup.tools;
  const engine::MachineRates rates = engine::measure_limits(
      tools.threads, *tools.library, settings.dtype,
      setup.plan.plan.uses_disk() ? settings.disk : std::vector<offload::DiskFolder>(), tools.disk_options);
  const Steps steps = run_steps(setup, seconds, progress);
  if (steps.seconds.empty())
    fail(ErrorCode::kState, "stopped by {} before a step was measured", StopSignals::name());

  const StepLimit limit = limit_of(setup, rates);
  const engine::Plan& plan = setup.plan.plan;
  const auto count = static_cast<double>(steps.seconds.size());
  BenchReport report;
  report.bench = "step";
  report.threads = setup.settings.threads;
  report.settings = {{"model", settings.model},
                     {"dtype", name_of(settings.dtype)},
                     {"batch", settings.batch},
                     {"accumulate", settings.accumulate},
                     {"seq", settings.length},
                     {"optimizer", setup.optimizer->settings()},
                     {"bytes_read", plan.step_bytes_read},
                     {"bytes_written", plan.step_bytes_written},
                     {"predicted_peak", plan.peak_memory}};
  const char* bound = limit.disk > limit.compute + limit.optimizer ? "the disk" : "products and memory";
  report.rows.push_back({"step", BenchUnit::kSeconds, median(steps.seconds), limit.total(), bound,
                         Json{{"steps", steps.seconds.size()},
                              {"tokens_per_second", static_cast<double>(step_tokens) / median(steps.seconds)},
                              {"wait_seconds", steps.wait / count},
                              {"optimizer_seconds", steps.optimizer / count},
                              {"limit_compute", limit.compute},
                              {"limit_optimizer", limit.optimizer},
                              {"limit_disk", limit.disk},
                              {"peak_flops", rates.flops},
                              {"peak_memory_bandwidth", rates.memory_bandwidth}}});
  if (plan.uses_disk())
    report.rows.back().more.update(
        {{"peak_disk_read", rates.disk_read}, {"peak_disk_write", rates.disk_write}});
  report.notes.push_back(fmt::format(
      "limit: {:.3f} s for products and loops at {:.0f} GFLOP/s and {:.1f} GB/s, {:.3f} s for the update at "
      "that bandwidth{}",
      limit.compute, rates.flops / 1e9, rates.memory_bandwidth / 1e9, limit.optimizer,
      plan.uses_disk() ? fmt::format("; or {:.3f} s for the disk at {:.2f} GB/s read and {:.2f} GB/s written",
                                     limit.disk, rates.disk_read / 1e9, rates.disk_write / 1e9)
                       : ""));
  report.notes.push_back(
      fmt::format("a step of {} tokens waits {:.3f} s for transfers and updates for {:.3f} s", step_tokens,
                  steps.wait / count, steps.optimizer / count));
  return report;
}

}  // namespace sluice::cli
