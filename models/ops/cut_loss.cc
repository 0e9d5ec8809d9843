#include <algorithm>

#include "core/error.h"
#include "kernels/elementwise.h"
#include "kernels/loss.h"
#include "models/graph/context.h"
#include "models/ops/loss.h"
#include "models/ops/piece_sums.h"

namespace sluice::models {
namespace {

using kernels::Product;
using kernels::RowStatistics;

constexpr std::size_t kStatistics = sizeof(RowStatistics) / sizeof(float);  // f32 values for a row of a piece

OpSpec cut_loss_spec(std::string name, ValueId x, const LossShape& shape) {
  OpSpec spec{.name = std::move(name), .inputs = {x}, .saved = {x}, .parameters = {shape.weight}};
  spec.parameters[0].writes.emplace();
  for (const auto& [first, size] : shape.cut.parts(shape.vocabulary))
    spec.parameters[0].writes->push_back({first * shape.width, size * shape.width});
  const double classes = static_cast<double>(total(shape.cut.parts(shape.vocabulary)));
  spec.forward_flops = 2.0 * static_cast<double>(shape.rows * shape.width) * classes;
  spec.backward_flops = 2 * spec.forward_flops;
  spec.weights_flops = spec.forward_flops;
  spec.backward_bytes = 3.0 * static_cast<double>(shape.rows * sizeof(float)) * classes;
  if (shape.cut.ranks == 1) return spec;
  // As with flops, forward's part of backward counts as forward's.
  const std::size_t rows = logit_rows(shape);
  for (std::size_t first = 0; first < shape.rows; first += rows) {
    const std::size_t here = std::min(rows, shape.rows - first);
    spec.forward_calls.push_back({here * shape.cut.pieces * kStatistics, true});
    spec.backward_calls.push_back({.values = here * shape.width, .beside_weights = true});
  }
  return spec;
}

class CutLoss : public Op {
 public:
  CutLoss(std::string name, ValueId x, const LossShape& shape)
      : Op(cut_loss_spec(std::move(name), x, shape)),
        shape_(shape),
        parts_(shape.cut.parts(shape.vocabulary)),
        rows_(logit_rows(shape)) {}

  std::size_t forward_workspace(kernels::ProductSurvey& products) const override {
    std::size_t bytes = 0;
    for (const std::size_t rows : {rows_, last_rows()})
      for (const Range& part : parts_)
        bytes = std::max(bytes, products.workspace(logits_product(rows, part, {}, {}, {})));
    return memory().end + bytes;
  }

  std::size_t backward_workspace(kernels::ProductSurvey& products) const override {
    std::size_t bytes = forward_workspace(products);
    for (const std::size_t rows : {rows_, last_rows()})
      for (const Range& part : parts_) {
        const std::size_t to_input = products.workspace(input_product(rows, part, {}, {}, {}));
        const std::size_t to_weight = products.workspace(weight_product(rows, part, {}, {}, nullptr));
        bytes = std::max(bytes, memory().end + sums(rows).bytes() + std::max(to_input, to_weight));
      }
    return bytes;
  }

  std::size_t weights_workspace(kernels::ProductSurvey& products) const override {
    std::size_t bytes = 0;
    for (const std::size_t rows : {rows_, last_rows()})
      for (const Range& part : parts_)
        bytes = std::max(bytes, products.workspace(weight_product(rows, part, {}, {}, nullptr)));
    return bytes;
  }

  void forward(const OpContext& context) const override {
    ensure(context.run().logits.empty(), "logits are asked of a model whose vocabulary is cut over ranks");
    for_each_tile(context, [&](const Tile& tile) { add_losses(context, tile, false); });
  }

  void backward(const OpContext& context) const override {
    engine::GradientTarget target = context.gradient(0);
    for_each_tile(context, [&](const Tile& tile) {
      add_losses(context, tile, true);
      make_gradients(context, tile);
      add_gradients(context, tile, target);
      target.accumulate = true;
    });
  }

 private:
  // The layout of a tile's arrays in the workspace.
  struct Memory {
    std::size_t logits, statistics, factors, losses, end;
  };
  // Rows that are computed together.
  struct Tile {
    std::size_t first, rows;
    std::span<const std::int32_t> targets;
    float *logits, *factors, *losses;  // logits, factors: by own piece
    RowStatistics* statistics;         // [pieces, rows]
    void* workspace;
  };

  Memory memory() const {
    Memory memory{};
    std::size_t end = 0;
    const auto place = [&](std::size_t floats) {
      return std::exchange(end, end + round_up(floats * sizeof(float), kAlignment));
    };
    memory.logits = place(rows_ * total(parts_));
    memory.statistics = place(rows_ * shape_.cut.pieces * kStatistics);
    memory.factors = place(rows_ * parts_.size());
    memory.losses = place(rows_);
    memory.end = end;
    return memory;
  }
  std::size_t last_rows() const { return (shape_.rows - 1) % rows_ + 1; }
  PieceSums sums(std::size_t rows) const { return {shape_.cut, rows * shape_.width}; }

  template <class Body>
  void for_each_tile(const OpContext& context, Body&& body) const {
    auto* const scratch = static_cast<std::byte*>(context.scratch());
    const Memory memory = this->memory();
    const auto floats = [&](std::size_t offset) { return reinterpret_cast<float*>(scratch + offset); };
    context.run().loss = 0;
    for (std::size_t first = 0; first < shape_.rows; first += rows_) {
      const std::size_t rows = std::min(rows_, shape_.rows - first);
      body(Tile{first, rows, context.run().targets.subspan(first, rows), floats(memory.logits),
                floats(memory.factors), floats(memory.losses),
                reinterpret_cast<RowStatistics*>(scratch + memory.statistics), scratch + memory.end});
    }
  }

  template <class Body>
  void for_each_part(const Tile& tile, Body&& body) const {
    float* logits = tile.logits;
    for (std::size_t i = 0; i < parts_.size(); ++i) {
      body(i, parts_[i], logits);
      logits += tile.rows * parts_[i].size;
    }
  }

  // keep: leaves the exponentials of the logits for make_gradients().
  void add_losses(const OpContext& context, const Tile& tile, bool keep) const {
    const std::size_t own = shape_.cut.first_piece();
    for_each_part(tile, [&](std::size_t i, const Range& part, float* logits) {
      const Array x = context.input(0).at(tile.first * shape_.width);
      kernels::multiply(context.library(), context.threads(),
                        logits_product(tile.rows, part, x, context.parameter(0), {logits}), tile.workspace);
      kernels::cross_entropy_statistics(context.threads(), part.first, part.size, tile.targets, logits, keep,
                                        tile.statistics + (own + i) * tile.rows);
    });
    if (shape_.cut.ranks > 1)
      context.run().layers.tensor->all_gather("logits of " + spec().name,
                                              {reinterpret_cast<float*>(tile.statistics), Dtype::kF32},
                                              shape_.cut.pieces * tile.rows * kStatistics);
    kernels::combine_statistics(shape_.cut.pieces, tile.targets, tile.statistics, own, parts_.size(),
                                keep ? tile.factors : nullptr, tile.losses);
    context.run().loss += kernels::sum_in_order({tile.losses, tile.rows});
  }

  void make_gradients(const OpContext& context, const Tile& tile) const {
    for_each_part(tile, [&](std::size_t i, const Range& part, float* logits) {
      kernels::cross_entropy_gradient(context.threads(), part.first, part.size, tile.targets,
                                      tile.factors + i * tile.rows, context.run().gradient_scale, logits);
      kernels::narrow_in_place(context.threads(), tile.rows * part.size, logits, shape_.type);
    });
  }

  // The ranks sum the gradients of the input while each computes gradients of weights.
  void add_gradients(const OpContext& context, const Tile& tile, const engine::GradientTarget& target) const {
    std::vector<const float*> gradients;
    for_each_part(tile, [&](std::size_t, const Range&, float* logits) { gradients.push_back(logits); });
    const PieceSums sums = this->sums(tile.rows);
    auto* const workspace = static_cast<std::byte*>(tile.workspace) + sums.bytes();
    const Array sum = sums.add(
        context, tile.workspace, "gradients of " + spec().name,
        [&](std::size_t i, Array into) {
          kernels::multiply(context.library(), context.threads(),
                            input_product(tile.rows, parts_[i], {gradients[i]}, context.parameter(0), into),
                            workspace);
        },
        [&] { weight_gradient(context, tile, target, workspace); });
    kernels::convert(context.threads(), tile.rows * shape_.width, sum,
                     context.input_gradient(0).at(tile.first * shape_.width));
  }

  void weight_gradient(const OpContext& context, const Tile& tile, const engine::GradientTarget& target,
                       void* workspace) const {
    for_each_part(tile, [&](std::size_t, const Range& part, float* logits) {
      const Array x = context.input(0).at(tile.first * shape_.width);
      Product product = weight_product(tile.rows, part, {logits}, x, target.data);
      product.accumulate = target.accumulate;
      kernels::multiply(context.library(), context.threads(), product, workspace);
    });
  }

  // Gives an array its type when workspace is sized and there is no memory yet.
  ConstArray typed(ConstArray array) const { return {array.data, shape_.type}; }

  Product logits_product(std::size_t rows, const Range& part, ConstArray x, ConstArray weight,
                         Array logits) const {
    Product product{rows,  part.size, shape_.width, typed(x), typed(weight).at(part.first * shape_.width),
                    logits};
    product.transpose_b = true;
    return product;
  }

  Product input_product(std::size_t rows, const Range& part, ConstArray dlogits, ConstArray weight,
                        Array dx) const {
    return {rows, shape_.width, part.size, typed(dlogits), typed(weight).at(part.first * shape_.width), dx};
  }

  Product weight_product(std::size_t rows, const Range& part, ConstArray dlogits, ConstArray x,
                         float* dweight) const {
    Product product{part.size,      shape_.width, rows,
                    typed(dlogits), typed(x),     {dweight + part.first * shape_.width, Dtype::kF32}};
    product.transpose_a = true;
    return product;
  }

  LossShape shape_;
  std::vector<Range> parts_;  // of the vocabulary
  std::size_t rows_;          // of a tile
};

}  // namespace

std::unique_ptr<Op> make_cut_loss(std::string name, ValueId x, const LossShape& shape) {
  return std::make_unique<CutLoss>(std::move(name), x, shape);
}

}  // namespace sluice::models
