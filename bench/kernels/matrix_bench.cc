// Measures the rates of a training step's matrix products in GFLOP/s. With --hidden [THREADS] it measures
// instead the memory that the library takes beyond its operands, over many shapes. With --ways MODEL
// [THREADS] it measures instead both ways in which the library can compute the f32 products of a model's step
// (MODEL is one of kModels below). The rule in kernels/README.md follows from that.
#include "kernels/matrix.h"

#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/bytes.h"

namespace sluice::kernels {
namespace {

struct Shape {
  const char* name;
  std::size_t m, n, k;
  bool transpose_a, transpose_b, accumulate, bias;
};
constexpr Shape kShapes[] = {
    {"forward", 1024, 2304, 768, false, true, false, true},
    {"forward", 1024, 3072, 768, false, true, false, true},
    {"forward", 1024, 768, 3072, false, true, false, true},
    {"forward NN", 1024, 3072, 768, false, false, false, false},
    {"dX", 1024, 768, 3072, false, false, false, false},
    {"dX", 1024, 3072, 768, false, false, false, false},
    {"dW", 3072, 768, 1024, true, false, true, false},
    {"dW", 768, 3072, 1024, true, false, true, false},
    {"head", 256, 50257, 768, false, true, false, false},
    {"head dX", 256, 768, 50257, false, false, false, false},
    {"head dW", 50257, 768, 256, true, false, true, false},
    {"1.5b", 128, 6400, 1600, false, true, false, false},
    {"1.5b dW", 6400, 1600, 128, true, false, true, false},
    {"one row", 1, 3072, 768, false, true, false, false},
};

struct Operands {
  std::vector<std::byte> a, b, c, bias, workspace;
  Product product;

  Operands(const Shape& s, Dtype type, const MatrixLibrary& library)
      : a(filled(s.m * s.k, type)),
        b(filled(s.k * s.n, type)),
        c(filled(s.m * s.n, type)),
        bias(filled(s.n, type)) {
    product.m = s.m, product.n = s.n, product.k = s.k;
    product.a = {a.data(), type};
    product.b = {b.data(), type};
    product.c = {c.data(), type};
    product.transpose_a = s.transpose_a, product.transpose_b = s.transpose_b,
    product.accumulate = s.accumulate;
    if (s.bias) product.bias = bias.data();
    workspace.resize(product_workspace(product, library));
  }
  static std::vector<std::byte> filled(std::size_t elements, Dtype type) {
    std::vector<std::byte> bytes(elements * size_of(type));
    for (std::size_t i = 0; i < elements; ++i) {
      const float value = static_cast<float>(i % 31) * 0.01f;
      const Array array{bytes.data(), type};
      if (type == Dtype::kF32)
        array.f32()[i] = value;
      else if (type == Dtype::kBf16)
        array.bf16()[i] = to_bf16(value);
      else
        array.f16()[i] = to_f16(value);
    }
    return bytes;
  }
};

void multiply_bench(benchmark::State& state, MatrixLibrary& library, Threads& threads, const Shape& shape,
                    Dtype type) {
  Operands operands(shape, type, library);
  for (auto _ : state) multiply(library, threads, operands.product, operands.workspace.data());
  state.counters["GFLOP/s"] = benchmark::Counter(2e-9 * static_cast<double>(shape.m * shape.n * shape.k),
                                                 benchmark::Counter::kIsIterationInvariantRate);
}

// Returns a value of /proc/self/status, such as "VmHWM", in bytes.
std::size_t status_bytes(const std::string& name) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with(name + ":")) return std::stoul(line.substr(name.size() + 1)) * kKiB;
  return 0;
}

constexpr std::size_t kHiddenElements = std::size_t{24} << 20;

// Makes products of many shapes, shuffled.
std::vector<Product> hidden_products() {
  constexpr std::size_t kSizes[] = {1, 16, 100, 768, 1024, 3072, 6000, 50257};
  std::vector<Product> products;
  for (const std::size_t m : kSizes)
    for (const std::size_t n : kSizes)
      for (const std::size_t k : kSizes)
        for (int transposes = 0; transposes < 4; ++transposes) {
          if (std::max({m * n, m * k, n * k}) > kHiddenElements || m * n * k > (std::size_t{1} << 32))
            continue;
          Product p;
          p.m = m, p.n = n, p.k = k;
          p.transpose_a = transposes & 1, p.transpose_b = transposes & 2;
          products.push_back(p);
        }
  std::shuffle(products.begin(), products.end(), std::mt19937(1));
  return products;
}

// Prints how much the peak resident set grows over f32 products whose operands are resident before.
void measure_hidden(int count) {
  const std::vector<float> a(kHiddenElements, 0.5f), b(kHiddenElements, 0.25f);
  std::vector<float> c(kHiddenElements, 0.0f);
  Threads threads(1);
  const std::size_t before = status_bytes("VmRSS");
  const auto library = load_matrix_library(count);
  ProductSurvey survey(*library);
  std::vector<std::byte> workspace;
  for (Product& p : hidden_products()) {
    if (const std::size_t bytes = survey.workspace(p); bytes > workspace.size()) workspace.resize(bytes);
    p.a.data = a.data(), p.b.data = b.data(), p.c.data = c.data();
    multiply(*library, threads, p, workspace.data());
  }
  std::printf("%d threads: %zu KiB, stated %zu KiB\n", count,
              (status_bytes("VmHWM") - before - workspace.size()) / kKiB, survey.hidden_bytes() / kKiB);
}

struct ModelSizes {
  const char* name;
  std::size_t width, qkv, inner, vocabulary;
  bool transposed;  // weights are [out, in]
};
constexpr ModelSizes kModels[] = {{"gpt2-124m", 768, 2304, 3072, 50257, false},
                                  {"gpt2-355m", 1024, 3072, 4096, 50257, false},
                                  {"gpt2-1.5b", 1600, 4800, 6400, 50257, false},
                                  {"llama-1b", 2048, 2560, 5632, 32000, true},
                                  {"llama-8b", 4096, 6144, 14336, 128256, true}};

std::vector<Shape> step_products(const ModelSizes& model, std::size_t m) {
  std::vector<Shape> shapes;
  const auto add = [&](const char* name, std::size_t rows, std::size_t in, std::size_t out, bool transposed) {
    shapes.push_back({name, rows, out, in, false, transposed, false, false});
    shapes.push_back({name, rows, in, out, false, !transposed, false, false});
    shapes.push_back({name, transposed ? out : in, transposed ? in : out, rows, true, false, true, false});
  };
  add("qkv", m, model.width, model.qkv, model.transposed);
  add("proj", m, model.width, model.width, model.transposed);
  add("up", m, model.width, model.inner, model.transposed);
  add("down", m, model.inner, model.width, model.transposed);
  add("head", std::min<std::size_t>(m, 352), model.width, model.vocabulary, true);
  return shapes;
}

// Returns the GFLOP/s of the best of some rounds.
template <class Work>
double best_rate(const Product& p, const Work& work) {
  constexpr int kRounds = 6;
  double best = 0;
  for (int round = 0; round < kRounds; ++round) {
    const auto begin = std::chrono::steady_clock::now();
    work();
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    best = std::max(best, 2e-9 * static_cast<double>(p.m * p.n * p.k) / seconds.count());
  }
  return best;
}

void compare_ways(const std::string& name, int threads) {
  const auto library = load_matrix_library(threads);
  for (const ModelSizes& model : kModels) {
    if (name != model.name) continue;
    for (const std::size_t m : {1, 16, 64, 128, 256, 512, 1024, 4096})
      for (const Shape& shape : step_products(model, m)) {
        Operands operands(shape, Dtype::kF32, *library);
        const Product& p = operands.product;
        operands.workspace.resize(library->primitive_workspace(p));
        const double sgemm = best_rate(p, [&] { library->multiply_f32(p); });
        const double primitive =
            best_rate(p, [&] { library->multiply_by_primitive(p, operands.workspace.data()); });
        std::printf("%-5s %5zu x %6zu x %6zu %s%s  sgemm %6.1f  primitive %6.1f  %.2f%s\n", shape.name, p.m,
                    p.n, p.k, p.transpose_a ? "A'" : "A ", p.transpose_b ? "B'" : "B ", sgemm, primitive,
                    primitive / sgemm, library->has_primitive(p) ? "  by rule" : "");
        std::fflush(stdout);
      }
  }
}

void register_benches(MatrixLibrary& library, Threads& threads) {
  for (const Dtype type : {Dtype::kF32, Dtype::kBf16, Dtype::kF16})
    for (const Shape& s : kShapes) {
      const std::string name = std::string(name_of(type)) + "/" + s.name + "/" + std::to_string(s.m) + "x" +
                               std::to_string(s.n) + "x" + std::to_string(s.k);
      benchmark::RegisterBenchmark(
          name.c_str(),
          [&, type](benchmark::State& state) { multiply_bench(state, library, threads, s, type); })
          ->UseRealTime()
          ->Unit(benchmark::kMillisecond);
    }
}

}  // namespace
}  // namespace sluice::kernels

int main(int count, char** arguments) {
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  if (count >= 2 && std::strcmp(arguments[1], "--hidden") == 0) {
    sluice::kernels::measure_hidden(count > 2 ? std::atoi(arguments[2]) : cores);
    return 0;
  }
  if (count >= 3 && std::strcmp(arguments[1], "--ways") == 0) {
    sluice::kernels::compare_ways(arguments[2], count > 3 ? std::atoi(arguments[3]) : cores);
    return 0;
  }
  const auto library = sluice::kernels::load_matrix_library(cores);
  sluice::Threads threads(cores);
  sluice::kernels::register_benches(*library, threads);
  benchmark::Initialize(&count, arguments);
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
