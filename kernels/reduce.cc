#include "kernels/reduce.h"

#include <algorithm>
#include <array>
#include <bit>

#include "core/bytes.h"
#include "kernels/simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/reduce.cc"
#include <hwy/foreach_target.h>

#include "kernels/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sluice::kernels::HWY_NAMESPACE {

// A square of an f32 value is exact in f64, and no sum of them overflows.
double square_sum_piece(std::size_t n, ConstArray x) {
  const hn::CappedTag<double, 16> f64;
  const hn::Rebind<float, decltype(f64)> f32;
  return sum_in_lanes<double>(n, [=](auto at, auto sum) HWY_ATTR {
    ask_far_ahead(x, at.begin);
    const auto value = hn::PromoteTo(f64, load(f32, x, at));
    return mul_add(value, value, sum);
  });
}

double store_piece_summing_squares(std::size_t n, ConstArray x, bool accumulate, float* to) {
  const hn::CappedTag<double, 16> f64;
  const hn::Rebind<float, decltype(f64)> f32;
  const Array out{to, Dtype::kF32};
  return sum_in_lanes<double>(n, [=](auto at, auto sum) HWY_ATTR {
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
HWY_EXPORT(square_sum_piece);
HWY_EXPORT(store_piece_summing_squares);
HWY_EXPORT(add_rows);
HWY_EXPORT(add_in_place);

namespace {
constexpr std::size_t kMaxPieces = 1024;
constexpr std::size_t kColumnGrain = 256;

// A piece is a power of two of blocks, so that its sum is a node of the tree of pairwise sums, whatever its
// size. sum_of(begin, end): of a piece.
template <class Sum>
SquareSum sum_pieces(Threads& threads, std::size_t n, const Sum& sum_of) {
  const std::size_t blocks = std::max<std::size_t>(divide_up(n, kSumBlock), 1);
  const std::size_t piece =
      kSumBlock * std::bit_ceil(std::max<std::size_t>(divide_up(blocks, kMaxPieces), 16));
  std::array<double, kMaxPieces> sums;
  threads.parallel_for(n, piece,
                       [&](std::size_t begin, std::size_t end) { sums[begin / piece] = sum_of(begin, end); });
  const double sum = pairwise_sum(std::span<const double>(sums.data(), divide_up(n, piece)));
  return {sum, std::isfinite(sum)};
}

}  // namespace

SquareSum sum_of_squares(Threads& threads, std::size_t n, ConstArray x) {
  require_float({x});
  return sum_pieces(threads, n, [&](std::size_t begin, std::size_t end) {
    return HWY_DYNAMIC_DISPATCH(square_sum_piece)(end - begin, x.at(begin));
  });
}

SquareSum store_summing_squares(Threads& threads, std::size_t n, ConstArray x, bool accumulate, float* to) {
  require_float({x});
  return sum_pieces(threads, n, [&](std::size_t begin, std::size_t end) {
    return HWY_DYNAMIC_DISPATCH(store_piece_summing_squares)(end - begin, x.at(begin), accumulate,
                                                             to + begin);
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
