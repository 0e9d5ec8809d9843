#include "kernels/elementwise.h"

#include <benchmark/benchmark.h>

#include <vector>

#include "kernels/loss.h"
#include "kernels/norm.h"
#include "kernels/reduce.h"

// The rates count each array once as it is read or written, at 2 threads.
namespace sluice::kernels {
namespace {

constexpr std::size_t kCount = std::size_t{16} << 20;
constexpr std::size_t kWidth = 1024;

struct Arrays {
  Threads threads{2};
  Dtype type;
  std::vector<float> a, b, c, d, e;
  explicit Arrays(Dtype of_type) : type(of_type), a(kCount), b(kCount), c(kCount), d(kCount), e(kCount) {
    fill_normal(threads, kCount, 1, 1, 0, 0, 1, x());
    fill_normal(threads, kCount, 1, 2, 0, 0, 1, dy());
  }
  Array x() { return {a.data(), type}; }
  Array dy() { return {b.data(), type}; }
  Array y() { return {c.data(), type}; }
  Array u() { return {d.data(), type}; }
  Array v() { return {e.data(), type}; }
};

template <class Run>
void measure(benchmark::State& state, std::size_t arrays, Run run) {
  Arrays data(state.range(0) == 0 ? Dtype::kF32 : Dtype::kBf16);
  run(data);
  for (auto _ : state) run(data);
  const double bytes = static_cast<double>(state.iterations() * arrays * kCount * size_of(data.type));
  state.counters["B/s"] = benchmark::Counter(bytes, benchmark::Counter::kIsRate);
}

void bench_add(benchmark::State& state) {
  measure(state, 3, [](Arrays& a) { add(a.threads, kCount, a.x(), a.dy(), a.y()); });
}
void bench_gelu_forward(benchmark::State& state) {
  measure(state, 2, [](Arrays& a) { gelu_forward(a.threads, kCount, a.x(), a.y()); });
}
void bench_gelu_backward(benchmark::State& state) {
  measure(state, 3, [](Arrays& a) { gelu_backward(a.threads, kCount, a.x(), a.dy(), a.y()); });
}
void bench_swiglu_backward(benchmark::State& state) {
  measure(state, 5,
          [](Arrays& a) { swiglu_backward(a.threads, kCount, a.x(), a.dy(), a.dy(), a.u(), a.v()); });
}
void bench_dropout_add(benchmark::State& state) {
  measure(state, 3, [](Arrays& a) { dropout_add(a.threads, kCount, a.x(), a.dy(), 0.1f, 1, 2, 3, a.y()); });
}
void bench_fill_normal(benchmark::State& state) {
  measure(state, 1, [](Arrays& a) { fill_normal(a.threads, kCount, 1, 2, 0, 0, 1, a.y()); });
}
void bench_sum_of_squares(benchmark::State& state) {
  measure(state, 1,
          [](Arrays& a) { benchmark::DoNotOptimize(sum_of_squares(a.threads, kCount, a.x()).sum); });
}
void bench_layernorm_forward(benchmark::State& state) {
  std::vector<float> statistics(2 * kCount / kWidth);
  measure(state, 2, [&](Arrays& a) {
    layernorm_forward(a.threads, kCount / kWidth, kWidth, a.x(), a.dy(), a.dy(), 1e-5f, a.y(),
                      statistics.data());
  });
}
void bench_layernorm_backward(benchmark::State& state) {
  std::vector<float> statistics(2 * kCount / kWidth, 0.5f), sums(2 * kWidth);
  std::vector<float> workspace(norm_backward_workspace(kCount / kWidth, kWidth) / sizeof(float));
  measure(state, 3, [&](Arrays& a) {
    layernorm_backward(a.threads, kCount / kWidth, kWidth, a.x(), a.dy(), statistics.data(), a.dy(), a.y(),
                       sums.data(), sums.data() + kWidth, false, workspace.data());
  });
}
void bench_cross_entropy(benchmark::State& state) {
  constexpr std::size_t kClasses = 50257, kRows = kCount / kClasses;
  const std::vector<std::int32_t> targets(kRows, 7);
  std::vector<float> losses(kRows);
  measure(state, 2, [&](Arrays& a) {
    cross_entropy(a.threads, kClasses, targets, a.a.data(), true, 1e-3f, losses.data());
  });
}

#define BOTH_TYPES(function) BENCHMARK(function)->ArgName("bf16")->Arg(0)->Arg(1)->UseRealTime()
BOTH_TYPES(bench_add);
BOTH_TYPES(bench_gelu_forward);
BOTH_TYPES(bench_gelu_backward);
BOTH_TYPES(bench_swiglu_backward);
BOTH_TYPES(bench_dropout_add);
BOTH_TYPES(bench_fill_normal);
BOTH_TYPES(bench_sum_of_squares);
BOTH_TYPES(bench_layernorm_forward);
BOTH_TYPES(bench_layernorm_backward);
BENCHMARK(bench_cross_entropy)->ArgName("bf16")->Arg(0)->UseRealTime();

}  // namespace
}  // namespace sluice::kernels

BENCHMARK_MAIN();
