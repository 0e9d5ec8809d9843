#pragma once
#include <algorithm>
#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include "comm/given.h"

// How a micro-batch is computed by several ranks together: pieces of its layers along the mesh's axis
// "tensor" (Megatron-LM, Shoeybi et al. 2019), and parts of its sequences along "sequence"; decisions 64
// and 65.
namespace sluice::models {

// Elements of a dimension that follow each other.
struct Range {
  std::size_t first = 0, size = 0;
  std::size_t end() const { return first + size; }
  bool operator==(const Range&) const = default;
};

// One of so many parts of a dimension, whose sizes differ by at most one.
constexpr Range part_of(std::size_t size, std::size_t parts, std::size_t index) {
  const std::size_t first = size * index / parts;
  return {first, size * (index + 1) / parts - first};
}

// Heads, hidden columns and the vocabulary are cut into pieces, of which each rank of the axis computes as
// many, that follow each other. What the pieces contribute to a sum is added pairwise over the pieces.
struct TensorCut {
  std::size_t pieces = 1;  // of a layer: a multiple of the ranks; one rank alone may have several, too
  std::size_t ranks = 1, rank = 0;

  bool is_cut() const { return pieces > 1; }
  std::size_t own_pieces() const { return pieces / ranks; }
  std::size_t first_piece() const { return rank * own_pieces(); }
  // Of what all ranks compute alike, one gives the gradient; the others write nothing that counts.
  bool gives() const { return rank == 0; }
  std::optional<std::vector<comm::Runs>> written_alike() const {
    return gives() ? std::nullopt : std::optional<std::vector<comm::Runs>>(std::in_place);
  }
  // The parts of a dimension that are this rank's, by own piece.
  std::vector<Range> parts(std::size_t size) const {
    std::vector<Range> own;
    for (std::size_t piece = first_piece(); piece < first_piece() + own_pieces(); ++piece)
      own.push_back(part_of(size, pieces, piece));
    return own;
  }
  bool operator==(const TensorCut&) const = default;
};

// How the length of each sequence is cut over the ranks of the mesh's axis "sequence" (context parallelism).
// A rank has two parts of a sequence, as far from the middle on either side, so that causal attention is as
// much work on each.
struct SequenceCut {
  std::size_t ranks = 1, rank = 0;
  bool operator==(const SequenceCut&) const = default;
};

// Rows of a micro-batch that follow each other on this rank and in the micro-batch: `rows` from `row` on,
// here; there from `whole_row` on, in sequences of `period` rows of which the first one here is at
// `position`.
struct RowPart {
  std::size_t row = 0, rows = 0, period = 0, position = 0, whole_row = 0;
};
// Those of this rank. REQUIRES: the length is a multiple of twice the ranks, where there are several.
std::vector<RowPart> row_parts(const SequenceCut& cut, std::size_t batch, std::size_t length);
inline std::size_t row_count(const std::vector<RowPart>& parts) {
  std::size_t rows = 0;
  for (const RowPart& part : parts) rows += part.rows;
  return rows;
}

// The heads of a piece, by their numbers in the layer.
struct HeadPiece {
  Range heads, kv_heads;
  std::size_t packed() const { return heads.size + 2 * kv_heads.size; }  // heads of queries, keys and values
};
// Those of this rank. Where there are fewer key/value heads than pieces, pieces that share one each compute
// it. REQUIRES: there are as many heads as pieces, and fewer key/value heads divide the pieces.
std::vector<HeadPiece> head_pieces(const TensorCut& cut, std::size_t heads, std::size_t kv_heads);

// The sum of the sizes.
inline std::size_t total(const std::vector<Range>& ranges) {
  std::size_t sum = 0;
  for (const Range& range : ranges) sum += range.size;
  return sum;
}

}  // namespace sluice::models
