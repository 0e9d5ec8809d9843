#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <utility>

#include "core/bytes.h"
#include "core/error.h"
#include "kernels/elementwise.h"
#include "kernels/reduce.h"
#include "kernels/simd.h"
#include "optim/elementwise.h"

#include "optim/update-inl.h"

#ifndef SLUICE_OPTIM_MUON_TYPES
#define SLUICE_OPTIM_MUON_TYPES
namespace sluice::optim {

// The constants of a step, rounded once.
struct MuonFactors {
  GradientRule gradient;
  float momentum, rate;  // and 1 - momentum
  bool nesterov;
  float keep;           // 1 - lr * weight_decay
  float learning_rate;  // scaled for the shape
};

// The coefficients of an iteration: x <- a x + b (x x') x + c (x x')^2 x. Jordan et al. 2024.
struct Quintic {
  float a = 3.4445f, b = -4.7750f, c = 2.0315f;
};

}  // namespace sluice::optim
#endif

HWY_BEFORE_NAMESPACE();
namespace sluice::optim::HWY_NAMESPACE {

HWY_INLINE simd::F32Vector next_momentum(const MuonFactors& f, simd::F32Vector gradient,
                                         simd::F32Vector before) {
  return simd::mul_add(before, simd::set(f.momentum), hn::Mul(gradient, simd::set(f.rate)));
}

// out: the matrix that is to be made orthogonal.
void muon_direction(const MuonFactors& factors, std::size_t n, ConstArray gradient, ConstArray momentum,
                    float* out) {
  simd::for_each_vector(n, [f = factors, gradient, momentum, out](auto at) HWY_ATTR {
    const auto scaled = ruled(simd::F32(), f.gradient, gradient, at);
    const auto next = next_momentum(f, scaled, simd::load(momentum, at));
    simd::store(f.nesterov ? next_momentum(f, scaled, next) : next, out, at);
  });
}

// square <- b gram + c square; the caller adds a to the diagonal.
void muon_polynomial(const Quintic& quintic, std::size_t n, const float* gram, float* square) {
  simd::for_each_vector(n, [q = quintic, gram, square](auto at) HWY_ATTR {
    const auto second = hn::Mul(simd::load(square, at), simd::set(q.c));
    simd::store(simd::mul_add(simd::load(gram, at), simd::set(q.b), second), square, at);
  });
}

// direction: the range's elements of the orthogonal matrix.
void muon_range(const MuonFactors& factors, const float* direction, const SpanRange& range) {
  update_elements<1>(range, factors.gradient, [f = factors, direction](auto at, Elements& e) SLUICE_BODY {
    using simd::mul_add, simd::set;
    e.first = next_momentum(f, e.gradient, e.first);
    e.value = mul_add(simd::load(direction, at), set(-f.learning_rate), hn::Mul(e.value, set(f.keep)));
  });
}

}  // namespace sluice::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sluice::optim {
HWY_EXPORT(muon_direction);
HWY_EXPORT(muon_polynomial);
HWY_EXPORT(muon_range);

namespace {

constexpr int kIterations = 5;
constexpr double kLeastNorm = 1e-7;
constexpr std::size_t kWidened = 1024;                        // elements that stay in the cache
constexpr std::size_t kSliceElements = std::size_t{4} << 20;  // that a product writes beside the matrix
constexpr std::size_t kAlignedFloats = 16;                    // for an alignment of 64 bytes
static_assert(kernels::kLoopGrain % kWidened == 0);

bool is_matrix(const Kind& kind) { return kind.shape.size() == 2 && !kind.by_elements; }

// The sides of a matrix in combine(). The iteration works on the shorter side, since its Gram matrices are
// smaller.
struct Sides {
  explicit Sides(const Kind& kind)
      : rows(kind.shape[0]),
        columns(kind.shape[1]),
        tall(rows > columns),
        least(std::min(rows, columns)),
        most(std::max(rows, columns)) {}
  std::size_t square() const { return round_up(least * least, kAlignedFloats); }  // floats
  // Returns how many rows or columns of the longer side a product writes at once. It follows from the shape
  // alone, since the bits depend on it.
  std::size_t slice() const {
    const std::size_t fitting = kSliceElements / least / kAlignedFloats * kAlignedFloats;
    return std::min(most, std::max(fitting, kAlignedFloats));
  }
  std::size_t rows, columns;
  bool tall;
  std::size_t least, most;
};

class Orthogonal final : public Optimizer {
 public:
  using Optimizer::Optimizer;

  std::vector<StateArray> state() const override { return {{"momentum_buffer", storage().state}}; }
  void statistics(Threads& threads, int round, const Hyperparameters& h, const Span& span) const override;
  void combine(Threads& threads, kernels::F32Products* products, int round, const Hyperparameters& h,
               const Whole& whole) const override;
  void apply(Threads& threads, const Hyperparameters& h, const Span& span) const override;

 private:
  MuonFactors factors(const Hyperparameters& h, const Kind& kind) const;
};

double scale_of(std::string_view scale, const Sides& sides) {
  const auto rows = static_cast<double>(sides.rows), columns = static_cast<double>(sides.columns);
  if (scale == "original") return std::sqrt(std::max(1.0, rows / columns));
  return 0.2 * std::sqrt(std::max(rows, columns));
}

MuonFactors Orthogonal::factors(const Hyperparameters& h, const Kind& kind) const {
  const double momentum = of(h).number("momentum"), scale = scale_of(own().choice("muon_scale"), Sides(kind));
  return {.gradient = gradient_rule(h),
          .momentum = rounded(momentum),
          .rate = rounded(1 - momentum),
          .nesterov = own().is_on("nesterov"),
          .keep = rounded(1 - h.learning_rate * h.weight_decay),
          .learning_rate = rounded(h.learning_rate * scale)};
}

// Rounds must not change the momentum, so it is computed here and again by apply(), which stores it.
void Orthogonal::statistics(Threads& threads, int, const Hyperparameters& h, const Span& span) const {
  check_span(*this, h, span);
  const MuonFactors constants = factors(h, span.whole.kind);
  float* const matrix = reinterpret_cast<float*>(span.whole.scratch) + span.first_index;
  const StatePart& momentum = span.state[0];
  threads.parallel_for(span.count, kernels::kLoopGrain, [&](std::size_t begin, std::size_t end) {
    std::array<float, kWidened> wide;
    for (std::size_t at = begin; at < end; at += kWidened) {
      const std::size_t n = std::min(end - at, kWidened);
      ConstArray before = momentum.values.at(at);
      if (momentum.values.type == Dtype::kU8) {
        decode(n, CodeMap::kSigned, static_cast<const std::uint8_t*>(before.data),
               momentum.scales + at / kScaleBlock, wide.data());
        before = {wide.data(), Dtype::kF32};
      }
      HWY_DYNAMIC_DISPATCH(muon_direction)(constants, n, span.gradient.at(at), before, matrix + at);
    }
  });
}

// Makes the matrix in the scratch nearly orthogonal: its singular values become about 0.7 to 1.2.
class NewtonSchulz {
 public:
  NewtonSchulz(Threads& threads, kernels::F32Products& products, const Whole& whole)
      : threads_(threads),
        products_(products),
        sides_(whole.kind),
        matrix_(reinterpret_cast<float*>(whole.scratch)),
        gram_(reinterpret_cast<float*>(whole.workspace)),
        factor_(gram_ + sides_.square()),
        slice_(factor_ + sides_.square()) {}

  void run() {
    normalize();
    for (int i = 0; i < kIterations; ++i) {
      multiply_by_itself();
      make_factor();
      for (std::size_t first = 0; first < sides_.most; first += sides_.slice())
        replace_slice(first, std::min(sides_.slice(), sides_.most - first));
    }
  }

 private:
  // Scales the matrix so that no singular value exceeds 1.
  void normalize() {
    const std::size_t n = sides_.rows * sides_.columns;
    const double norm =
        std::sqrt(kernels::sum_of_squares(threads_, 0, n, {matrix_, Dtype::kF32}).sum.total());
    kernels::scale(threads_, n, static_cast<float>(1 / std::max(norm, kLeastNorm)), {matrix_, Dtype::kF32});
  }

  void multiply(std::size_t m, std::size_t n, std::size_t k, const float* a, const float* b, float* c,
                bool transpose_a, bool transpose_b, std::size_t lda, std::size_t ldb) {
    kernels::Product p;
    p.m = m, p.n = n, p.k = k;
    p.a = {a, Dtype::kF32}, p.b = {b, Dtype::kF32}, p.c = {c, Dtype::kF32};
    p.transpose_a = transpose_a, p.transpose_b = transpose_b;
    p.lda = lda, p.ldb = ldb, p.ldc = n;
    products_.multiply_f32(p);
  }

  void multiply_by_itself() {
    const std::size_t k = sides_.least;
    multiply(k, k, sides_.most, matrix_, matrix_, gram_, sides_.tall, !sides_.tall, sides_.columns,
             sides_.columns);
  }

  void make_factor() {
    const std::size_t k = sides_.least;
    const Quintic quintic;
    multiply(k, k, k, gram_, gram_, factor_, false, false, k, k);
    threads_.parallel_for(k * k, kernels::kLoopGrain, [&](std::size_t begin, std::size_t end) {
      HWY_DYNAMIC_DISPATCH(muon_polynomial)(quintic, end - begin, gram_ + begin, factor_ + begin);
    });
    for (std::size_t i = 0; i < k; ++i) factor_[i * k + i] += quintic.a;
  }

  // Multiplies some rows of a tall matrix, or some columns of a wide one, in place.
  void replace_slice(std::size_t first, std::size_t count) {
    const std::size_t k = sides_.least;
    float* const part = matrix_ + first * (sides_.tall ? k : 1);
    const std::size_t rows = sides_.tall ? count : k, columns = sides_.tall ? k : count;
    if (sides_.tall)
      multiply(count, k, k, part, factor_, slice_, false, false, k, k);
    else
      multiply(k, count, k, factor_, part, slice_, false, false, k, sides_.columns);
    kernels::convert_rows(threads_, rows, columns, {slice_, Dtype::kF32}, columns, {part, Dtype::kF32},
                          sides_.columns);
  }

  Threads& threads_;
  kernels::F32Products& products_;
  const Sides sides_;
  float *matrix_, *gram_, *factor_, *slice_;
};

void Orthogonal::combine(Threads& threads, kernels::F32Products* products, int, const Hyperparameters&,
                         const Whole& whole) const {
  ensure(products != nullptr, "muon is given nothing to multiply matrices with");
  NewtonSchulz(threads, *products, whole).run();
}

void Orthogonal::apply(Threads& threads, const Hyperparameters& h, const Span& span) const {
  const MuonFactors constants = factors(h, span.whole.kind);
  const float* const direction = reinterpret_cast<const float*>(span.whole.scratch) + span.first_index;
  for_each_range(threads, *this, h, span, [&](const SpanRange& range) {
    HWY_DYNAMIC_DISPATCH(muon_range)(constants, direction + range.first, range);
  });
}

// Matrices are updated by Orthogonal, all other parameters by AdamW.
class Muon final : public Optimizer {
 public:
  Muon(const Settings& settings, const Storage& storage)
      : Optimizer(settings, storage), matrices_(settings, storage), rest_(make_adamw(settings, storage)) {}

  std::vector<StateArray> state() const override {
    std::vector<StateArray> all = matrices_.state();
    for (StateArray& array : rest_->state()) all.push_back(std::move(array));
    return all;
  }
  bool keeps(std::size_t array, const Kind& kind) const override { return is_matrix(kind) == (array == 0); }
  int rounds() const override { return 1; }
  bool has_rounds(const Kind& kind) const override { return is_matrix(kind); }
  bool reads_values(int) const override { return false; }
  std::size_t scratch(const Kind& kind) const override {
    return is_matrix(kind) ? divide_up(kind.shape[0] * kind.shape[1], 2) : 0;
  }
  std::size_t workspace(const Kind& kind) const override {
    if (!is_matrix(kind)) return 0;
    const Sides sides(kind);
    return (2 * sides.square() + sides.least * sides.slice()) * sizeof(float);
  }
  kernels::Product largest_product(const Kind& kind) const override {
    kernels::Product largest;
    if (!is_matrix(kind)) return largest;
    const Sides sides(kind);
    largest.m = sides.tall ? std::max(sides.slice(), sides.least) : sides.least;
    largest.n = sides.tall ? sides.least : std::max(sides.slice(), sides.least);
    largest.k = sides.most;
    return largest;
  }
  double product_flops(const Kind& kind) const override {
    if (!is_matrix(kind)) return 0;
    const Sides sides(kind);
    const auto least = static_cast<double>(sides.least), most = static_cast<double>(sides.most);
    return kIterations * 2 * least * least * (2 * most + least);
  }
  PartSums sums(int, const Whole& whole) const override {
    if (!is_matrix(whole.kind)) return {};
    const std::size_t elements = whole.kind.shape[0] * whole.kind.shape[1];
    return {{}, {reinterpret_cast<float*>(whole.scratch), elements}};
  }
  void statistics(Threads& threads, int round, const Hyperparameters& h, const Span& span) const override {
    matrices_.statistics(threads, round, h, with_state(span, 0, 1));
  }
  void combine(Threads& threads, kernels::F32Products* products, int round, const Hyperparameters& h,
               const Whole& whole) const override {
    matrices_.combine(threads, products, round, h, whole);
  }
  void apply(Threads& threads, const Hyperparameters& h, const Span& span) const override {
    if (is_matrix(span.whole.kind)) return matrices_.apply(threads, h, with_state(span, 0, 1));
    rest_->apply(threads, h, with_state(span, 1, span.state.size()));
  }

 private:
  static Span with_state(const Span& span, std::size_t first, std::size_t end) {
    Span own = span;
    own.state.assign(span.state.begin() + static_cast<std::ptrdiff_t>(first),
                     span.state.begin() + static_cast<std::ptrdiff_t>(end));
    return own;
  }

  Orthogonal matrices_;
  std::unique_ptr<Optimizer> rest_;
};

}  // namespace

std::unique_ptr<Optimizer> make_muon(const Settings& settings, const Storage& storage) {
  return std::make_unique<Muon>(settings, storage);
}

}  // namespace sluice::optim
#endif  // HWY_ONCE
