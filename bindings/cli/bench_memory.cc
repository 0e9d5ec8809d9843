#include <algorithm>
#include <chrono>

#include "allocator/memory.h"
#include "bindings/cli/bench.h"
#include "core/bytes.h"
#include "core/checksum.h"
#include "core/error.h"
#include "engine/store/state_format.h"
#include "kernels/elementwise.h"
#include "kernels/limits.h"
#include "kernels/reduce.h"
#include "models/training_setup.h"

// `bench copy` and `bench optimizer`: loops that are bound by memory, against loops that only move the same
// bytes.
namespace sluice::cli {
namespace {

using Clock = std::chrono::steady_clock;
using kernels::MemoryStream;
using Touch = MemoryStream::Touch;

// Of f32 and of anything narrower a whole number of pieces.
constexpr std::size_t kElementGrain = 64 * kernels::kStreamPieces;
static_assert(kElementGrain % engine::kShardAlignment == 0);
constexpr double kLeastRound = 0.05;  // seconds: shorter ones measure the clock and the waking of threads

std::size_t bytes_moved(const std::vector<MemoryStream>& streams) {
  std::size_t bytes = 0;
  for (const MemoryStream& stream : streams) bytes += stream.moved();
  return bytes;
}

// A round of the work: as many calls as take a while. Bytes per second.
template <class Call>
double rate_of(std::size_t bytes, const Call& call) {
  const Clock::time_point begin = Clock::now();
  double seconds = 0;
  std::size_t calls = 0;
  do {
    call();
    ++calls;
    seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  } while (seconds < kLeastRound);
  return static_cast<double>(bytes * calls) / seconds;
}

// Works that are measured together, each with its limit, the better of both kinds of stores.
class MemoryBench {
 public:
  MemoryBench(Threads& threads, BenchReport& report) : threads_(threads), report_(report) {}

  template <class Call>
  void add(const std::string& name, std::vector<MemoryStream> streams, const Call& call) {
    const std::size_t bytes = bytes_moved(streams);
    works_.push_back({name, [=] { return std::vector<double>{rate_of(bytes, call)}; }});
    works_.push_back({name + ", limit", [this, streams, bytes] {
                        return std::vector<double>{limit(streams, bytes, kernels::Stores::kPlain),
                                                   limit(streams, bytes, kernels::Stores::kPastCaches)};
                      }});
    streams_.push_back(std::move(streams));
  }

  void measure(double seconds, BenchProgress& progress) {
    const auto found = medians_in_turn(works_, seconds, progress);
    for (std::size_t i = 0; i < streams_.size(); ++i) {
      const auto count = [&](Touch touch) {
        return std::count_if(streams_[i].begin(), streams_[i].end(),
                             [&](const MemoryStream& s) { return s.touch == touch; });
      };
      const auto reads = count(Touch::kRead), writes = count(Touch::kWrite), updates = count(Touch::kUpdate);
      report_.rows.push_back({works_[2 * i].name, BenchUnit::kBytesPerSecond, found[2 * i][0],
                              *std::ranges::max_element(found[2 * i + 1]),
                              fmt::format("{} streams read, {} written", reads + updates, writes + updates)});
    }
  }

 private:
  double limit(const std::vector<MemoryStream>& streams, std::size_t bytes, kernels::Stores stores) {
    return rate_of(bytes, [&] { kernels::go_through(threads_, streams, stores); });
  }

  Threads& threads_;
  BenchReport& report_;
  std::vector<BenchWork> works_;
  std::vector<std::vector<MemoryStream>> streams_;
};

int thread_count(const BenchOptions& options) {
  return options.threads == 0 ? models::default_threads() : options.threads;
}

// What one optimizer works on, in one memory.
class OptimizerTrial {
 public:
  OptimizerTrial(Threads& threads, const optim::OptimizerSettings& settings, Dtype dtype,
                 std::size_t elements)
      : optimizer_(models::make_training_optimizer(settings)),
        layout_(layout_of(dtype, elements)),
        format_(layout_, *optimizer_, layout_.unit_elements(0)),
        dtype_(dtype),
        elements_(elements),
        memory_(ledger_, allocator::Purpose::kOptimizerState, bytes(*optimizer_, dtype, elements)) {
    std::byte* const begin = memory_.data();
    std::byte* const gradient = begin + elements * size_of(dtype);
    state_ = gradient + elements * size_of(dtype);
    span_.count = elements;
    const Array parameter{begin, dtype};
    if (dtype != Dtype::kF32) span_.parameter = parameter;
    if (format_.has_master(0))
      span_.master = part(0).values.f32();
    else if (dtype == Dtype::kF32)
      span_.master = parameter.f32();
    span_.gradient = {gradient, dtype};
    for (std::size_t a = format_.masters(); a < format_.arrays(); ++a) span_.state.push_back(part(a));
    kernels::fill_normal(threads, elements, 1, 1, 0, 0, 0.02f, parameter);
    kernels::fill_normal(threads, elements, 1, 2, 0, 0, 0.01f, Array{gradient, dtype});
    if (format_.has_master(0)) kernels::convert(threads, elements, parameter, part(0).values);
    streams_ = {{begin, elements * size_of(dtype), format_.has_master(0) ? Touch::kWrite : Touch::kUpdate},
                {gradient, elements * size_of(dtype), Touch::kRead}};
    for (std::size_t a = 0; a < format_.arrays(); ++a) {  // without the scales of codes, a 64th of them
      const Array array = part(a).values;
      streams_.push_back(
          {static_cast<std::byte*>(array.data), elements * size_of(array.type), Touch::kUpdate});
    }
  }

  static std::size_t bytes(const optim::Optimizer& optimizer, Dtype dtype, std::size_t elements) {
    const engine::Layout layout = layout_of(dtype, elements);
    return 2 * elements * size_of(dtype) +
           engine::StateFormat(layout, optimizer, layout.unit_elements(0)).bytes(0);
  }
  const std::vector<MemoryStream>& streams() const { return streams_; }
  void apply(Threads& threads) {
    ++hyperparameters_.step;
    optimizer_->apply(threads, hyperparameters_, span_);
  }

 private:
  static engine::Layout layout_of(Dtype dtype, std::size_t elements) {
    engine::UnitSpec unit{"unit", {{"parameter", {elements}}}};
    unit.dtype = dtype;
    return engine::Layout({unit});
  }
  optim::StatePart part(std::size_t index) const { return format_.part(state_, 0, 0, index); }

  std::unique_ptr<optim::Optimizer> optimizer_;
  engine::Layout layout_;
  engine::StateFormat format_;
  Dtype dtype_;
  std::size_t elements_;
  allocator::Ledger ledger_;
  allocator::Region memory_;
  std::byte* state_ = nullptr;
  optim::Span span_;
  std::vector<MemoryStream> streams_;
  optim::Hyperparameters hyperparameters_{1e-3, 0.1, 1, 0};
};

struct Combination {
  Dtype dtype, state;
  bool master;
};

// Those that differ: f32 parameters are their own masters, and those of f16 need some.
std::vector<Combination> combinations(const BenchOptions& options) {
  std::vector<Combination> all;
  const auto optimizer = models::make_training_optimizer({.name = options.optimizer});
  if (optimizer->rounds() > 0)
    fail(ErrorCode::kInvalidArgument,
         "{} goes over a gradient several times, and no copy of its bytes is its limit; measure it with "
         "sluice bench "
         "step",
         options.optimizer);
  for (const char* dtype : {"f32", "bf16", "f16"})
    for (const std::string& state : optim::state_type_names())
      for (const char* master : {"f32", "none"}) {
        const bool asked = (!options.dtype || *options.dtype == dtype) &&
                           (!options.state || *options.state == state) &&
                           (!options.master || *options.master == master);
        const bool own_master = std::string(dtype) != "bf16" && std::string(master) == "none";
        const bool no_state = optimizer->state().empty() && state != "f32";
        if (asked && !own_master && !no_state)
          all.push_back(
              {*dtype_from_name(dtype), *optim::state_type_from_name(state), std::string(master) == "f32"});
      }
  if (all.empty())
    fail(ErrorCode::kInvalidArgument,
         "--master none is for parameters in bf16: f32 ones are their own masters, and f16 ones need theirs; "
         "give "
         "--dtype bf16, or leave --master out");
  return all;
}

std::string name_of(const std::string& optimizer, const Combination& c) {
  return fmt::format("{} {}, state {}{}", optimizer, sluice::name_of(c.dtype),
                     optim::state_type_name(c.state),
                     c.dtype == Dtype::kF32 ? ""
                     : c.master             ? ", master f32"
                                            : ", no master");
}

}  // namespace

BenchReport bench_copy(const BenchOptions& options, BenchProgress& progress) {
  const std::uint64_t size = options.size == 0 ? 256 * kMiB : options.size;
  const std::size_t elements = round_up(divide_up(size, sizeof(float)), kElementGrain);
  const std::size_t bytes = elements * sizeof(float);
  require_free_memory(2 * bytes, "give a smaller --size");
  BenchReport report;
  report.bench = "copy";
  report.threads = thread_count(options);
  report.settings = {{"bytes", bytes}};
  Threads threads(report.threads);
  allocator::Ledger ledger;
  const allocator::Region memory(ledger, allocator::Purpose::kWorkspace, 2 * bytes);
  std::byte *const from = memory.data(), *const to = from + bytes;
  const Array wide{from, Dtype::kF32}, other{to, Dtype::kF32}, narrow{to, Dtype::kBf16},
      half{to, Dtype::kF16};
  MemoryBench bench(threads, report);
  bench.add("copy of f32", {{from, bytes, Touch::kRead}, {to, bytes, Touch::kWrite}},
            [&threads, elements, wide, other] { kernels::convert(threads, elements, wide, other); });
  bench.add("f32 to bf16", {{from, bytes, Touch::kRead}, {to, bytes / 2, Touch::kWrite}},
            [&threads, elements, wide, narrow] { kernels::convert(threads, elements, wide, narrow); });
  bench.add("bf16 to f32", {{to, bytes / 2, Touch::kRead}, {from, bytes, Touch::kWrite}},
            [&threads, elements, wide, narrow] { kernels::convert(threads, elements, narrow, wide); });
  bench.add("f32 to f16", {{from, bytes, Touch::kRead}, {to, bytes / 2, Touch::kWrite}},
            [&threads, elements, wide, half] { kernels::convert(threads, elements, wide, half); });
  bench.add("f16 to f32", {{to, bytes / 2, Touch::kRead}, {from, bytes, Touch::kWrite}},
            [&threads, elements, wide, half] { kernels::convert(threads, elements, half, wide); });
  bench.add("sum into", {{from, bytes, Touch::kUpdate}, {to, bytes, Touch::kRead}},
            [&threads, elements, wide, other] { kernels::add(threads, elements, wide, other, wide); });
  bench.add("squares", {{from, bytes, Touch::kRead}},
            [&threads, elements, wide] { kernels::sum_of_squares(threads, elements, wide); });
  bench.measure(options.seconds, progress);
  return report;
}

BenchReport bench_optimizer(const BenchOptions& options, BenchProgress& progress) {
  if (options.elements == 0)
    fail(ErrorCode::kInvalidArgument, "--elements: 0 elements leave nothing to measure");
  if (options.elements > std::uint64_t{1} << 40)
    fail(ErrorCode::kInvalidArgument, "--elements: {} are more than any machine holds", options.elements);
  const std::size_t elements = round_up(options.elements, kElementGrain);
  BenchReport report;
  report.bench = "optimizer";
  report.threads = thread_count(options);
  report.settings = {{"optimizer", options.optimizer}, {"elements", elements}};
  Threads threads(report.threads);
  const std::vector<Combination> all = combinations(options);
  for (const Combination& c : all) {
    optim::OptimizerSettings settings;
    settings.name = options.optimizer;
    settings.storage = {c.state, c.master, 1};
    const std::size_t needed =
        OptimizerTrial::bytes(*models::make_training_optimizer(settings), c.dtype, elements);
    require_free_memory(needed, "give fewer --elements");
    OptimizerTrial trial(threads, settings, c.dtype, elements);
    MemoryBench bench(threads, report);
    bench.add(name_of(options.optimizer, c), trial.streams(), [&] { trial.apply(threads); });
    bench.measure(options.seconds / static_cast<double>(all.size()), progress);
    BenchRow& row = report.rows.back();
    const double moved = static_cast<double>(bytes_moved(trial.streams())) / static_cast<double>(elements);
    row.more = {{"elements_per_second", row.reached / moved}, {"bytes_per_element", moved}};
  }
  return report;
}

}  // namespace sluice::cli
