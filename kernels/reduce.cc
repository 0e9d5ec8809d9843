#include "kernels/reduce.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>
#include <vector>

#include "core/bytes.h"
#include "kernels/simd.h"

#include "kernels/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sluice::kernels::HWY_NAMESPACE {

// Sums the squares of each grid block. A square of an f32 value is exact in f64, and no sum of them
// overflows.
template <class Step>
HWY_INLINE void sum_blocks(std::size_t n, double* sums, const Step& step) {
  for (std::size_t begin = 0; begin < n; begin += kGridBlock)
    *sums++ = sum_block<double>(begin, n - begin < kGridBlock ? n : begin + kGridBlock, step);
}

void square_sums(std::size_t n, ConstArray x, double* sums) {
  const hn::CappedTag<double, 16> f64;
  const hn::Rebind<float, decltype(f64)> f32;
  sum_blocks(n, sums, [=](auto at, auto sum) HWY_ATTR {
    ask_far_ahead(x, at.begin);
    const auto value = hn::PromoteTo(f64, load(f32, x, at));
    return mul_add(value, value, sum);
  });
}

void store_with_square_sums(std::size_t n, ConstArray x, bool accumulate, float* to, double* sums) {
  const hn::CappedTag<double, 16> f64;
  const hn::Rebind<float, decltype(f64)> f32;
  const Array out{to, Dtype::kF32};
  sum_blocks(n, sums, [=](auto at, auto sum) HWY_ATTR {
    ask_ahead(x, at.begin);
    auto stored = load(f32, x, at);
    if (accumulate) stored = hn::Add(load(f32, ConstArray(out), at), stored);
    store(f32, stored, out, at);
    const auto value = hn::PromoteTo(f64, stored);
    return mul_add(value, value, sum);
  });
}

void add_rows(std::size_t rows, std::size_t width, ConstArray x, std::size_t stride, float* out) {
  for_each_vector(width, [=](auto at) HWY_ATTR {
    const std::size_t column = at.begin;
    auto sum = load(x, at);
    for (std::size_t row = 1; row < rows; ++row) {
      at.begin += stride;
      sum = hn::Add(sum, load(x, at));
    }
    at.begin = column;
    store(sum, out, at);
  });
}

void add_in_place(std::size_t n, const float* from, float* to) {
  for_each_vector(n, [=](auto at) HWY_ATTR { store(hn::Add(load(to, at), load(from, at)), to, at); });
}

}  // namespace sluice::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sluice::kernels {
HWY_EXPORT(square_sums);
HWY_EXPORT(store_with_square_sums);
HWY_EXPORT(add_rows);
HWY_EXPORT(add_in_place);

namespace {
constexpr std::size_t kBlocksAtOnce = 64;  // blocks per task
constexpr std::size_t kColumnGrain = 256;

void require_grid(std::size_t first) {
  ensure(first % kGridBlock == 0, "a sum of squares begins at element {}, within a block", first);
}

SquareSum square_sum_of(PartialSum sum) {
  const bool finite = std::ranges::all_of(
      sum.nodes(), [](const PartialSum::Node& node) { return std::isfinite(node.value); });
  return {std::move(sum), finite};
}

// sums_of(begin, end, sums) computes the sums of the blocks that make up [begin, end) of the array.
template <class SumsOf>
SquareSum sum_on_grid(Threads& threads, std::size_t first, std::size_t n, const SumsOf& sums_of) {
  require_grid(first);
  constexpr std::size_t kTask = kBlocksAtOnce * kGridBlock;
  std::vector<PartialSum> parts(divide_up(n, kTask));
  threads.parallel_for(n, kTask, [&](std::size_t begin, std::size_t end) {
    std::array<double, kBlocksAtOnce> sums;
    sums_of(begin, end, sums.data());
    PartialSum part((first + begin) / kGridBlock);
    for (std::size_t block = 0; block < divide_up(end - begin, kGridBlock); ++block) part.add(sums[block]);
    parts[begin / kTask] = std::move(part);
  });
  PartialSum sum(first / kGridBlock);
  for (const PartialSum& part : parts) sum.add(part);
  return square_sum_of(std::move(sum));
}

}  // namespace

SquareSum sum_of_squares(Threads& threads, std::size_t first, std::size_t n, ConstArray x) {
  require_float({x});
  return sum_on_grid(threads, first, n, [&](std::size_t begin, std::size_t end, double* sums) {
    HWY_DYNAMIC_DISPATCH(square_sums)(end - begin, x.at(begin), sums);
  });
}

SquareSum square_sum(std::size_t first, std::span<const PartialSum::Node> nodes) {
  require_grid(first);
  PartialSum sum(first / kGridBlock);
  for (const PartialSum::Node& node : nodes) sum.add(node);
  return square_sum_of(std::move(sum));
}

SquareSum store_summing_squares(Threads& threads, std::size_t first, std::size_t n, ConstArray x,
                                bool accumulate, float* to) {
  require_float({x});
  return sum_on_grid(threads, first, n, [&](std::size_t begin, std::size_t end, double* sums) {
    HWY_DYNAMIC_DISPATCH(store_with_square_sums)(end - begin, x.at(begin), accumulate, to + begin, sums);
  });
}

void add_row_blocks(Threads& threads, std::size_t blocks, std::size_t width, std::size_t stride,
                    float* partials, float* out, bool accumulate) {
  threads.parallel_for(width, kColumnGrain, [&](std::size_t begin, std::size_t end) {
    const auto add = HWY_DYNAMIC_DISPATCH(add_in_place);
    float* const columns = partials + begin;
    for (std::size_t step = 1; step < blocks; step *= 2)
      for (std::size_t block = 0; block + step < blocks; block += 2 * step)
        add(end - begin, columns + (block + step) * stride, columns + block * stride);
    if (accumulate && blocks > 0) add(end - begin, columns, out + begin);
    if (accumulate) return;
    if (blocks > 0)
      std::copy_n(columns, end - begin, out + begin);
    else
      std::fill_n(out + begin, end - begin, 0.0f);
  });
}

std::size_t column_sum_workspace(std::size_t rows, std::size_t width) {
  return divide_up(rows, kRowBlock) * width * sizeof(float);
}

void column_sum(Threads& threads, std::size_t rows, std::size_t width, ConstArray x, float* out,
                bool accumulate, void* workspace) {
  require_float({x});
  auto* const partials = static_cast<float*>(workspace);
  const std::size_t blocks = divide_up(rows, kRowBlock), stripes = divide_up(width, kColumnGrain);
  threads.parallel_for(blocks * stripes, 1, [&](std::size_t task, std::size_t) {
    const std::size_t block = task / stripes, column = task % stripes * kColumnGrain;
    const std::size_t row = block * kRowBlock;
    HWY_DYNAMIC_DISPATCH(add_rows)
    (std::min(kRowBlock, rows - row), std::min(kColumnGrain, width - column), x.at(row * width + column),
     width, partials + block * width + column);
  });
  add_row_blocks(threads, blocks, width, width, partials, out, accumulate);
}

}  // namespace sluice::kernels
#endif  // HWY_ONCE
