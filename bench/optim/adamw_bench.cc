#include <benchmark/benchmark.h>

#include <memory>

#include "kernels/elementwise.h"
#include "optim/optimizer.h"

namespace sluice::optim {
namespace {

constexpr std::size_t kParameters = std::size_t{64} << 20;

std::unique_ptr<float[]> zeros(std::size_t count) { return std::make_unique<float[]>(count); }

// gradient: f32 or bf16; narrow: whether a bf16 parameter is written too. The rate is that of parameters.
void adamw(benchmark::State& state, Dtype gradient_type, bool narrow) {
  Threads threads(static_cast<int>(state.range(0)));
  const auto optimizer = make_adamw({});
  const auto master = zeros(kParameters), first = zeros(kParameters), second = zeros(kParameters);
  const auto gradient = zeros(kParameters), compute = zeros(narrow ? kParameters / 2 : 1);
  kernels::fill_normal(threads, kParameters, 1, 1, 0, 0, 0.02f, Array{master.get()});
  kernels::fill_normal(threads, kParameters, 1, 2, 0, 0, 0.01f, Array{gradient.get(), gradient_type});
  const Span span{.count = kParameters,
                  .first_index = 0,
                  .master = master.get(),
                  .parameter = narrow ? Array{compute.get(), Dtype::kBf16} : Array{},
                  .gradient = ConstArray{gradient.get(), gradient_type},
                  .state = {{Array{first.get()}}, {Array{second.get()}}}};
  Hyperparameters hyperparameters{
      .learning_rate = 1e-3, .weight_decay = 0.1, .gradient_factor = 1, .step = 0};
  for (auto _ : state) {
    ++hyperparameters.step;
    optimizer->apply(threads, hyperparameters, span);
  }
  const double bytes = 24 + static_cast<double>(size_of(gradient_type)) + (narrow ? 2 : 0);
  const double parameters = static_cast<double>(state.iterations()) * kParameters;
  state.counters["param/s"] = benchmark::Counter(parameters, benchmark::Counter::kIsRate);
  state.counters["B/s"] = benchmark::Counter(parameters * bytes, benchmark::Counter::kIsRate);
}

// State in codes, of a bf16 parameter with a master or without one, or of an f32 parameter.
void adamw_8bit(benchmark::State& state, bool master, bool narrow) {
  Threads threads(static_cast<int>(state.range(0)));
  const auto optimizer = make_adamw({.storage = {Dtype::kU8, master || !narrow}});
  const auto wide = zeros(master || !narrow ? kParameters : 1), compute = zeros(narrow ? kParameters / 2 : 1);
  const auto codes = zeros(kParameters / 2), scales = zeros(2 * kParameters / kScaleBlock);
  const auto gradient = zeros(kParameters);
  auto* const first = reinterpret_cast<std::uint8_t*>(codes.get());
  const Dtype gradient_type = narrow ? Dtype::kBf16 : Dtype::kF32;
  kernels::fill_normal(threads, kParameters, 1, 2, 0, 0, 0.01f, Array{gradient.get(), gradient_type});
  const Span span{
      .count = kParameters,
      .master = master || !narrow ? wide.get() : nullptr,
      .parameter = narrow ? Array{compute.get(), Dtype::kBf16} : Array{},
      .gradient = ConstArray{gradient.get(), gradient_type},
      .state = {{Array{first, Dtype::kU8}, scales.get()},
                {Array{first + kParameters, Dtype::kU8}, scales.get() + kParameters / kScaleBlock}}};
  Hyperparameters hyperparameters{
      .learning_rate = 1e-3, .weight_decay = 0.1, .gradient_factor = 1, .step = 0};
  for (auto _ : state) {
    ++hyperparameters.step;
    optimizer->apply(threads, hyperparameters, span);
  }
  const double bytes = static_cast<double>(size_of(gradient_type)) + (span.master != nullptr ? 8 : 2) +
                       (narrow ? 2 : 0) + 4 * (1 + 4.0 / kScaleBlock);
  const double parameters = static_cast<double>(state.iterations()) * kParameters;
  state.counters["param/s"] = benchmark::Counter(parameters, benchmark::Counter::kIsRate);
  state.counters["B/s"] = benchmark::Counter(parameters * bytes, benchmark::Counter::kIsRate);
}

// a = b + s * c over the same memory: what the machine's memory can do.
void triad(benchmark::State& state) {
  Threads threads(static_cast<int>(state.range(0)));
  const auto a = zeros(kParameters), b = zeros(kParameters), c = zeros(kParameters);
  for (std::size_t i = 0; i < kParameters; ++i) b[i] = c[i] = 1;
  for (auto _ : state)
    threads.parallel_for(kParameters, std::size_t{32} << 10, [&](std::size_t begin, std::size_t end) {
      for (std::size_t i = begin; i < end; ++i) a[i] = b[i] + 3.0f * c[i];
    });
  // Read b, c and, as a cache line is fetched before it is written, a.
  const double bytes = static_cast<double>(state.iterations()) * kParameters * 16;
  state.counters["B/s"] = benchmark::Counter(bytes, benchmark::Counter::kIsRate);
}

BENCHMARK_CAPTURE(adamw_8bit, f32, true, false)->Arg(1)->Arg(2)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(adamw_8bit, bf16_with_master, true, true)
    ->Arg(1)
    ->Arg(2)
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(adamw_8bit, bf16, false, true)
    ->Arg(1)
    ->Arg(2)
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);
BENCHMARK(triad)->Arg(1)->Arg(2)->UseRealTime()->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(adamw, f32, Dtype::kF32, false)
    ->Arg(1)
    ->Arg(2)
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(adamw, bf16, Dtype::kBf16, true)
    ->Arg(1)
    ->Arg(2)
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace sluice::optim

BENCHMARK_MAIN();
