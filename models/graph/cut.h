#pragma once
#include <algorithm>
#include <bit>
#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include "comm/given.h"
#include "kernels/attention.h"

// Several ranks compute a micro-batch together: pieces of its layers along the mesh's axis "tensor"
// (Megatron-LM, Shoeybi et al. 2019), and parts of its sequences along "sequence"; decisions 64 and 65.
namespace sluice::models {

// Consecutive indices of a dimension.
struct Range {
  std::size_t first = 0, size = 0;
  std::size_t end() const { return first + size; }
  bool operator==(const Range&) const = default;
};

// Returns part `index` of a dimension; sizes of parts differ by at most one.
constexpr Range part_of(std::size_t size, std::size_t parts, std::size_t index) {
  const std::size_t first = size * index / parts;
  return {first, size * (index + 1) / parts - first};
}

// How many parts, of as many as the axis has ranks, come to this rank's host from others: contributions to a
// sum, and parts that all ranks of the axis get.
struct PartsFromHosts {
  std::size_t added = 0, gathered = 0;
  bool operator==(const PartsFromHosts&) const = default;
};

// Tensor parallelism: heads, hidden columns and the vocabulary are cut into pieces. Each rank of the axis
// computes the same number of consecutive pieces. The pieces' contributions to a sum are added pairwise.
struct TensorCut {
  std::size_t pieces = 1;  // pieces of a layer, a multiple of the ranks; a single rank may have several, too
  std::size_t ranks = 1, rank = 0;
  PartsFromHosts from_hosts = {};

  bool is_cut() const { return pieces > 1; }
  std::size_t own_pieces() const { return pieces / ranks; }
  std::size_t first_piece() const { return rank * own_pieces(); }
  // Where all ranks compute the same gradient, only rank 0 contributes it; the others write nothing that
  // counts.
  bool gives() const { return rank == 0; }
  std::optional<std::vector<comm::Runs>> written_alike() const {
    return gives() ? std::nullopt : std::optional<std::vector<comm::Runs>>(std::in_place);
  }
  // Returns this rank's parts of a dimension, one for each of its pieces.
  std::vector<Range> parts(std::size_t size) const {
    std::vector<Range> own;
    for (std::size_t piece = first_piece(); piece < first_piece() + own_pieces(); ++piece)
      own.push_back(part_of(size, pieces, piece));
    return own;
  }
  bool operator==(const TensorCut&) const = default;
};

// Context parallelism: the length of each sequence is cut into pieces. Each rank of the mesh's axis
// "sequence" has the same number of consecutive pieces. A piece is two parts of a sequence, at equal
// distances from its middle, so that causal attention takes equal work on all pieces.
struct SequenceCut {
  std::size_t pieces = 1;  // a multiple of the ranks; a single rank may have several, too
  std::size_t ranks = 1, rank = 0;
  PartsFromHosts from_hosts = {};

  bool is_cut() const { return pieces > 1; }
  std::size_t own_pieces() const { return pieces / ranks; }
  std::size_t first_piece() const { return rank * own_pieces(); }
  // Returns the cut for a rank that has only one piece: this one of all.
  SequenceCut of_piece(std::size_t piece) const { return {pieces, pieces, piece}; }
  bool operator==(const SequenceCut&) const = default;
};
// A piece of a sequence has a multiple of this many tokens.
inline constexpr std::size_t kPieceTokens = 2 * kernels::kQueryGrain;
// Returns the largest power of 2 of pieces that sequences of this length can be cut into; 1: they stay whole.
inline std::size_t most_pieces(std::size_t length) {
  const std::size_t tiles = length / kPieceTokens;
  return tiles == 0 || length % kPieceTokens != 0 ? 1 : std::size_t{1} << std::countr_zero(tiles);
}

// Rows of a micro-batch that are consecutive on this rank and in the micro-batch. On this rank they are
// `rows` rows from `row` on. In the micro-batch they begin at `whole_row`, in sequences of `period` rows; the
// first one has position `position`.
struct RowPart {
  std::size_t row = 0, rows = 0, period = 0, position = 0, whole_row = 0;
};
// Returns this rank's row parts, piece by piece. REQUIRES: the length is a multiple of twice the pieces,
// where there are several.
std::vector<RowPart> row_parts(const SequenceCut& cut, std::size_t batch, std::size_t length);
inline std::size_t row_count(const std::vector<RowPart>& parts) {
  std::size_t rows = 0;
  for (const RowPart& part : parts) rows += part.rows;
  return rows;
}

// The heads of a piece, by their index in the layer.
struct HeadPiece {
  Range heads, kv_heads;
  std::size_t packed() const { return heads.size + 2 * kv_heads.size; }  // of queries, keys and values
};
// Returns this rank's heads, by piece. Where there are fewer key/value heads than pieces, several pieces
// compute the same one. REQUIRES: there are at least as many heads as pieces; if key/value heads are fewer
// than pieces, their number divides that of the pieces.
std::vector<HeadPiece> head_pieces(const TensorCut& cut, std::size_t heads, std::size_t kv_heads);

inline std::size_t total(const std::vector<Range>& ranges) {
  std::size_t sum = 0;
  for (const Range& range : ranges) sum += range.size;
  return sum;
}

}  // namespace sluice::models
