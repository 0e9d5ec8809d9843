#pragma once
#include <cstddef>
#include <span>

#include "core/dtype.h"
#include "optim/elementwise.h"
#include "optim/optimizer.h"

// The loops of adafactor.cc, each over some elements of a parameter on one thread. Private to this room.
namespace sluice::optim {

// Rows shorter than this are added element by element, since vectors would be mostly empty.
inline constexpr std::size_t kShortRow = 32;
// Loops may read this many floats beyond the factor of the last column.
inline constexpr std::size_t kFactorPadding = 16;

// A parameter seen as a stack of matrices of its last two dimensions. A vector is one row.
struct Matrices {
  explicit Matrices(std::span<const std::size_t> shape);
  std::size_t elements, columns, rows, count;
  bool factored;

  std::size_t all_rows() const { return count * rows; }
  std::size_t all_columns() const { return count * columns; }
  std::size_t blocks() const;
  std::size_t matrix_elements() const { return rows * columns; }
  std::size_t matrix_of(std::size_t row) const { return row / rows; }
};

// How the sums of columns are split. One thread sums the rows of a tile in ascending order: some rows of one
// matrix, or several whole matrices. A matrix has at most kMostStrips strips; the tiles of a strip are added
// in ascending order, and the strips pairwise. The split depends on the parameter's shape alone.
struct Tiles {
  explicit Tiles(const Matrices& matrices);
  static constexpr std::size_t kMostStrips = 64;
  bool whole;            // a tile consists of whole matrices, each of which is one strip
  std::size_t rows;      // rows of a tile; the last tile of a matrix, or of the parameter, may have fewer
  std::size_t of_each;   // tiles of a matrix; 1 where a tile has whole matrices
  std::size_t count;     // tiles of the parameter
  std::size_t of_strip;  // tiles of a strip
  std::size_t strips;    // strips of a matrix
  std::size_t at_once;   // tiles whose sums are held before they are added to their strips

  std::size_t first_row(const Matrices& m, std::size_t tile) const;
  std::size_t end_row(const Matrices& m, std::size_t tile) const;
  std::size_t tile_of(const Matrices& m, std::size_t row) const;
  // Returns the index, over all matrices, of the strip of the tile's first matrix.
  std::size_t first_strip(const Matrices& m, std::size_t tile) const;
  // See Rounds::last_cut(): a part consists of whole strips, and so of whole rows.
  std::size_t last_cut(const Matrices& m, std::size_t element) const;
};

// Elements begin ... end - 1 of a parameter, all in one tile.
struct SumPart {
  const Matrices* matrices;
  std::size_t begin, end;
  ConstArray gradient;  // its data begin at element `begin`
  GradientRule rule;
  double* rows;        // sums of the parameter's rows
  double* columns;     // column sums of the tile's first matrix, followed by those of its next matrices
  std::size_t matrix;  // the tile's first matrix
};
// Applies the rule to the gradient, and adds its squares in f64 to the sums of their rows and columns. A
// row's sum adds the row's share of each block of the grid (in 16 lanes, as in kernels/reduce.h); short rows
// and columns are added element by element in ascending order.
void add_squares(const SumPart& part);

// Returns the sum of squares of at most kernels::kGridBlock values, in 16 lanes.
double square_sum(std::size_t n, ConstArray values);

// The inputs that turn a gradient into an update.
struct Normalizer {
  const Matrices* matrices;
  ConstArray gradient;  // of the span
  std::size_t first;    // index in the parameter of the span's first element
  GradientRule rule;
  // For matrices: 1 / sqrt(row / mean of rows), and 1 / sqrt(column), followed by kFactorPadding readable
  // floats.
  const float* rows = nullptr;
  const float* columns = nullptr;
  // For a vector:
  float* second = nullptr;    // its running average of squares, from its first element on
  float decay = 0, rate = 1;  // of that average; rate is 1 - decay
  float epsilon = 0;
};
// Returns the sum of squares of the update of `count` elements of one block, from element `at` of the span
// on.
double update_square_sum(const Normalizer& normalizer, std::size_t at, std::size_t count);

struct AdafactorFactors {
  float learning_rate;  // after clipping
  float keep;           // 1 - rate * weight_decay
  float blend, rest;    // beta1, 1 - beta1
};
// Applies the update to a range that begins at a block of the grid. Also updates a vector's average of
// squares.
void apply_update(const Normalizer& normalizer, const AdafactorFactors& factors, bool momentum,
                  const SpanRange& range);

}  // namespace sluice::optim
