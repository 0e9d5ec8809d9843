#include "optim/adafactor_loops.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "core/bytes.h"
#include "kernels/simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optim/adafactor_loops.cc"
#include <hwy/foreach_target.h>

#include "optim/update-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sluice::optim::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace simd = kernels::HWY_NAMESPACE;

using F64 = hn::CappedTag<double, 16>;
using F64Vector = hn::Vec<F64>;
using F32OfF64 = hn::Rebind<float, F64>;  // as many lanes
inline constexpr std::size_t kWidth = hn::MaxLanes(F64());
static_assert(kFactorPadding >= simd::kLanes);

// A block in f32, which stays in the processor's cache. Vectors may go beyond its end. While it is worked on,
// the block that comes next in memory is asked for, so that memory never waits for arithmetic.
struct Buffer {
  HWY_INLINE void ask_next(const float* at) const {
    hwy::Prefetch(next + static_cast<std::size_t>(at - values) * element_bytes);
  }
  const std::byte* next;
  std::size_t element_bytes;
  HWY_ALIGN float values[kSumElements + kFactorPadding];
};

HWY_INLINE F64Vector wide(const float* values) { return hn::PromoteTo(F64(), hn::LoadU(F32OfF64(), values)); }
HWY_INLINE F64Vector wide_part(const float* values, std::size_t count) {
  return hn::IfThenElseZero(hn::FirstN(F64(), count), wide(values));
}

// to: x as f32, by the rule.
HWY_INLINE void bring(std::size_t n, ConstArray x, const GradientRule& rule, Buffer& to) {
  constexpr std::size_t kVectors = 4, kGroup = kVectors * simd::kLanes;
  to.next = static_cast<const std::byte*>(x.at(n).data);
  to.element_bytes = simd::bytes_of(x.type);
  std::size_t i = 0;
  for (; i + kGroup <= n; i += kGroup) {
    simd::load_vectors<kVectors>(x, simd::Whole{i})
        .each([&](simd::F32Vector value, std::size_t j) SLUICE_BODY {
          hn::Store(ruled(simd::F32(), rule, value), simd::F32(), to.values + i + j * simd::kLanes);
        });
  }
  for (; i + simd::kLanes <= n; i += simd::kLanes)
    hn::Store(ruled(simd::F32(), rule, x, simd::Whole{i}), simd::F32(), to.values + i);
  if (i < n) hn::Store(ruled(simd::F32(), rule, x, simd::Part{i, n - i}), simd::F32(), to.values + i);
}

// body(vector, j) for each vector of f64 among 16 elements; `count` of them are there.
template <class Body>
HWY_INLINE void each_wide(const float* values, std::size_t count, const Body& body) {
  HWY_UNROLL(16)
  for (std::size_t j = 0; j < 16; j += kWidth)
    if (j < count) body(wide_part(values + j, std::min(count - j, kWidth)), j / kWidth);
}

struct Sums {
  F64Vector lanes[16 / kWidth];
  HWY_INLINE Sums() {
    HWY_UNROLL(16)
    for (std::size_t j = 0; j < 16 / kWidth; ++j) lanes[j] = hn::Zero(F64());
  }
  HWY_INLINE double total() const {
    HWY_ALIGN double each[16];
    HWY_UNROLL(16)
    for (std::size_t j = 0; j < 16 / kWidth; ++j) hn::Store(lanes[j], F64(), each + j * kWidth);
    return simd::add_lanes(each);
  }
};

template <bool kAsk>
HWY_INLINE double square_sum_of(std::size_t n, const Buffer& buffer) {
  const float* const values = buffer.values;
  Sums sums;
  std::size_t i = 0;
  for (; i + 16 <= n; i += 16) {
    if constexpr (kAsk) buffer.ask_next(values + i);
    HWY_UNROLL(16)
    for (std::size_t j = 0; j < 16 / kWidth; ++j) {
      const auto value = wide(values + i + j * kWidth);
      sums.lanes[j] = simd::mul_add(value, value, sums.lanes[j]);
    }
  }
  each_wide(values + i, n - i, [&](F64Vector value, std::size_t j) SLUICE_BODY {
    sums.lanes[j] = simd::mul_add(value, value, sums.lanes[j]);
  });
  return sums.total();
}

// Adds the squares to those of their columns; returns their sum.
HWY_INLINE double add_long_row(std::size_t n, const Buffer& buffer, const float* values, double* columns) {
  Sums sums;
  std::size_t i = 0;
  for (; i + 16 <= n; i += 16) {
    buffer.ask_next(values + i);
    HWY_UNROLL(16)
    for (std::size_t j = 0; j < 16 / kWidth; ++j) {
      const auto value = wide(values + i + j * kWidth), square = hn::Mul(value, value);  // exact
      double* const column = columns + i + j * kWidth;
      hn::StoreU(hn::Add(hn::LoadU(F64(), column), square), F64(), column);
      sums.lanes[j] = hn::Add(sums.lanes[j], square);
    }
  }
  each_wide(values + i, n - i, [&](F64Vector value, std::size_t j) SLUICE_BODY {
    sums.lanes[j] = simd::mul_add(value, value, sums.lanes[j]);
  });
  for (; i < n; ++i) columns[i] += static_cast<double>(values[i]) * values[i];
  return sums.total();
}

HWY_INLINE void add_short_row(std::size_t n, const float* values, double& row, double* columns) {
  double sum = row;
  for (std::size_t i = 0; i < n; ++i) {
    const double square = static_cast<double>(values[i]) * values[i];
    sum += square;
    columns[i] += square;
  }
  row = sum;
}

// body(from, to, row, column) for what each row has of elements [begin, end).
template <class Body>
HWY_INLINE void for_each_row(const Matrices& m, std::size_t begin, std::size_t end, const Body& body) {
  std::size_t row = begin / m.columns, column = begin % m.columns;
  while (begin < end) {
    const std::size_t to = std::min(end, begin + m.columns - column);
    body(begin, to, row, column);
    begin = to;
    ++row;
    column = 0;
  }
}

void add_squares_piece(const SumPart& part) {
  const Matrices& m = *part.matrices;
  Buffer buffer;
  for (std::size_t begin = part.begin; begin < part.end;) {
    const std::size_t end = std::min(part.end, (begin / kSumElements + 1) * kSumElements);
    bring(end - begin, part.gradient.at(begin - part.begin), part.rule, buffer);
    const std::size_t first_row = begin / m.columns;
    std::size_t matrix = m.matrix_of(first_row), matrix_end = (matrix + 1) * m.rows;
    for_each_row(m, begin, end,
                 [&](std::size_t from, std::size_t to, std::size_t row, std::size_t column) SLUICE_BODY {
                   if (row == matrix_end) ++matrix, matrix_end += m.rows;
                   const float* const values = buffer.values + (from - begin);
                   double* const columns = part.columns + (matrix - part.matrix) * m.columns + column;
                   if (m.columns < kShortRow)
                     add_short_row(to - from, values, part.rows[row], columns);
                   else
                     part.rows[row] += add_long_row(to - from, buffer, values, columns);
                 });
    begin = end;
  }
}

double square_sum_piece(std::size_t n, ConstArray values) {
  Buffer buffer;
  bring(n, values, {}, buffer);
  return square_sum_of<true>(n, buffer);
}

HWY_INLINE simd::F32Vector second_moment(const Normalizer& s, simd::F32Vector gradient,
                                         simd::F32Vector before) {
  const auto square = simd::mul_add(gradient, gradient, simd::set(s.epsilon));
  return simd::mul_add(before, simd::set(s.decay), hn::Mul(square, simd::set(s.rate)));
}

// The gradient times the factors of row and column. Rows come in ascending order: what a vector has beyond
// its row is written over by the next one.
HWY_INLINE void normalize_rows(const Normalizer& s, std::size_t begin, std::size_t n, const Buffer& gradient,
                               Buffer& update) {
  const Matrices& m = *s.matrices;
  std::size_t matrix = m.matrix_of(begin / m.columns), matrix_end = (matrix + 1) * m.rows;
  for_each_row(m, begin, begin + n,
               [&](std::size_t from, std::size_t to, std::size_t row, std::size_t column) SLUICE_BODY {
                 if (row == matrix_end) ++matrix, matrix_end += m.rows;
                 const float* const columns = s.columns + matrix * m.columns + column;
                 const float* const in = gradient.values + (from - begin);
                 float* const out = update.values + (from - begin);
                 if (m.columns < kShortRow) {
                   for (std::size_t i = 0; i < to - from; ++i) out[i] = in[i] * s.rows[row] * columns[i];
                   return;
                 }
                 const auto by_row = simd::set(s.rows[row]);
                 for (std::size_t i = 0; i < to - from; i += simd::kLanes) {
                   gradient.ask_next(in + i);
                   const auto half = hn::Mul(hn::LoadU(simd::F32(), in + i), by_row);
                   hn::StoreU(hn::Mul(half, hn::LoadU(simd::F32(), columns + i)), simd::F32(), out + i);
                 }
               });
}

// update: before the learning rate. Of a vector: the gradient over the root of its second moment, which is
// written back where kKeep says so.
template <bool kKeep>
HWY_INLINE void normalize(const Normalizer& s, std::size_t at, std::size_t n, Buffer& update) {
  Buffer gradient;
  bring(n, s.gradient.at(at), s.rule, gradient);
  if (s.matrices->factored) return normalize_rows(s, s.first + at, n, gradient, update);
  float* const second = s.second + s.first + at;
  simd::for_each_vector(n, [&](auto where) SLUICE_BODY {
    const auto value = hn::LoadU(simd::F32(), gradient.values + where.begin);
    const auto moment = second_moment(s, value, simd::load(second, where));
    hn::StoreU(hn::Div(value, hn::Sqrt(moment)), simd::F32(), update.values + where.begin);
    if constexpr (kKeep) simd::store(moment, second, where);
  });
}

double update_square_sum_piece(const Normalizer& normalizer, std::size_t at, std::size_t count) {
  Buffer update;
  normalize<false>(normalizer, at, count, update);
  return square_sum_of<false>(count, update);
}

template <bool kMomentum>
HWY_INLINE void apply_block(const AdafactorFactors& factors, const Buffer& update, const Piece& piece) {
  const float* const values = update.values;
  update_elements<kMomentum ? 1 : 0>(piece, {}, [f = factors, values](auto at, Elements& e) SLUICE_BODY {
    using simd::set;
    auto step = hn::Mul(hn::LoadU(simd::F32(), values + at.begin), set(f.learning_rate));
    if constexpr (kMomentum)
      step = e.first = simd::mul_add(e.first, set(f.blend), hn::Mul(step, set(f.rest)));
    e.value = hn::Sub(hn::Mul(e.value, set(f.keep)), step);
  });
}

void apply_update_piece(const Normalizer& normalizer, const AdafactorFactors& factors, bool momentum,
                        const Piece& piece) {
  Buffer update;
  for (std::size_t at = 0; at < piece.count; at += kSumElements) {
    const Piece block = piece.part(at, std::min(kSumElements, piece.count - at));
    normalize<true>(normalizer, block.first, block.count, update);
    if (momentum)
      apply_block<true>(factors, update, block);
    else
      apply_block<false>(factors, update, block);
  }
}

}  // namespace sluice::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sluice::optim {
HWY_EXPORT(add_squares_piece);
HWY_EXPORT(square_sum_piece);
HWY_EXPORT(update_square_sum_piece);
HWY_EXPORT(apply_update_piece);

void add_squares(const SumPart& part) { HWY_DYNAMIC_DISPATCH(add_squares_piece)(part); }
double square_sum(std::size_t n, ConstArray values) {
  return HWY_DYNAMIC_DISPATCH(square_sum_piece)(n, values);
}
double update_square_sum(const Normalizer& normalizer, std::size_t at, std::size_t count) {
  return HWY_DYNAMIC_DISPATCH(update_square_sum_piece)(normalizer, at, count);
}
void apply_update(const Normalizer& normalizer, const AdafactorFactors& factors, bool momentum,
                  const Piece& piece) {
  HWY_DYNAMIC_DISPATCH(apply_update_piece)(normalizer, factors, momentum, piece);
}

namespace {
constexpr std::size_t kTileElements = std::size_t{64} << 10;
constexpr std::size_t kLeastRows = 32;  // of a tile: sums of columns are then little beside what is summed
constexpr std::size_t kElementsAtOnce = std::size_t{4} << 20;  // lest threads wait for each other often
constexpr std::size_t kLeastAtOnce = 4;
}  // namespace

Matrices::Matrices(std::span<const std::size_t> shape)
    : elements(std::accumulate(shape.begin(), shape.end(), std::size_t{1}, std::multiplies<>())),
      columns(shape.empty() ? 1 : shape.back()),
      rows(shape.size() < 2 ? 1 : shape[shape.size() - 2]),
      count(elements / rows / columns),
      factored(shape.size() >= 2) {}

std::size_t Matrices::blocks() const { return divide_up(elements, kSumElements); }

Tiles::Tiles(const Matrices& m) : whole(m.rows * m.columns <= kTileElements) {
  if (whole) {
    const std::size_t matrices = kTileElements / (m.rows * m.columns);
    rows = m.rows * matrices;
    of_each = 1;
    count = divide_up(m.count, matrices);
    at_once = count;
    return;
  }
  rows = std::max(kLeastRows, kTileElements / m.columns);
  of_each = divide_up(m.rows, rows);
  count = m.count * of_each;
  at_once = std::min(count, std::max(kLeastAtOnce, kElementsAtOnce / (rows * m.columns)));
}

std::size_t Tiles::first_row(const Matrices& m, std::size_t tile) const {
  return whole ? tile * rows : tile / of_each * m.rows + tile % of_each * rows;
}
std::size_t Tiles::end_row(const Matrices& m, std::size_t tile) const {
  const std::size_t end = first_row(m, tile) + rows;
  return std::min(end, whole ? m.all_rows() : (tile / of_each + 1) * m.rows);
}
std::size_t Tiles::tile_of(const Matrices& m, std::size_t row) const {
  return whole ? row / rows : row / m.rows * of_each + row % m.rows / rows;
}

}  // namespace sluice::optim
#endif  // HWY_ONCE
