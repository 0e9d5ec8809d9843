#include "models/graph/cut.h"

namespace sluice::models {

std::vector<HeadPiece> head_pieces(const TensorCut& cut, std::size_t heads, std::size_t kv_heads) {
  const std::size_t group = heads / kv_heads;  // heads of queries that share one of keys and values
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
