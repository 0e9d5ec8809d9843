#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <numeric>

#include "core/bytes.h"
#include "core/error.h"
#include "kernels/simd.h"
#include "optim/elementwise.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optim/adafactor.cc"
#include <hwy/foreach_target.h>

#include "optim/update-inl.h"

#ifndef SLUICE_OPTIM_ADAFACTOR_TYPES
#define SLUICE_OPTIM_ADAFACTOR_TYPES
namespace sluice::optim {

// Sums are over blocks of so many elements, counted from the parameter's first one, so that no span cuts one.
inline constexpr std::size_t kSumElements = Optimizer::kSpanGrain;

// A parameter as matrices that lie one after another: the last two dimensions. A vector is one row.
struct Matrices {
  explicit Matrices(std::span<const std::size_t> shape)
      : elements(std::accumulate(shape.begin(), shape.end(), std::size_t{1}, std::multiplies<>())),
        columns(shape.empty() ? 1 : shape.back()),
        rows(shape.size() < 2 ? 1 : shape[shape.size() - 2]),
        count(elements / rows / columns),
        factored(shape.size() >= 2) {}
  std::size_t elements, columns, rows, count;
  bool factored;
  std::size_t all_rows() const { return count * rows; }
  std::size_t all_columns() const { return count * columns; }
  std::size_t blocks() const { return divide_up(elements, kSumElements); }
  // A segment is what a block has of a row. Numbered so, each has a place of its own, in ascending order.
  std::size_t segment(std::size_t element) const { return element / kSumElements + element / columns; }
  std::size_t segments() const { return factored ? segment(elements) + 1 : 0; }
  std::size_t column_at(std::size_t element) const {  // of all matrices
    return element / (rows * columns) * columns + element % columns;
  }
};

// What the rounds hand on.
struct Progress {
  Progress(const Matrices& m, double* scratch)
      : scalars(scratch),
        blocks(scratch + kScalars),
        segments(blocks + m.blocks()),
        column_sums(segments + m.segments()),
        row_factors(reinterpret_cast<float*>(column_sums + (m.factored ? m.all_columns() : 0))),
        column_factors(row_factors + (m.factored ? m.all_rows() : 0)) {}
  static std::size_t size(const Matrices& m) {
    const std::size_t factors = m.factored ? divide_up(m.all_rows() + m.all_columns(), 2) : 0;
    return kScalars + m.blocks() + m.segments() + (m.factored ? m.all_columns() : 0) + factors;
  }
  static constexpr std::size_t kScalars = 3;
  double* scalars;        // the rate (clipped from round 1 on), what the weight decay keeps, beta2
  double* blocks;         // sums of squares: of values, then of the update
  double* segments;       // of gradients
  double* column_sums;    // likewise
  float* row_factors;     // 1 / sqrt(row / mean of rows)
  float* column_factors;  // 1 / sqrt(column)
};

// Part of a row, or of a vector.
struct Stretch {
  std::size_t count = 0;
  ConstArray gradient;
  GradientRule rule;  // of the gradient
  // Of a matrix. columns null: of a vector.
  float row = 1;
  const float* columns = nullptr;
  // Of a vector.
  float* second = nullptr;
  float decay = 0, rate = 1, epsilon = 0;  // of the average; 1 - decay
};

struct AdafactorFactors {
  float learning_rate;  // clipped
  float keep;           // 1 - rate * weight_decay
  float blend, rest;    // beta1, 1 - beta1
};

}  // namespace sluice::optim
#endif

HWY_BEFORE_NAMESPACE();
namespace sluice::optim::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace simd = kernels::HWY_NAMESPACE;

using F64 = hn::CappedTag<double, 16>;
using F32 = hn::Rebind<float, F64>;  // as many lanes

double ruled_square_sum(std::size_t n, ConstArray x, const GradientRule& rule) {
  return simd::sum_block<double>(0, n, [=](auto at, auto sum) HWY_ATTR {
    const auto value = hn::PromoteTo(F64(), ruled(F32(), rule, x, at));
    return simd::mul_add(value, value, sum);
  });
}

void add_squares(std::size_t n, ConstArray x, const GradientRule& rule, double* sums) {
  constexpr std::size_t kWidth = hn::MaxLanes(F64());
  std::size_t i = 0;
  const auto squared = [=](auto at) HWY_ATTR {
    const auto value = hn::PromoteTo(F64(), ruled(F32(), rule, x, at));
    return hn::Mul(value, value);  // exact
  };
  for (; i + kWidth <= n; i += kWidth)
    hn::StoreU(hn::Add(hn::LoadU(F64(), sums + i), squared(simd::Whole{i})), F64(), sums + i);
  if (i == n) return;
  HWY_ALIGN double lanes[kWidth];
  hn::Store(squared(simd::Part{i, n - i}), F64(), lanes);
  for (std::size_t j = 0; i < n; ++i, ++j) sums[i] += lanes[j];
}

template <class D, class At>
HWY_INLINE hn::Vec<D> second_moment(D d, const Stretch& s, hn::Vec<D> gradient, At at) {
  const auto square = simd::mul_add(gradient, gradient, hn::Set(d, s.epsilon));
  const auto before = simd::load(d, ConstArray{s.second, Dtype::kF32}, at);
  return simd::mul_add(before, hn::Set(d, s.decay), hn::Mul(square, hn::Set(d, s.rate)));
}

// The gradient over the root of its second moment.
template <class D, class At>
HWY_INLINE hn::Vec<D> normalized(D d, const Stretch& s, hn::Vec<D> gradient, At at) {
  if (s.columns == nullptr) return hn::Div(gradient, hn::Sqrt(second_moment(d, s, gradient, at)));
  const auto by_row = hn::Mul(gradient, hn::Set(d, s.row));
  return hn::Mul(by_row, simd::load(d, ConstArray{s.columns, Dtype::kF32}, at));
}

double update_square_sum(const Stretch& stretch) {
  return simd::sum_block<double>(0, stretch.count, [&stretch](auto at, auto sum) HWY_ATTR {
    const F32 d;
    const auto gradient = ruled(d, stretch.rule, stretch.gradient, at);
    const auto value = hn::PromoteTo(F64(), normalized(d, stretch, gradient, at));
    return simd::mul_add(value, value, sum);
  });
}

// out: the stretch's update, before the learning rate. Of a vector the second moment is updated.
void normalize_stretch(const Stretch& stretch, float* out) {
  simd::for_each_vector(stretch.count, [s = stretch, out](auto at) HWY_ATTR {
    const simd::F32 d;
    const auto gradient = ruled(d, s.rule, s.gradient, at);
    simd::store(normalized(d, s, gradient, at), out, at);
    if (s.columns == nullptr) simd::store(second_moment(d, s, gradient, at), s.second, at);
  });
}

// update: of the piece's elements, before the learning rate.
template <bool kMomentum>
HWY_INLINE void update_piece(const AdafactorFactors& factors, const float* update, const Piece& piece) {
  update_elements<kMomentum ? 1 : 0>(piece, {}, [f = factors, update](auto at, Elements& e) SLUICE_BODY {
    using simd::set;
    auto step = hn::Mul(simd::load(update, at), set(f.learning_rate));
    if constexpr (kMomentum)
      step = e.first = simd::mul_add(e.first, set(f.blend), hn::Mul(step, set(f.rest)));
    e.value = hn::Sub(hn::Mul(e.value, set(f.keep)), step);
  });
}

void adafactor_piece(const AdafactorFactors& factors, const float* update, const Piece& piece) {
  update_piece<false>(factors, update, piece);
}
void adafactor_momentum_piece(const AdafactorFactors& factors, const float* update, const Piece& piece) {
  update_piece<true>(factors, update, piece);
}

}  // namespace sluice::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sluice::optim {
HWY_EXPORT(ruled_square_sum);
HWY_EXPORT(add_squares);
HWY_EXPORT(update_square_sum);
HWY_EXPORT(normalize_stretch);
HWY_EXPORT(adafactor_piece);
HWY_EXPORT(adafactor_momentum_piece);

namespace {

constexpr std::size_t kColumnGrain = 256;

// Newton's method from above, in arithmetic that is the same everywhere, which std::pow is not.
double fifth_root(double x) {
  double root = x;
  while (true) {
    const double square = root * root, next = root - (root - x / (square * square)) / 5;
    if (!(next < root)) return root;
    root = next;
  }
}

// 1 - t^-0.8.
double second_decay(std::uint64_t step) {
  const double root = fifth_root(static_cast<double>(step)), square = root * root;
  return 1 - 1 / (square * square);
}

// body(begin, end) for each part of elements [begin, end) that lies in one row and, where `blocks` says so,
// in one block.
template <class Body>
void for_each_stretch(const Matrices& m, std::size_t begin, std::size_t end, bool blocks, const Body& body) {
  while (begin < end) {
    std::size_t next = std::min(end, (begin / m.columns + 1) * m.columns);
    if (blocks) next = std::min(next, (begin / kSumElements + 1) * kSumElements);
    body(begin, next);
    begin = next;
  }
}

class Adafactor final : public Elementwise {
 public:
  explicit Adafactor(const AdafactorSettings& settings)
      : Elementwise("adafactor", settings.storage, {.beta1 = settings.beta1, .epsilon = settings.epsilon1}),
        settings_(settings) {
    check(own());
    check_size("epsilon2", settings.epsilon2, false);
    check_size("clip_threshold", settings.clip_threshold, false);
  }

  std::vector<StateArray> state() const override {
    if (own().beta1 == 0) return {};
    return {{"exp_avg", state_type()}};
  }
  std::vector<std::string> whole_names() const override {
    return {"exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq"};
  }
  std::vector<WholeArray> whole_state(std::span<const std::size_t> shape) const override;
  void check(const Coefficients& c) const override;
  int rounds() const override { return 2; }
  std::size_t scratch(const Kind& kind) const override { return Progress::size(Matrices(kind.shape)); }
  void statistics(Threads& threads, int round, const Hyperparameters& h, const Span& span) const override;
  void combine(Threads& threads, kernels::F32Products* products, int round, const Hyperparameters& h,
               const Whole& whole) const override;
  void apply(Threads& threads, const Hyperparameters& h, const Span& span) const override;

 private:
  Json arithmetic() const override;
  Stretch stretch_of(const Matrices& m, const Progress& p, const Hyperparameters& h, const Span& span,
                     std::size_t begin, std::size_t end) const;
  void sum_gradients(Threads& threads, const Matrices& m, const Progress& p, const Hyperparameters& h,
                     const Span& span) const;
  void factorize(const Matrices& m, const Progress& p, double epsilon, float* state) const;
  double rate_of(const Matrices& m, const Progress& p, const Hyperparameters& h) const;

  AdafactorSettings settings_;
};

void Adafactor::check(const Coefficients& c) const {
  check_momentum("beta1", c.beta1, own().beta1);
  check_size("epsilon", c.epsilon, false);
}

std::vector<WholeArray> Adafactor::whole_state(std::span<const std::size_t> shape) const {
  if (shape.size() < 2) return {{"exp_avg_sq", {shape.begin(), shape.end()}}};
  std::vector<std::size_t> rows(shape.begin(), shape.end() - 1), columns(shape.begin(), shape.end() - 2);
  columns.push_back(shape.back());
  return {{"exp_avg_sq_row", rows}, {"exp_avg_sq_col", columns}};
}

Json Adafactor::arithmetic() const {
  return {{"beta1", own().beta1},
          {"epsilon", own().epsilon},
          {"epsilon2", settings_.epsilon2},
          {"clip_threshold", settings_.clip_threshold},
          {"relative_step", settings_.relative_step},
          {"scale_parameter", settings_.scale_parameter}};
}

// Elements begin ... end of the parameter, which lie in the span and in one row.
Stretch Adafactor::stretch_of(const Matrices& m, const Progress& p, const Hyperparameters& h,
                              const Span& span, std::size_t begin, std::size_t end) const {
  Stretch s;
  s.count = end - begin;
  s.gradient = span.gradient.at(begin - span.first_index);
  s.rule = gradient_rule(h);
  if (m.factored) {
    s.row = p.row_factors[begin / m.columns];
    s.columns = p.column_factors + m.column_at(begin);
    return s;
  }
  const double decay = p.scalars[2];
  s.second = span.whole.state + begin;
  s.decay = static_cast<float>(decay);
  s.rate = static_cast<float>(1 - decay);
  s.epsilon = static_cast<float>(of(h).epsilon);
  return s;
}

void Adafactor::sum_gradients(Threads& threads, const Matrices& m, const Progress& p,
                              const Hyperparameters& h, const Span& span) const {
  const GradientRule rule = gradient_rule(h);
  const std::size_t first = span.first_index, last = first + span.count;
  const auto gradient = [&](std::size_t element) { return span.gradient.at(element - first); };
  threads.parallel_for(span.count, kernels::kLoopGrain, [&](std::size_t begin, std::size_t end) {
    for_each_stretch(m, first + begin, first + end, true, [&](std::size_t from, std::size_t to) {
      p.segments[m.segment(from)] = HWY_DYNAMIC_DISPATCH(ruled_square_sum)(to - from, gradient(from), rule);
    });
  });
  threads.parallel_for(m.columns, kColumnGrain, [&](std::size_t begin, std::size_t end) {
    for_each_stretch(m, first, last, false, [&](std::size_t from, std::size_t to) {
      const std::size_t row = from / m.columns * m.columns;  // its first element
      from = std::max(from, row + begin);
      to = std::min(to, row + end);
      if (from < to) HWY_DYNAMIC_DISPATCH(add_squares)
      (to - from, gradient(from), rule, p.column_sums + m.column_at(from));
    });
  });
}

void Adafactor::statistics(Threads& threads, int round, const Hyperparameters& h, const Span& span) const {
  check_span(h, span);
  const Matrices m(span.whole.kind.shape);
  const Progress p(m, span.whole.scratch);
  ensure(span.first_index % kSumElements == 0, "adafactor is given a span that begins at element {}",
         span.first_index);
  if (round == 0 && m.factored) sum_gradients(threads, m, p, h, span);
  const ConstArray values = span.master != nullptr ? ConstArray{span.master, Dtype::kF32} : span.parameter;
  threads.parallel_for(span.count, kernels::kLoopGrain, [&](std::size_t begin, std::size_t end) {
    for (std::size_t at = begin; at < end; at += kSumElements) {
      const std::size_t to = std::min(end, at + kSumElements), first = span.first_index + at;
      double& sum = p.blocks[first / kSumElements];
      if (round == 0) {
        sum = HWY_DYNAMIC_DISPATCH(ruled_square_sum)(to - at, values.at(at), {});
        continue;
      }
      sum = 0;
      for_each_stretch(m, first, span.first_index + to, true, [&](std::size_t from, std::size_t until) {
        sum += HWY_DYNAMIC_DISPATCH(update_square_sum)(stretch_of(m, p, h, span, from, until));
      });
    }
  });
}

double Adafactor::rate_of(const Matrices& m, const Progress& p, const Hyperparameters& h) const {
  double rate = h.learning_rate;
  if (settings_.relative_step) rate *= std::min(1e-2, 1 / std::sqrt(static_cast<double>(h.step)));
  if (!settings_.scale_parameter) return rate;
  const double sum = kernels::pairwise_sum(std::span<const double>(p.blocks, m.blocks()));
  return rate * std::max(settings_.epsilon2, std::sqrt(sum / static_cast<double>(m.elements)));
}

// Averages the sums of rows and columns into the state, and takes the factors of the update from there.
void Adafactor::factorize(const Matrices& m, const Progress& p, double epsilon, float* state) const {
  const double decay = p.scalars[2];
  float* const rows = state;
  float* const columns = state + m.all_rows();
  const auto average = [&](float& into, double sum, std::size_t count) {
    const double mean = sum / static_cast<double>(count) + epsilon;
    into = static_cast<float>(decay * into + (1 - decay) * mean);
  };
  for (std::size_t row = 0; row < m.all_rows(); ++row) {
    double sum = 0;
    for_each_stretch(m, row * m.columns, (row + 1) * m.columns, true,
                     [&](std::size_t from, std::size_t) { sum += p.segments[m.segment(from)]; });
    average(rows[row], sum, m.columns);
  }
  for (std::size_t column = 0; column < m.all_columns(); ++column) {
    average(columns[column], p.column_sums[column], m.rows);
    p.column_factors[column] = static_cast<float>(1 / std::sqrt(static_cast<double>(columns[column])));
  }
  for (std::size_t matrix = 0; matrix < m.count; ++matrix) {
    const std::size_t begin = matrix * m.rows, end = begin + m.rows;
    double mean = 0;
    for (std::size_t row = begin; row < end; ++row) mean += rows[row];
    mean /= static_cast<double>(m.rows);
    for (std::size_t row = begin; row < end; ++row)
      p.row_factors[row] = static_cast<float>(1 / std::sqrt(rows[row] / mean));
  }
}

void Adafactor::combine(Threads&, kernels::F32Products*, int round, const Hyperparameters& h,
                        const Whole& whole) const {
  const Matrices m(whole.kind.shape);
  const Progress p(m, whole.scratch);
  if (round == 0) {
    p.scalars[0] = rate_of(m, p, h);
    p.scalars[1] = 1 - p.scalars[0] * h.weight_decay;
    p.scalars[2] = second_decay(h.step);
    if (m.factored) factorize(m, p, of(h).epsilon, whole.state);
    return;
  }
  const double sum = kernels::pairwise_sum(std::span<const double>(p.blocks, m.blocks()));
  p.scalars[0] /= std::max(1.0, std::sqrt(sum / static_cast<double>(m.elements)) / settings_.clip_threshold);
}

void Adafactor::apply(Threads& threads, const Hyperparameters& h, const Span& span) const {
  const Matrices m(span.whole.kind.shape);
  const Progress p(m, span.whole.scratch);
  const auto rounded = [](double value) { return static_cast<float>(value); };
  const double beta1 = of(h).beta1;
  const AdafactorFactors factors = {rounded(p.scalars[0]), rounded(p.scalars[1]), rounded(beta1),
                                    rounded(1 - beta1)};
  for_each_piece(threads, h, span, [&](const Piece& whole) {
    std::array<float, kSumElements> update;  // stays in the processor's cache
    for (std::size_t at = 0; at < whole.count; at += kSumElements) {
      const Piece piece = whole.part(at, std::min(kSumElements, whole.count - at));
      const std::size_t first = span.first_index + piece.first;
      for_each_stretch(m, first, first + piece.count, false, [&](std::size_t from, std::size_t to) {
        HWY_DYNAMIC_DISPATCH(normalize_stretch)
        (stretch_of(m, p, h, span, from, to), update.data() + (from - first));
      });
      if (own().beta1 == 0)
        HWY_DYNAMIC_DISPATCH(adafactor_piece)(factors, update.data(), piece);
      else
        HWY_DYNAMIC_DISPATCH(adafactor_momentum_piece)(factors, update.data(), piece);
    }
  });
}

}  // namespace

std::size_t WholeArray::elements() const {
  return std::accumulate(shape.begin(), shape.end(), std::size_t{1}, std::multiplies<>());
}

std::unique_ptr<Optimizer> make_adafactor(const AdafactorSettings& settings) {
  if (settings.storage.state != Dtype::kF32 && settings.beta1 == 0)
    fail(ErrorCode::kInvalidArgument,
         "adafactor: its state is to be {}, and without momentum it has only sums of rows and columns, which "
         "are "
         "f32; leave that out, or give a beta1 above 0",
         state_type_name(settings.storage.state));
  return std::make_unique<Adafactor>(settings);
}

}  // namespace sluice::optim
#endif  // HWY_ONCE
