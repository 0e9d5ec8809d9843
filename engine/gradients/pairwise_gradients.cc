#include "engine/gradients/pairwise_gradients.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "kernels/elementwise.h"

namespace sluice::engine {
namespace {
constexpr std::uint64_t bit(std::size_t height) { return std::uint64_t{1} << height; }
}  // namespace

PairwiseGradients::PairwiseGradients(const Layout& layout, MicroBatchSums sums, Gradients& gradients)
    : layout_(layout), sums_(std::move(sums)), gradients_(gradients), stacks_(layout.parameters()) {}

Array PairwiseGradients::at(ParameterId parameter, std::size_t height) const {
  const UnitId unit = layout_.location(parameter).unit;
  return {gradients_.sum(unit, 0, height, 0) + gradients_.offset(parameter, 0), Dtype::kF32};
}

// Adds to the sum at that height, or begins it.
void PairwiseGradients::put(Threads& threads, ParameterId parameter, std::size_t height,
                            ConstArray gradient) {
  std::uint64_t& present = stacks_[parameter].present;
  const std::size_t n = layout_.location(parameter).elements;
  if ((present & bit(height)) != 0)
    kernels::add(threads, n, at(parameter, height), gradient, at(parameter, height));
  else
    kernels::convert(threads, n, gradient, at(parameter, height));
  present |= bit(height);
}

// Adds the next micro-batch; null: it has no gradient. A gradient that is merged into the sum below it at
// once needs no buffer of its own.
void PairwiseGradients::push(Threads& threads, ParameterId parameter, const ConstArray* gradient) {
  Stack& stack = stacks_[parameter];
  std::size_t merges = sums_.merges(stack.pushed), top = sums_.height(stack.pushed);
  ++stack.pushed;
  if (merges > 0) --merges, --top;
  if (gradient != nullptr) put(threads, parameter, top, *gradient);
  for (; merges > 0; --merges, --top) {
    if ((stack.present & bit(top)) != 0) put(threads, parameter, top - 1, at(parameter, top));
    stack.present &= ~bit(top);
  }
}

void PairwiseGradients::add(Threads& threads, ParameterId parameter, ConstArray gradient) {
  while (stacks_[parameter].pushed < ended_) push(threads, parameter, nullptr);
  push(threads, parameter, &gradient);
}

void PairwiseGradients::complete(Threads& threads, ParameterId parameter) {
  Stack& stack = stacks_[parameter];
  while (stack.pushed < ended_) push(threads, parameter, nullptr);
  for (std::size_t height = 0; height < sums_.height(count()); ++height)
    if ((stack.present & bit(height)) == 0)
      kernels::fill(threads, layout_.location(parameter).elements, -0.0f, at(parameter, height));
}

std::size_t PairwiseGradients::sums_of(UnitId unit) const {
  std::uint64_t present = 0;
  for (ParameterId p = layout_.first_parameter(unit); p < layout_.end_parameter(unit); ++p)
    present |= stacks_[p].present;
  return static_cast<std::size_t>(std::bit_width(present));
}

void PairwiseGradients::begin_step() {
  std::ranges::fill(stacks_, Stack{});
  ended_ = 0;
}

}  // namespace sluice::engine
