#include "optim/adafactor_loops.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>

#include "core/bytes.h"
#include "kernels/simd.h"

#include "optim/update-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sluice::optim::HWY_NAMESPACE {

using F64 = hn::CappedTag<double, 16>;
using F64Vector = hn::Vec<F64>;
using F32OfF64 = hn::Rebind<float, F64>;  // with as many lanes
inline constexpr std::size_t kWidth = hn::MaxLanes(F64());
static_assert(kFactorPadding >= simd::kLanes);

// A block in f32, which fits into the cache. Vectors may extend beyond its end.
struct Buffer {
  HWY_INLINE void ask_next(const float* at) const {
    hwy::Prefetch(next + static_cast<std::size_t>(at - values) * element_bytes);
  }
  const std::byte* next;
  std::size_t element_bytes;
  HWY_ALIGN float values[kernels::kGridBlock + kFactorPadding];
};

// Loads x as f32 into `to`, and applies the rule.
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

// Splits f32 vectors into f64 ones: calls body(f64 vector, its index among those of 16 elements).
template <class Body>
HWY_INLINE void each_half(simd::F32Vector value, std::size_t j, const Body& body) {
#if HWY_TARGET == HWY_SCALAR
  body(hn::PromoteTo(F64(), value), j);
#else
  body(hn::PromoteTo(F64(), hn::LowerHalf(F32OfF64(), value)), j / kWidth);
  body(hn::PromoteTo(F64(), hn::UpperHalf(F32OfF64(), value)), j / kWidth + 1);
#endif
}

// Values to be summed, which are loaded from memory as they are added.
struct Terms {
  ConstArray values;
  GradientRule rule;

  HWY_INLINE void ask_ahead(std::size_t at) const { simd::ask_far_ahead(values, at); }
  // Calls body(vector, j) for the 16 elements from `at` on; j is the index of the vector's first element
  // among them.
  template <class Body>
  HWY_INLINE void each_vector(std::size_t at, const Body& body) const {
    HWY_UNROLL(16)
    for (std::size_t j = 0; j < 16; j += simd::kLanes)
      body(ruled(simd::F32(), rule, values, simd::Whole{at + j}), j);
  }
  // The same with body(f64 vector, its index).
  template <class Body>
  HWY_INLINE void each(std::size_t at, const Body& body) const {
    each_vector(at, [&](simd::F32Vector value, std::size_t j) SLUICE_BODY { each_half(value, j, body); });
  }
  // Copies the last, fewer than 16, elements, and pads them with zeros.
  HWY_INLINE Terms padded(std::size_t at, std::size_t count, float (&to)[16]) const {
    std::fill_n(to, 16, 0.0f);
    std::memcpy(to, values.at(at).data, count * simd::bytes_of(values.type));
    return {{to, values.type}, rule};
  }
};

// Sums in 16 lanes.
struct Sums {
  F64Vector lanes[16 / kWidth];
  HWY_INLINE Sums() {
    HWY_UNROLL(16)
    for (std::size_t j = 0; j < 16 / kWidth; ++j) lanes[j] = hn::Zero(F64());
  }
  HWY_INLINE void add_squares(simd::F32Vector value, std::size_t j) {
    each_half(value, j, [&](F64Vector half, std::size_t k) SLUICE_BODY {
      lanes[k] = simd::mul_add(half, half, lanes[k]);
    });
  }
  HWY_INLINE double total() const {
    HWY_ALIGN double each[16];
    HWY_UNROLL(16)
    for (std::size_t j = 0; j < 16 / kWidth; ++j) hn::Store(lanes[j], F64(), each + j * kWidth);
    return simd::add_lanes(each);
  }
};

HWY_INLINE double square_sum_of(std::size_t n, const Terms& terms) {
  Sums sums;
  const auto add = [&](simd::F32Vector value, std::size_t j) SLUICE_BODY { sums.add_squares(value, j); };
  std::size_t i = 0;
  for (; i + 16 <= n; i += 16) {
    terms.ask_ahead(i);
    terms.each_vector(i, add);
  }
  if (i == n) return sums.total();
  HWY_ALIGN float last[16];
  terms.padded(i, n - i, last).each_vector(0, add);
  return sums.total();
}

// Adds the squares to their columns' sums, and returns their total.
HWY_INLINE double add_long_row(std::size_t n, const Terms& terms, double* columns) {
  Sums sums;
  const auto add_to = [&](double* to) SLUICE_BODY {
    return [&sums, to](F64Vector value, std::size_t j) SLUICE_BODY {
      const auto square = hn::Mul(value, value);  // exact
      double* const column = to + j * kWidth;
      hn::StoreU(hn::Add(hn::LoadU(F64(), column), square), F64(), column);
      sums.lanes[j] = hn::Add(sums.lanes[j], square);
    };
  };
  std::size_t i = 0;
  for (; i + 16 <= n; i += 16) {
    terms.ask_ahead(i);
    terms.each(i, add_to(columns + i));
  }
  if (i == n) return sums.total();
  HWY_ALIGN float last[16];
  HWY_ALIGN double last_columns[16] = {};
  std::copy_n(columns + i, n - i, last_columns);
  terms.padded(i, n - i, last).each(0, add_to(last_columns));
  std::copy_n(last_columns, n - i, columns + i);
  return sums.total();
}

HWY_INLINE void add_short_row(std::size_t n, const Terms& terms, double& row, double* columns) {
  HWY_ALIGN float values[kShortRow + simd::kLanes];
  simd::for_each_vector(n, [&](auto at) SLUICE_BODY {
    hn::StoreU(ruled(simd::F32(), terms.rule, terms.values, at), simd::F32(), values + at.begin);
  });
  double sum = row;
  for (std::size_t i = 0; i < n; ++i) {
    const double square = static_cast<double>(values[i]) * values[i];
    sum += square;
    columns[i] += square;
  }
  row = sum;
}

// Calls body(from, to, row, column) for each row's part of the elements [begin, end).
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

void add_squares_range(const SumPart& part) {
  const Matrices& m = *part.matrices;
  for (std::size_t begin = part.begin; begin < part.end;) {
    const std::size_t end = std::min(part.end, (begin / kernels::kGridBlock + 1) * kernels::kGridBlock);
    const std::size_t first_row = begin / m.columns;
    std::size_t matrix = m.matrix_of(first_row), matrix_end = (matrix + 1) * m.rows;
    for_each_row(m, begin, end,
                 [&](std::size_t from, std::size_t to, std::size_t row, std::size_t column) SLUICE_BODY {
                   if (row == matrix_end) ++matrix, matrix_end += m.rows;
                   const Terms terms = {part.gradient.at(from - part.begin), part.rule};
                   double* const columns = part.columns + (matrix - part.matrix) * m.columns + column;
                   if (m.columns < kShortRow)
                     add_short_row(to - from, terms, part.rows[row], columns);
                   else
                     part.rows[row] += add_long_row(to - from, terms, columns);
                 });
    begin = end;
  }
}

double square_sum_range(std::size_t n, ConstArray values) { return square_sum_of(n, {values, {}}); }

HWY_INLINE simd::F32Vector second_moment(const Normalizer& s, simd::F32Vector gradient,
                                         simd::F32Vector before) {
  const auto square = simd::mul_add(gradient, gradient, simd::set(s.epsilon));
  return simd::mul_add(before, simd::set(s.decay), hn::Mul(square, simd::set(s.rate)));
}

// Multiplies the gradient by the factors of row and column, for elements in ascending order and rows of whole
// vectors.
class RowFactors {
 public:
  // first: index in the parameter of the element with i = 0.
  HWY_INLINE RowFactors(const Normalizer& s, std::size_t first)
      : s_(s), columns_in_row_(s.matrices->columns), row_(first / columns_in_row_) {
    begin_ = row_ * columns_in_row_ - first;  // negative (wraps around) where the row begins earlier
    end_ = begin_ + columns_in_row_;
    look_at_row();
  }
  HWY_INLINE simd::F32Vector times(simd::F32Vector gradient, std::size_t i) {
    if (HWY_UNLIKELY(i >= end_)) {
      ++row_;
      begin_ = end_;
      end_ += columns_in_row_;
      look_at_row();
    }
    const auto half = hn::Mul(gradient, simd::set(by_row_));
    return hn::Mul(half, hn::LoadU(simd::F32(), columns_ + (i - begin_)));
  }

 private:
  HWY_INLINE void look_at_row() {
    by_row_ = s_.rows[row_];
    columns_ = s_.columns + s_.matrices->matrix_of(row_) * columns_in_row_;
  }
  const Normalizer& s_;
  std::size_t columns_in_row_, row_, begin_, end_;
  float by_row_;
  const float* columns_;
};
HWY_INLINE bool has_whole_vectors(const Matrices& m) { return m.factored && m.columns % 16 == 0; }

// Multiplies the gradient by the factors of row and column. Rows are written in ascending order: the part of
// a vector beyond its row is overwritten by the next row.
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

// Computes the update before the learning rate. For a vector: the gradient over the root of its second
// moment, which is stored if kKeep.
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

HWY_INLINE double row_square_sum(const Normalizer& s, std::size_t at, std::size_t n) {
  const Terms terms = {s.gradient.at(at), s.rule};
  RowFactors factors(s, s.first + at);
  Sums sums;
  for (std::size_t i = 0; i < n; i += 16) {
    terms.ask_ahead(i);
    terms.each_vector(i, [&](simd::F32Vector gradient, std::size_t j)
                             SLUICE_BODY { sums.add_squares(factors.times(gradient, i + j), j); });
  }
  return sums.total();
}

double update_square_sum_range(const Normalizer& normalizer, std::size_t at, std::size_t count) {
  if (has_whole_vectors(*normalizer.matrices)) return row_square_sum(normalizer, at, count);
  Buffer update;
  normalize<false>(normalizer, at, count, update);
  return square_sum_of(count, {{update.values, Dtype::kF32}, {}});
}

// Each vector's update is its gradient times the factor from `rows`, or, if that is null, is in `updates`.
template <bool kMomentum>
HWY_INLINE void apply_updates(const AdafactorFactors& factors, const GradientRule& rule,
                              const SpanRange& range, RowFactors* rows, const float* updates) {
  update_elements<kMomentum ? 1 : 0>(range, rule, [=, f = factors](auto at, Elements& e) SLUICE_BODY {
    using simd::set;
    const auto update =
        rows != nullptr ? rows->times(e.gradient, at.begin) : hn::LoadU(simd::F32(), updates + at.begin);
    auto step = hn::Mul(update, set(f.learning_rate));
    if constexpr (kMomentum)
      step = e.first = simd::mul_add(e.first, set(f.blend), hn::Mul(step, set(f.rest)));
    e.value = hn::Sub(hn::Mul(e.value, set(f.keep)), step);
  });
}

void apply_updates(const Normalizer& s, const AdafactorFactors& factors, bool momentum,
                   const SpanRange& range, RowFactors* rows, const float* updates) {
  const GradientRule rule = rows != nullptr ? s.rule : GradientRule{};
  if (momentum)
    apply_updates<true>(factors, rule, range, rows, updates);
  else
    apply_updates<false>(factors, rule, range, rows, updates);
}

void apply_update_range(const Normalizer& s, const AdafactorFactors& factors, bool momentum,
                        const SpanRange& range) {
  if (has_whole_vectors(*s.matrices)) {
    RowFactors rows(s, s.first + range.first);
    return apply_updates(s, factors, momentum, range, &rows, nullptr);
  }
  Buffer buffer;
  for (std::size_t at = 0; at < range.count; at += kernels::kGridBlock) {
    const SpanRange block = range.part(at, std::min(kernels::kGridBlock, range.count - at));
    normalize<true>(s, block.first, block.count, buffer);
    apply_updates(s, factors, momentum, block, nullptr, buffer.values);
  }
}

}  // namespace sluice::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sluice::optim {
HWY_EXPORT(add_squares_range);
HWY_EXPORT(square_sum_range);
HWY_EXPORT(update_square_sum_range);
HWY_EXPORT(apply_update_range);

void add_squares(const SumPart& part) { HWY_DYNAMIC_DISPATCH(add_squares_range)(part); }
double square_sum(std::size_t n, ConstArray values) {
  return HWY_DYNAMIC_DISPATCH(square_sum_range)(n, values);
}
double update_square_sum(const Normalizer& normalizer, std::size_t at, std::size_t count) {
  return HWY_DYNAMIC_DISPATCH(update_square_sum_range)(normalizer, at, count);
}
void apply_update(const Normalizer& normalizer, const AdafactorFactors& factors, bool momentum,
                  const SpanRange& range) {
  HWY_DYNAMIC_DISPATCH(apply_update_range)(normalizer, factors, momentum, range);
}

namespace {
constexpr std::size_t kTileElements = std::size_t{64} << 10;
constexpr std::size_t kLeastRows = 32;  // of a tile, so that adding column sums is cheap beside making them
constexpr std::size_t kElementsAtOnce = std::size_t{2} << 20;  // so that threads seldom wait for each other
constexpr std::size_t kLeastAtOnce = 4;
}  // namespace

Matrices::Matrices(std::span<const std::size_t> shape)
    : elements(std::accumulate(shape.begin(), shape.end(), std::size_t{1}, std::multiplies<>())),
      columns(shape.empty() ? 1 : shape.back()),
      rows(shape.size() < 2 ? 1 : shape[shape.size() - 2]),
      count(elements / matrix_elements()),
      factored(shape.size() >= 2) {}

std::size_t Matrices::blocks() const { return divide_up(elements, kernels::kGridBlock); }

Tiles::Tiles(const Matrices& m) : whole(m.matrix_elements() <= kTileElements) {
  if (whole) {
    const std::size_t matrices = kTileElements / m.matrix_elements();
    rows = m.rows * matrices;
    of_each = of_strip = strips = 1;
    count = divide_up(m.count, matrices);
    at_once = count;
    return;
  }
  // Strips begin at grid blocks, so that parts may begin at strips.
  rows = round_up(std::max(kLeastRows, kTileElements / m.columns),
                  kernels::kGridBlock / std::gcd(m.columns, kernels::kGridBlock));
  of_each = divide_up(m.rows, rows);
  of_strip = divide_up(of_each, kMostStrips);
  strips = divide_up(of_each, of_strip);
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
std::size_t Tiles::first_strip(const Matrices& m, std::size_t tile) const {
  return whole ? m.matrix_of(first_row(m, tile)) : tile / of_each * strips + tile % of_each / of_strip;
}
std::size_t Tiles::last_cut(const Matrices& m, std::size_t element) const {
  if (element >= m.elements) return m.elements;
  if (!m.factored) return 0;
  const std::size_t matrix = m.matrix_elements(),
                    on_grid = kernels::kGridBlock / std::gcd(matrix, kernels::kGridBlock);
  // The last matrix at or before `element` that begins at a grid block.
  const std::size_t first = element / matrix / on_grid * on_grid * matrix;
  const std::size_t strip = of_strip * rows * m.columns;
  if (whole) return first;
  // Matrices after it that do not begin at a grid block are not cut.
  return first + std::min((element - first) / strip, strips - 1) * strip;
}

}  // namespace sluice::optim
#endif  // HWY_ONCE
