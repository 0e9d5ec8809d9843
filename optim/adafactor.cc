#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

#include "core/bytes.h"
#include "core/error.h"
#include "core/pairwise.h"
#include "kernels/simd.h"
#include "optim/adafactor_loops.h"

namespace sluice::optim {
namespace {

constexpr std::size_t kFactorGrain = 4096;  // rows or columns of one task
static_assert(kernels::kLoopGrain % kernels::kGridBlock == 0);

// The data that rounds share, in a parameter's scratch.
struct Progress {
  Progress(const Matrices& m, double* scratch)
      : tiles(m),
        scalars(scratch),
        blocks(scratch + kScalars),
        row_sums(blocks + m.blocks()),
        strip_sums(row_sums + (m.factored ? m.all_rows() : 0)),
        tile_sums(strip_sums + in_strips(m, tiles)),
        row_factors(reinterpret_cast<float*>(tile_sums + in_tiles(m, tiles))),
        column_factors(row_factors + (m.factored ? m.all_rows() : 0)) {}
  static std::size_t size(const Matrices& m) {
    if (!m.factored) return kScalars + m.blocks();
    const Tiles t(m);
    const std::size_t factors = m.all_rows() + m.all_columns() + kFactorPadding;
    return kScalars + m.blocks() + m.all_rows() + in_strips(m, t) + in_tiles(m, t) + divide_up(factors, 2);
  }
  // Returns the sums of blocks, and in the first round also the sums of rows and strips, which follow them.
  PartSums sums(int round, const Matrices& m) const {
    return {{blocks, round == 0 ? tile_sums : blocks + m.blocks()}, {}};
  }
  static constexpr std::size_t kScalars = 3;
  Tiles tiles;
  double* scalars;        // the learning rate (clipped from round 1 on), the weight decay's factor, beta2
  double* blocks;         // squared sums of each block: of values in round 0, of the update in round 1
  double* row_sums;       // squared gradients summed by row
  double* strip_sums;     // squared gradients summed by column within each strip
  double* tile_sums;      // the same for the tiles in progress; none where a strip is one tile
  float* row_factors;     // 1 / sqrt(row / mean of rows)
  float* column_factors;  // 1 / sqrt(column)

 private:
  static std::size_t in_strips(const Matrices& m, const Tiles& t) {
    return m.factored ? t.strips * m.all_columns() : 0;
  }
  static std::size_t in_tiles(const Matrices& m, const Tiles& t) {
    return m.factored && t.of_strip > 1 ? t.at_once * m.columns : 0;
  }
};

// Newton's method from above, with the same bits on every machine, unlike std::pow.
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

class Adafactor final : public Optimizer {
 public:
  using Optimizer::Optimizer;

  std::vector<StateArray> state() const override {
    if (!has_momentum()) return {};
    return {{"exp_avg", storage().state}};
  }
  std::vector<std::string> whole_names() const override {
    return {"exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq"};
  }
  std::vector<WholeArray> whole_state(std::span<const std::size_t> shape) const override;
  int rounds() const override { return 2; }
  bool reads_state(int) const override { return false; }
  bool reads_values(int round) const override { return round == 0 && own().is_on("scale_parameter"); }
  std::size_t scratch(const Kind& kind) const override { return Progress::size(Matrices(kind.shape)); }
  std::size_t last_cut(const Kind& kind, std::size_t element) const override {
    const Matrices m(kind.shape);
    return Tiles(m).last_cut(m, element);
  }
  PartSums sums(int round, const Whole& whole) const override {
    const Matrices m(whole.kind.shape);
    return Progress(m, whole.scratch).sums(round, m);
  }
  void statistics(Threads& threads, int round, const Hyperparameters& h, const Span& span) const override;
  void combine(Threads& threads, kernels::F32Products* products, int round, const Hyperparameters& h,
               const Whole& whole) const override;
  void apply(Threads& threads, const Hyperparameters& h, const Span& span) const override;

 private:
  bool has_momentum() const { return own().number("beta1") != 0; }
  Normalizer normalizer(const Matrices& m, const Progress& p, const Hyperparameters& h,
                        const Span& span) const;
  double rate_of(const Matrices& m, const Progress& p, const Hyperparameters& h) const;
};

std::vector<WholeArray> Adafactor::whole_state(std::span<const std::size_t> shape) const {
  if (shape.size() < 2) return {{"exp_avg_sq", {shape.begin(), shape.end()}}};
  std::vector<std::size_t> rows(shape.begin(), shape.end() - 1), columns(shape.begin(), shape.end() - 2);
  columns.push_back(shape.back());
  return {{"exp_avg_sq_row", rows}, {"exp_avg_sq_col", columns}};
}

Normalizer Adafactor::normalizer(const Matrices& m, const Progress& p, const Hyperparameters& h,
                                 const Span& span) const {
  Normalizer n = {
      .matrices = &m, .gradient = span.gradient, .first = span.first_index, .rule = gradient_rule(h)};
  if (m.factored) {
    n.rows = p.row_factors;
    n.columns = p.column_factors;
    return n;
  }
  const double decay = p.scalars[2];
  n.second = span.whole.state;
  n.decay = rounded(decay);
  n.rate = rounded(1 - decay);
  n.epsilon = rounded(of(h).number("epsilon"));
  return n;
}

// Adds a span's squared gradients to the sums of rows and columns, in one pass.
class GradientSums {
 public:
  GradientSums(const Matrices& m, const Progress& p, const Hyperparameters& h, const Span& span)
      : m_(m),
        p_(p),
        tiles_(p.tiles),
        rule_(gradient_rule(h)),
        gradient_(span.gradient),
        first_(span.first_index),
        last_(first_ + span.count) {}

  void add(Threads& threads) const {
    const std::size_t end = tiles_.tile_of(m_, (last_ - 1) / m_.columns) + 1;
    for (std::size_t tile = tiles_.tile_of(m_, first_ / m_.columns); tile < end; tile += tiles_.at_once) {
      const std::size_t count = std::min(tiles_.at_once, end - tile);
      threads.parallel_for(count, 1, [&](std::size_t i, std::size_t) { add_tile(tile + i); });
      if (tiles_.of_strip > 1) add_to_strips(threads, tile, count);
    }
  }

 private:
  double* sums_of(std::size_t tile) const { return p_.tile_sums + tile % tiles_.at_once * m_.columns; }
  double* strip_of(std::size_t tile) const {
    return p_.strip_sums + tiles_.first_strip(m_, tile) * m_.columns;
  }

  void add_tile(std::size_t tile) const {
    const std::size_t row = tiles_.first_row(m_, tile), begin = std::max(first_, row * m_.columns);
    const std::size_t end = std::min(last_, tiles_.end_row(m_, tile) * m_.columns);
    double* const columns = tiles_.of_strip > 1 ? sums_of(tile) : strip_of(tile);
    // An earlier span may have summed a part of the tile.
    if (tiles_.of_strip > 1 && begin == row * m_.columns) std::fill_n(columns, m_.columns, 0.0);
    add_squares(
        {&m_, begin, end, gradient_.at(begin - first_), rule_, p_.row_sums, columns, m_.matrix_of(row)});
  }

  // Adds the tiles that end in the span to their strips, one after another.
  void add_to_strips(Threads& threads, std::size_t tile, std::size_t count) const {
    threads.parallel_for(m_.columns, kFactorGrain, [&](std::size_t begin, std::size_t end) {
      for (std::size_t t = tile; t < tile + count && tiles_.end_row(m_, t) * m_.columns <= last_; ++t) {
        const double* const from = sums_of(t);
        double* const to = strip_of(t);
        for (std::size_t column = begin; column < end; ++column) to[column] += from[column];
      }
    });
  }

  const Matrices& m_;
  const Progress& p_;
  const Tiles& tiles_;
  GradientRule rule_;
  ConstArray gradient_;
  std::size_t first_, last_;
};

void Adafactor::statistics(Threads& threads, int round, const Hyperparameters& h, const Span& span) const {
  check_span(*this, h, span);
  const Matrices m(span.whole.kind.shape);
  const Progress p(m, span.whole.scratch);
  ensure(span.first_index % kernels::kGridBlock == 0, "adafactor is given a span that begins at element {}",
         span.first_index);
  if (span.count == 0) return;
  if (round == 0 && m.factored) GradientSums(m, p, h, span).add(threads);
  if (round == 0 && !reads_values(round)) return;
  if (reads_values(round)) check_values(*this, span);
  const ConstArray values = span.master != nullptr ? ConstArray{span.master, Dtype::kF32} : span.parameter;
  const Normalizer update = normalizer(m, p, h, span);
  threads.parallel_for(span.count, kernels::kLoopGrain, [&](std::size_t begin, std::size_t end) {
    for (std::size_t at = begin; at < end; at += kernels::kGridBlock) {
      const std::size_t count = std::min(kernels::kGridBlock, end - at);
      p.blocks[(span.first_index + at) / kernels::kGridBlock] =
          round == 0 ? square_sum(count, values.at(at)) : update_square_sum(update, at, count);
    }
  });
}

double Adafactor::rate_of(const Matrices& m, const Progress& p, const Hyperparameters& h) const {
  double rate = h.learning_rate;
  if (own().is_on("relative_step")) rate *= std::min(1e-2, 1 / std::sqrt(static_cast<double>(h.step)));
  if (!own().is_on("scale_parameter")) return rate;
  const double sum = pairwise_sum(std::span<const double>(p.blocks, m.blocks()));
  return rate * std::max(own().number("epsilon2"), std::sqrt(sum / static_cast<double>(m.elements)));
}

// Updates the averages of rows and columns in the state, and computes the update's factors from them.
class Factors {
 public:
  Factors(const Matrices& m, const Progress& p, double epsilon, float* state)
      : m_(m), p_(p), epsilon_(epsilon), rows_(state), columns_(state + m.all_rows()) {}

  void find(Threads& threads) const {
    threads.parallel_for(m_.all_columns(), kFactorGrain, [&](std::size_t begin, std::size_t end) {
      for (std::size_t column = begin; column < end; ++column) {
        average(columns_[column], column_sum(column), m_.rows);
        p_.column_factors[column] = static_cast<float>(1 / std::sqrt(static_cast<double>(columns_[column])));
      }
    });
    threads.parallel_for(m_.all_rows(), kFactorGrain, [&](std::size_t begin, std::size_t end) {
      for (std::size_t row = begin; row < end; ++row) average(rows_[row], p_.row_sums[row], m_.columns);
    });
    if (m_.rows > kFactorGrain) {
      for (std::size_t matrix = 0; matrix < m_.count; ++matrix) find_rows(threads, matrix);
      return;
    }
    threads.parallel_for(m_.count, kFactorGrain / m_.rows, [&](std::size_t begin, std::size_t end) {
      for (std::size_t matrix = begin; matrix < end; ++matrix) find_rows(threads, matrix);
    });
  }

 private:
  double column_sum(std::size_t column) const {
    const std::size_t strips = p_.tiles.strips;
    const double* const first =
        p_.strip_sums + column / m_.columns * strips * m_.columns + column % m_.columns;
    if (strips == 1) return *first;
    PairwiseSum<double> sum;
    for (std::size_t strip = 0; strip < strips; ++strip) sum.add(first[strip * m_.columns]);
    return sum.total();
  }
  void average(float& into, double sum, std::size_t count) const {
    const double mean = sum / static_cast<double>(count) + epsilon_, decay = p_.scalars[2];
    // Squares of finite gradients may exceed f32's range, and ratios of averages must stay finite.
    constexpr double kMost = std::numeric_limits<float>::max();
    into = static_cast<float>(std::min(decay * into + (1 - decay) * mean, kMost));
  }
  void find_rows(Threads& threads, std::size_t matrix) const {
    const std::size_t first = matrix * m_.rows;
    double mean = 0;
    for (std::size_t row = first; row < first + m_.rows; ++row) mean += rows_[row];
    mean /= static_cast<double>(m_.rows);
    threads.parallel_for(m_.rows, kFactorGrain, [&](std::size_t begin, std::size_t end) {
      for (std::size_t row = first + begin; row < first + end; ++row)
        p_.row_factors[row] = static_cast<float>(1 / std::sqrt(rows_[row] / mean));
    });
  }

  const Matrices& m_;
  const Progress& p_;
  double epsilon_;
  float* rows_;
  float* columns_;
};

void Adafactor::combine(Threads& threads, kernels::F32Products*, int round, const Hyperparameters& h,
                        const Whole& whole) const {
  const Matrices m(whole.kind.shape);
  const Progress p(m, whole.scratch);
  if (round == 0) {
    p.scalars[0] = rate_of(m, p, h);
    p.scalars[1] = 1 - p.scalars[0] * h.weight_decay;
    p.scalars[2] = second_decay(h.step);
    if (m.factored) Factors(m, p, of(h).number("epsilon"), whole.state).find(threads);
    return;
  }
  const double sum = pairwise_sum(std::span<const double>(p.blocks, m.blocks()));
  p.scalars[0] /=
      std::max(1.0, std::sqrt(sum / static_cast<double>(m.elements)) / own().number("clip_threshold"));
}

void Adafactor::apply(Threads& threads, const Hyperparameters& h, const Span& span) const {
  const Matrices m(span.whole.kind.shape);
  const Progress p(m, span.whole.scratch);
  const double beta1 = of(h).number("beta1");
  const AdafactorFactors factors = {rounded(p.scalars[0]), rounded(p.scalars[1]), rounded(beta1),
                                    rounded(1 - beta1)};
  const Normalizer update = normalizer(m, p, h, span);
  const bool with_momentum = has_momentum();
  for_each_range(threads, *this, h, span,
                 [&](const SpanRange& range) { apply_update(update, factors, with_momentum, range); });
}

}  // namespace

std::size_t WholeArray::elements() const {
  return std::accumulate(shape.begin(), shape.end(), std::size_t{1}, std::multiplies<>());
}

std::unique_ptr<Optimizer> make_adafactor(const Settings& settings, const Storage& storage) {
  return std::make_unique<Adafactor>(settings, storage);
}

}  // namespace sluice::optim
