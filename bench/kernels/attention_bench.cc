// Measures the rates of attention in GFLOP/s, which count only scores at and below the diagonal, and as a
// share of the best rate of a matrix product, which the same run measures first ("of_matmul").
#include "kernels/attention.h"

#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "kernels/matrix.h"

namespace sluice::kernels {
namespace {

struct Shape {
  const char* name;
  std::size_t batch, length, heads, kv_heads, width;
  float dropout = 0;
  Dtype type = Dtype::kF32;
};
constexpr Shape kShapes[] = {
    {"gpt2-124m", 4, 256, 12, 12, 64},
    {"gpt2-124m", 1, 1024, 12, 12, 64},
    {"gpt2-1.5b", 1, 1024, 25, 25, 64},
    {"gpt2-124m dropout", 4, 256, 12, 12, 64, 0.1f},
    {"gpt2-124m bf16", 4, 256, 12, 12, 64, 0.0f, Dtype::kBf16},
    {"llama-8b", 1, 1024, 32, 8, 128},
    {"tiny", 8, 64, 4, 4, 16},
};

double best_matmul_rate(int cores) {
  const auto library = load_matrix_library(cores);
  constexpr std::size_t kSize = 1024;
  const std::vector<float> a(kSize * kSize, 0.5f), b(kSize * kSize, 0.25f);
  std::vector<float> c(kSize * kSize);
  Product p;
  p.m = p.n = p.k = p.lda = p.ldb = p.ldc = kSize;
  p.a.data = a.data(), p.b.data = b.data(), p.c.data = c.data();
  double best = 0;
  for (int i = 0; i < 20; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    library->multiply_f32(p);
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - begin;
    best = std::max(best, 2e-9 * kSize * kSize * kSize / time.count());
  }
  return best;
}

struct Arrays {
  AttentionShape s;
  Dtype type;
  std::vector<std::byte> qkv, dqkv, out, dout, workspace;
  std::vector<float> log_sum;

  Arrays(const Shape& shape, int threads) : type(shape.type) {
    s.batch = shape.batch, s.length = shape.length, s.heads = shape.heads, s.kv_heads = shape.kv_heads;
    s.head_width = shape.width, s.dropout = shape.dropout;
    s.scale = 1.0f / std::sqrt(static_cast<float>(s.head_width));
    s.q_stride = s.k_stride = s.v_stride = (s.heads + 2 * s.kv_heads) * s.head_width;
    const std::size_t tokens = s.batch * s.length;
    for (auto* bytes : {&qkv, &dqkv}) *bytes = filled(tokens * s.q_stride);
    for (auto* bytes : {&out, &dout}) *bytes = filled(tokens * s.heads * s.head_width);
    log_sum.resize(tokens * s.heads);
    workspace.resize(
        std::max(attention_forward_workspace(s, threads), attention_backward_workspace(s, threads)));
  }
  std::vector<std::byte> filled(std::size_t elements) const {
    std::vector<std::byte> bytes(elements * size_of(type));
    for (std::size_t i = 0; i < elements; ++i) {
      const float value = static_cast<float>(i * 7 % 31) * 0.1f - 1.5f;
      if (type == Dtype::kF32)
        reinterpret_cast<float*>(bytes.data())[i] = value;
      else
        reinterpret_cast<Bf16*>(bytes.data())[i] = to_bf16(value);
    }
    return bytes;
  }
  std::size_t k_at() const { return s.heads * s.head_width; }
  std::size_t v_at() const { return k_at() + s.kv_heads * s.head_width; }

  void forward(Threads& threads) {
    const ConstArray q{qkv.data(), type};
    attention_forward(threads, s, q, q.at(k_at()), q.at(v_at()), {out.data(), type}, log_sum.data(),
                      workspace.data());
  }
  void backward(Threads& threads) {
    const ConstArray q{qkv.data(), type};
    const Array dq{dqkv.data(), type};
    attention_backward(threads, s, q, q.at(k_at()), q.at(v_at()), {out.data(), type}, log_sum.data(),
                       {dout.data(), type}, dq, dq.at(k_at()), dq.at(v_at()), workspace.data());
  }
  // The operations of one product of scores with rows of a head. Forward has two of these, backward five.
  double product_gflop() const {
    return 1e-9 * static_cast<double>(s.batch * s.heads * s.length * (s.length + 1) * s.head_width);
  }
};

void count_rate(benchmark::State& state, double gflop, double matmul_rate) {
  state.counters["GFLOP/s"] = benchmark::Counter(gflop, benchmark::Counter::kIsIterationInvariantRate);
  state.counters["of_matmul"] =
      benchmark::Counter(gflop / matmul_rate, benchmark::Counter::kIsIterationInvariantRate);
}

void decode_bench(benchmark::State& state, Threads& threads, const Shape& shape) {
  Arrays arrays(shape, threads.count());
  const ConstArray q{arrays.qkv.data(), arrays.type};
  for (auto _ : state)
    attention_decode(threads, arrays.s, arrays.s.length, q, q.at(arrays.k_at()), q.at(arrays.v_at()),
                     {arrays.out.data(), arrays.type});
  const AttentionShape& s = arrays.s;
  const double bytes =
      static_cast<double>(2 * s.batch * s.length * s.kv_heads * s.head_width * size_of(arrays.type));
  state.counters["GB/s"] = benchmark::Counter(bytes * 1e-9, benchmark::Counter::kIsIterationInvariantRate);
}

void register_benches(Threads& threads, double matmul_rate) {
  for (const Shape& shape : kShapes) {
    const std::string suffix = std::string("/") + shape.name + "/" + std::to_string(shape.batch) + "x" +
                               std::to_string(shape.length);
    const auto add = [&](const std::string& name, auto body) {
      benchmark::RegisterBenchmark((name + suffix).c_str(), body)
          ->UseRealTime()
          ->Unit(benchmark::kMillisecond);
    };
    add("forward", [&, matmul_rate](benchmark::State& state) {
      Arrays arrays(shape, threads.count());
      for (auto _ : state) arrays.forward(threads);
      count_rate(state, 2 * arrays.product_gflop(), matmul_rate);
    });
    add("backward", [&, matmul_rate](benchmark::State& state) {
      Arrays arrays(shape, threads.count());
      arrays.forward(threads);
      for (auto _ : state) arrays.backward(threads);
      count_rate(state, 5 * arrays.product_gflop(), matmul_rate);
    });
    if (shape.dropout == 0)
      add("decode", [&](benchmark::State& state) { decode_bench(state, threads, shape); });
  }
}

}  // namespace
}  // namespace sluice::kernels

int main(int count, char** arguments) {
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  const double matmul_rate = sluice::kernels::best_matmul_rate(cores);
  std::printf("best matrix product: %.1f GFLOP/s with %d threads\n", matmul_rate, cores);
  sluice::Threads threads(cores);
  sluice::kernels::register_benches(threads, matmul_rate);
  benchmark::Initialize(&count, arguments);
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
