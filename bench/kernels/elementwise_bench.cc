#include "kernels/elementwise.h"

#include <benchmark/benchmark.h>

#include <vector>

#include "kernels/loss.h"
#include "kernels/norm.h"
#include "kernels/reduce.h"

// Measures rates with 2 threads. They count each array once, as it is read or written.
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
  Arrays data(static_cast<Dtype>(state.range(0)));
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
          [](Arrays& a) { benchmark::DoNotOptimize(sum_of_squares(a.threads, 0, kCount, a.x()).finite); });
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

// The types are 0 for f32, 1 for bf16 and 2 for f16.
#define EVERY_TYPE(function) BENCHMARK(function)->ArgName("type")->DenseRange(0, 2)->UseRealTime()
EVERY_TYPE(bench_add);
EVERY_TYPE(bench_gelu_forward);
EVERY_TYPE(bench_gelu_backward);
EVERY_TYPE(bench_swiglu_backward);
EVERY_TYPE(bench_dropout_add);
EVERY_TYPE(bench_fill_normal);
EVERY_TYPE(bench_sum_of_squares);
EVERY_TYPE(bench_layernorm_forward);
EVERY_TYPE(bench_layernorm_backward);
BENCHMARK(bench_cross_entropy)->ArgName("type")->Arg(0)->UseRealTime();

}  // namespace
}  // namespace sluice::kernels

BENCHMARK_MAIN();
