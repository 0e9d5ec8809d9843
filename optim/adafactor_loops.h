#pragma once
#include <cstddef>
#include <span>

#include "core/dtype.h"
#include "optim/elementwise.h"
#include "optim/optimizer.h"

// The loops of adafactor.cc over parts of a parameter, each by one thread. Private to this room.
namespace sluice::optim {

// Of shorter rows each element is added on its own: they have less than vectors need.
inline constexpr std::size_t kShortRow = 32;
// What loops may read beyond the factors of the last column.
inline constexpr std::size_t kFactorPadding = 16;

// A parameter as matrices that lie one after another: the last two dimensions. A vector is one row.
struct Matrices {
  explicit Matrices(std::span<const std::size_t> shape);
  std::size_t elements, columns, rows, count;
  bool factored;

  std::size_t all_rows() const { return count * rows; }
  std::size_t all_columns() const { return count * columns; }
  std::size_t blocks() const;
  std::size_t matrix_elements() const { return rows * columns; }
  std::size_t matrix_of(std::size_t row) const { return row / rows; }
  std::size_t column_at(std::size_t element) const {  // of all matrices
    return element / (rows * columns) * columns + element % columns;
  }
};

// How sums of columns are cut. A tile is rows that one thread sums, in ascending order: some of one matrix,
// or several whole ones. A strip is tiles of a matrix, at most kMostStrips of each, that are added in
// ascending order; strips are added pairwise. All follow from the parameter's shape alone.
struct Tiles {
  explicit Tiles(const Matrices& matrices);
  static constexpr std::size_t kMostStrips = 64;
  bool whole;                  // matrices in a tile: each is one strip then
  std::size_t rows;            // of a tile; the last of a matrix, or of all, may have less
  std::size_t of_each, count;  // tiles of a matrix (whole: 1), of all
  std::size_t of_strip;        // tiles
  std::size_t strips;          // of each matrix
  std::size_t at_once;         // whose sums are kept until they are added to those of the tiles before

  std::size_t first_row(const Matrices& m, std::size_t tile) const;
  std::size_t end_row(const Matrices& m, std::size_t tile) const;
  std::size_t tile_of(const Matrices& m, std::size_t row) const;
  // Among the strips of all matrices.
  std::size_t first_strip(const Matrices& m, std::size_t tile) const;
  // See Rounds::last_cut(): a part has whole strips, and so whole rows.
  std::size_t last_cut(const Matrices& m, std::size_t element) const;
};

// Elements begin ... end of a parameter, all in one tile.
struct SumPart {
  const Matrices* matrices;
  std::size_t begin, end;
  ConstArray gradient;  // from element `begin` on
  GradientRule rule;
  double* rows;        // of the parameter
  double* columns;     // of the tile's strip, and where it has several matrices of those after it
  std::size_t matrix;  // the tile's first
};
// Adds the squares of ruled gradients, in f64, to the sums of their rows and columns. A row's sum goes by
// what each block has of it (in 16 lanes, as in kernels/reduce.h); of a short row, and of columns, in
// ascending order.
void add_squares(const SumPart& part);

// Of at most kernels::kGridBlock values, in 16 lanes.
double square_sum(std::size_t n, ConstArray values);

// What makes an update of a gradient.
struct Normalizer {
  const Matrices* matrices;
  ConstArray gradient;  // of the span
  std::size_t first;    // element of the parameter that the span begins with
  GradientRule rule;
  // Of matrices: 1 / sqrt(row / mean of rows), 1 / sqrt(column); kFactorPadding more can be read.
  const float* rows = nullptr;
  const float* columns = nullptr;
  // Of a vector.
  float* second = nullptr;                 // from the parameter's first element on
  float decay = 0, rate = 1, epsilon = 0;  // of the average; 1 - decay
};
// The squares of the update of `count` elements of one block, from `at` in the span on.
double update_square_sum(const Normalizer& normalizer, std::size_t at, std::size_t count);

struct AdafactorFactors {
  float learning_rate;  // clipped
  float keep;           // 1 - rate * weight_decay
  float blend, rest;    // beta1, 1 - beta1
};
// Applies the update to a range, which begins a block. Of a vector the second moment is updated as well.
void apply_update(const Normalizer& normalizer, const AdafactorFactors& factors, bool momentum,
                  const SpanRange& range);

}  // namespace sluice::optim
