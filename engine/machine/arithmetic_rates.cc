#include "engine/machine/arithmetic_rates.h"

#include <algorithm>
#include <utility>

#include "allocator/memory.h"
#include "core/bytes.h"
#include "engine/machine/timing.h"
#include "engine/machine/update_sample.h"
#include "kernels/elementwise.h"
#include "kernels/limits.h"

namespace sluice::engine {
namespace {

constexpr std::size_t kLine = 64;
constexpr std::size_t kSquare = 768;
constexpr double kMostFlops = 4.5e9;  // operations of one product

// Memory outside of any budget, from which arrays are taken one after another.
class Scratch {
 public:
  explicit Scratch(std::size_t bytes) : memory_(unlimited_, allocator::Purpose::kWorkspace, bytes) {}
  std::byte* take(std::size_t bytes) {
    return memory_.data() + std::exchange(used_, used_ + round_up(bytes, kLine));
  }
  Array take(std::size_t elements, Dtype type) { return {take(elements * size_of(type)), type}; }

 private:
  allocator::Ledger unlimited_;
  allocator::Region memory_;
  std::size_t used_ = 0;
};

std::size_t result_bytes_of(const kernels::Product& p) {
  return round_up(p.m * p.n * size_of(p.c.type), kLine);
}

std::size_t bytes_of(const kernels::Product& p) {
  return round_up(p.m * p.k * size_of(p.a.type), kLine) + round_up(p.k * p.n * size_of(p.b.type), kLine) +
         result_bytes_of(p);
}

double flops_in(const kernels::Product& p) {
  return 2 * static_cast<double>(p.m) * static_cast<double>(p.n) * static_cast<double>(p.k);
}

// Makes the product dense, without a bias, and small enough.
kernels::Product part_of(const kernels::Product& product) {
  kernels::Product part = product;
  part.lda = part.ldb = part.ldc = 0;
  part.bias = nullptr;
  while (bytes_of(part) > kMeasuringBytes || flops_in(part) > kMostFlops) {
    std::size_t* const largest =
        std::ranges::max({&part.m, &part.n, &part.k}, {}, [](const auto* size) { return *size; });
    *largest = divide_up(*largest, 2);
  }
  return part;
}

std::size_t row_width(const kernels::AttentionShape& shape) {
  return (shape.heads + 2 * shape.kv_heads) * shape.head_width;
}

// Halves the number of sequences, then of groups of heads, then of tokens, until all operands fit.
kernels::AttentionShape part_of(const kernels::AttentionShape& given, Dtype dtype) {
  kernels::AttentionShape part = given;
  const std::size_t group = given.heads / given.kv_heads;
  const auto bytes = [&] {
    return 2 * part.batch * part.length * (row_width(part) + part.heads * part.head_width) * size_of(dtype);
  };
  while (bytes() > kMeasuringBytes) {
    std::size_t& most = part.batch > 1 ? part.batch : part.kv_heads > 1 ? part.kv_heads : part.length;
    most = divide_up(most, 2);
    part.heads = part.kv_heads * group;
  }
  part.q_stride = part.k_stride = part.v_stride = row_width(part);
  return part;
}

// Sleeping cores reach their speed after a twentieth of a second of work. Four pieces of work in a row that
// take the same time show that they have it already.
void wake(Threads& threads) {
  constexpr std::size_t kPiece = 300'000;  // rounds, of some milliseconds
  constexpr double kLongest = 0.05, kSame = 1.08;
  double total = 0, shortest = 1e9, longest = 0;
  for (int alike = 0; alike < 4 && total < kLongest; ++alike) {
    const double piece = seconds_of([&] { kernels::multiply_add(threads, kPiece); });
    total += piece;
    shortest = std::min(shortest, piece);
    longest = std::max(longest, piece);
    if (longest <= kSame * shortest) continue;
    shortest = longest = piece;
    alike = 0;
  }
}

constexpr std::size_t kCached = 2 * kChunkGrain;  // elements whose update fits in the caches

double seconds_an_element(Threads& threads, const optim::Optimizer& optimizer, Dtype dtype,
                          std::size_t elements, const std::function<void()>& beside = {}) {
  const UpdateSample sample(optimizer, dtype, dtype, elements);
  Scratch scratch(sample.bytes());
  std::byte* const memory = scratch.take(sample.bytes());
  kernels::fill(threads, sample.elements(), 0.5f, sample.parameter(memory));
  kernels::fill(threads, sample.elements(), 0.25f, sample.gradient(memory));
  const optim::Span span = sample.span(memory);
  optim::Hyperparameters hyperparameters{1e-3, 0.1, 1, 0};
  const double seconds = middle_seconds([&] {
    ++hyperparameters.step;
    if (beside) beside();
    optimizer.apply(threads, hyperparameters, span);
  });
  return seconds / static_cast<double>(sample.elements());
}

}  // namespace

kernels::Product product_of(std::size_t m, std::size_t n, std::size_t k, Dtype type) {
  kernels::Product product;
  product.m = m;
  product.n = n;
  product.k = k;
  product.a.type = product.b.type = product.c.type = type;
  return product;
}

double measure_product(Threads& threads, kernels::MatrixLibrary& library, const kernels::Product& product,
                       std::size_t results_bytes) {
  kernels::Product part = part_of(product);
  const std::size_t of_one = result_bytes_of(part),
                    results = part.accumulate ? std::max<std::size_t>(1, results_bytes / of_one) : 1;
  Scratch scratch(bytes_of(part) + (results - 1) * of_one +
                  round_up(kernels::product_workspace(part, library), kLine));
  const Array a = scratch.take(part.m * part.k, part.a.type), b = scratch.take(part.k * part.n, part.b.type);
  kernels::fill(threads, part.m * part.k, 0.5f, a);
  kernels::fill(threads, part.k * part.n, 0.5f, b);
  part.a = a;
  part.b = b;
  std::vector<Array> all;
  for (std::size_t i = 0; i < results; ++i) {
    all.push_back(scratch.take(part.m * part.n, part.c.type));
    kernels::fill(threads, part.m * part.n, 0.0f, all.back());
  }
  std::byte* const workspace = scratch.take(0);
  std::size_t call = 0;
  return flops_in(part) / middle_seconds([&] {
           part.c = all[call++ % results];
           kernels::multiply(library, threads, part, workspace);
         });
}

std::vector<ProductRate> measure_products(Threads& threads, kernels::MatrixLibrary& library,
                                          std::span<const kernels::Product> products,
                                          std::size_t results_bytes) {
  wake(threads);
  std::vector<ProductRate> rates;
  for (const kernels::Product& product : products)
    rates.push_back({product, measure_product(threads, library, product, results_bytes)});
  return rates;
}

double measure_square(Threads& threads, kernels::F32Products& products) {
  kernels::Product square = kernels::dense(product_of(kSquare, kSquare, kSquare, Dtype::kF32));
  Scratch scratch(bytes_of(square));
  square.c = scratch.take(kSquare * kSquare, Dtype::kF32);
  const Array operand = scratch.take(kSquare * kSquare, Dtype::kF32);
  kernels::fill(threads, kSquare * kSquare, 0.5f, operand);
  square.a = square.b = operand;
  return flops_in(square) / middle_seconds([&] { products.multiply_f32(square); });
}

double measure_attention(Threads& threads, const kernels::AttentionShape& given, Dtype dtype) {
  const kernels::AttentionShape shape = part_of(given, dtype);
  const std::size_t rows = shape.batch * shape.length, packed = rows * shape.q_stride,
                    dense = rows * shape.heads * shape.head_width;
  const std::size_t workspace = std::max(kernels::attention_forward_workspace(shape, threads.count()),
                                         kernels::attention_backward_workspace(shape, threads.count()));
  Scratch scratch(2 * round_up(packed * size_of(dtype), kLine) + 2 * round_up(dense * size_of(dtype), kLine) +
                  round_up(rows * shape.heads * sizeof(float), kLine) + workspace);
  const Array q = scratch.take(packed, dtype), dq = scratch.take(packed, dtype),
              out = scratch.take(dense, dtype), dout = scratch.take(dense, dtype);
  auto* log_sums = reinterpret_cast<float*>(scratch.take(rows * shape.heads * sizeof(float)));
  std::byte* const room = scratch.take(0);
  kernels::fill_normal(threads, packed, 1, 1, 0, 0, 1, q);
  kernels::fill_normal(threads, dense, 1, 2, 0, 0, 1, dout);
  const std::size_t k = shape.heads * shape.head_width, v = k + shape.kv_heads * shape.head_width;
  const double seconds = middle_seconds([&] {
    kernels::attention_forward(threads, shape, q, q.at(k), q.at(v), out, log_sums, room);
    kernels::attention_backward(threads, shape, q, q.at(k), q.at(v), out, log_sums, dout, dq, dq.at(k),
                                dq.at(v), room);
  });
  // As in ops/attention.cc: 2 products forward and 5 backward, over half of length x length for each head.
  return 7 * static_cast<double>(rows * shape.heads) * static_cast<double>(shape.length * shape.head_width) /
         seconds;
}

double measure_memory(Threads& threads, std::size_t bytes, const std::function<void()>& beside) {
  const std::size_t count = bytes / 2 / sizeof(float) / kLine * kLine;
  const double moved = 2.0 * static_cast<double>(count * sizeof(float));
  Scratch scratch(bytes);
  const Array from = scratch.take(count, Dtype::kF32), to = scratch.take(count, Dtype::kF32);
  kernels::fill(threads, count, 1.0f, from);
  return moved / middle_seconds([&] {
           if (beside) beside();
           kernels::convert(threads, count, from, to);
         });
}

std::optional<double> measure_update(Threads& threads, const optim::Optimizer& optimizer, Dtype dtype) {
  if (optimizer.rounds() > 0) return std::nullopt;
  return seconds_an_element(threads, optimizer, dtype, kCached);
}

double measure_update_traffic(Threads& threads, const optim::Optimizer& optimizer, Dtype dtype,
                              std::size_t bytes, const std::function<void()>& beside) {
  if (optimizer.rounds() > 0) return measure_memory(threads, bytes, beside);
  const UpdateSample cached(optimizer, dtype, dtype, kCached);
  const std::size_t elements = kCached * std::max<std::size_t>(1, bytes / cached.bytes());
  return cached.bytes_an_element() / seconds_an_element(threads, optimizer, dtype, elements, beside);
}

}  // namespace sluice::engine
