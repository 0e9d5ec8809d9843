#pragma once
#include <memory>
#include <vector>

#include "models/graph/graph.h"

namespace sluice::models {

// Computes a rank's pieces of sequences one after another, each by its own op, so that every call of a kernel
// is the same on any rank. Of each array the pieces have equal parts, in their order. A piece's gradients of
// parameters, and its loss, are apart from those of the others: the former are added like those of
// micro-batches, the latter pairwise. REQUIRES: there is a piece; the ops differ only in their pieces.
std::unique_ptr<Op> in_row_pieces(std::vector<std::unique_ptr<Op>> pieces);

}  // namespace sluice::models
