#include "models/ops/piece_sums.h"

#include <algorithm>

#include "core/bytes.h"
#include "core/pairwise.h"
#include "kernels/elementwise.h"

namespace sluice::models {

PieceSums::PieceSums(const TensorCut& cut, std::size_t elements)
    : PieceSums(cut.ranks > 1 ? &LayerRanks::tensor : nullptr, cut.own_pieces(), elements) {}

PieceSums::PieceSums(const SequenceCut& cut, std::size_t elements)
    : PieceSums(cut.ranks > 1 ? &LayerRanks::sequence : nullptr, cut.own_pieces(), elements) {}

PieceSums::PieceSums(Axis others, std::size_t own_pieces, std::size_t elements)
    : others_(others), own_pieces_(own_pieces), elements_(elements) {
  PairwiseStack stack;
  for (std::size_t piece = 0; piece < own_pieces; ++piece) {
    most_ = std::max(most_, stack.height() + 1);
    stack.push();
  }
}

std::size_t PieceSums::buffer_elements() const {
  return round_up(elements_ * sizeof(float), kAlignment) / sizeof(float);
}

std::size_t PieceSums::bytes() const { return most_ * buffer_elements() * sizeof(float); }

Array PieceSums::add(const OpContext& context, void* buffers, const std::string& name, const Compute& compute,
                     const std::function<void()>& beside) const {
  const auto buffer = [&](std::size_t i) {
    return Array{static_cast<float*>(buffers)}.at(i * buffer_elements());
  };
  PairwiseStack stack;
  std::size_t height = 0;
  const auto merge = [&](std::size_t times) {
    for (; times > 0; --times) {
      --height;
      kernels::add(context.threads(), elements_, buffer(height - 1), buffer(height), buffer(height - 1));
    }
  };
  for (std::size_t piece = 0; piece < own_pieces_; ++piece) {
    compute(piece, buffer(height++));
    merge(stack.push());
  }
  merge(stack.carries());
  if (others_ != nullptr)
    (context.run().layers.*others_)->all_reduce(name, {buffer(0).f32(), elements_}, beside);
  else if (beside)
    beside();
  return buffer(0);
}

}  // namespace sluice::models
