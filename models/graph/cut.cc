#include "models/graph/cut.h"

namespace sluice::models {

std::vector<RowPart> row_parts(const SequenceCut& cut, std::size_t batch, std::size_t length) {
  if (!cut.is_cut()) return {{0, batch * length, length, 0, 0}};
  const std::size_t parts = 2 * cut.pieces, size = length / parts;
  std::vector<RowPart> own;
  for (std::size_t piece = cut.first_piece(); piece < cut.first_piece() + cut.own_pieces(); ++piece)
    for (std::size_t sequence = 0; sequence < batch; ++sequence)
      for (const std::size_t part : {piece, parts - 1 - piece})
        own.push_back({own.size() * size, size, size, part * size, sequence * length + part * size});
  return own;
}

std::vector<HeadPiece> head_pieces(const TensorCut& cut, std::size_t heads, std::size_t kv_heads) {
  const std::size_t group = heads / kv_heads;  // query heads that share a key/value head
  std::vector<HeadPiece> own;
  for (std::size_t piece = cut.first_piece(); piece < cut.first_piece() + cut.own_pieces(); ++piece) {
    if (kv_heads >= cut.pieces) {
      const Range kv = part_of(kv_heads, cut.pieces, piece);
      own.push_back({{kv.first * group, kv.size * group}, kv});
      continue;
    }
    const std::size_t sharing = cut.pieces / kv_heads, kv = piece / sharing;
    Range queries = part_of(group, sharing, piece % sharing);
    queries.first += kv * group;
    own.push_back({queries, {kv, 1}});
  }
  return own;
}

}  // namespace sluice::models
