#include "models/ops/loss.h"

#include <algorithm>

#include "kernels/elementwise.h"
#include "kernels/loss.h"
#include "models/graph/context.h"

namespace sluice::models {
namespace {

using kernels::Product;

OpSpec loss_spec(std::string name, ValueId x, const LossShape& shape) {
  OpSpec spec{.name = std::move(name), .inputs = {x}, .saved = {x}, .parameters = {shape.weight}};
  spec.forward_flops =
      2.0 * static_cast<double>(shape.rows * shape.width) * static_cast<double>(shape.vocabulary);
  spec.backward_flops = 2 * spec.forward_flops;
  spec.backward_bytes =
      3.0 * static_cast<double>(shape.rows * sizeof(float)) * static_cast<double>(shape.vocabulary);
  return spec;
}

// Rows that are computed together, and their memory.
struct Tile {
  std::size_t first = 0, rows = 0;
  float* logits = nullptr;
  float* losses = nullptr;
  void* workspace = nullptr;
};

class Loss : public Op {
 public:
  Loss(std::string name, ValueId x, const LossShape& shape)
      : Op(loss_spec(std::move(name), x, shape)), shape_(shape) {}

  std::size_t forward_workspace(kernels::ProductSurvey& products) const override {
    std::size_t bytes = 0;
    for (const std::size_t rows : {logit_rows(shape_), last_tile_rows(), std::size_t{1}})
      bytes = std::max(bytes, products.workspace(logits_product(rows, {}, {}, {})));
    return tile_bytes() + bytes;
  }

  std::size_t backward_workspace(kernels::ProductSurvey& products) const override {
    std::size_t bytes = forward_workspace(products);
    for (const std::size_t rows : {logit_rows(shape_), last_tile_rows()}) {
      const std::size_t to_input = products.workspace(input_product(rows, {}, {}, {}));
      const std::size_t to_weight = products.workspace(weight_product(rows, {}, {}, nullptr));
      bytes = std::max(bytes, tile_bytes() + std::max(to_input, to_weight));
    }
    return bytes;
  }

  void forward(const OpContext& context) const override {
    Execution& run = context.run();
    if (!run.logits.empty()) return logits_of_row(context);
    run.loss = 0;
    for_each_tile(context, [&](const Tile& tile) {
      compute_logits(context, tile);
      kernels::cross_entropy(context.threads(), shape_.vocabulary, run.targets.subspan(tile.first, tile.rows),
                             tile.logits, false, 0, tile.losses);
      run.loss += kernels::sum_in_order({tile.losses, tile.rows});
    });
  }

  void backward(const OpContext& context) const override {
    Execution& run = context.run();
    run.loss = 0;
    engine::GradientTarget target = context.gradient(0);
    for_each_tile(context, [&](const Tile& tile) {
      compute_logits(context, tile);
      kernels::cross_entropy(context.threads(), shape_.vocabulary, run.targets.subspan(tile.first, tile.rows),
                             tile.logits, true, run.gradient_scale, tile.losses);
      run.loss += kernels::sum_in_order({tile.losses, tile.rows});
      compute_gradients(context, tile, target);
      target.accumulate = true;
    });
  }

 private:
  std::size_t logits_bytes() const {
    return round_up(logit_rows(shape_) * shape_.vocabulary * sizeof(float), kAlignment);
  }
  std::size_t last_tile_rows() const {
    const std::size_t at_once = logit_rows(shape_), left = shape_.rows % at_once;
    return left == 0 ? at_once : left;
  }
  std::size_t tile_bytes() const {
    return logits_bytes() + round_up(logit_rows(shape_) * sizeof(float), kAlignment);
  }

  // Gives an array its type when workspace is sized and there is no memory yet.
  ConstArray typed(ConstArray array) const { return {array.data, shape_.type}; }

  Product logits_product(std::size_t rows, ConstArray x, ConstArray weight, Array logits) const {
    Product product{rows, shape_.vocabulary, shape_.width, typed(x), typed(weight), logits};
    product.transpose_b = true;
    return product;
  }

  Product input_product(std::size_t rows, ConstArray dlogits, ConstArray weight, Array dx) const {
    return {rows, shape_.width, shape_.vocabulary, typed(dlogits), typed(weight), {dx.data, shape_.type}};
  }

  Product weight_product(std::size_t rows, ConstArray dlogits, ConstArray x, float* dweight) const {
    Product product{shape_.vocabulary, shape_.width, rows, typed(dlogits), typed(x), {dweight, Dtype::kF32}};
    product.transpose_a = true;
    return product;
  }

  template <class Body>
  void for_each_tile(const OpContext& context, Body&& body) const {
    auto* scratch = static_cast<std::byte*>(context.scratch());
    Tile tile;
    tile.logits = reinterpret_cast<float*>(scratch);
    tile.losses = reinterpret_cast<float*>(scratch + logits_bytes());
    tile.workspace = scratch + tile_bytes();
    const std::size_t at_once = logit_rows(shape_);
    for (tile.first = 0; tile.first < shape_.rows; tile.first += at_once) {
      tile.rows = std::min(at_once, shape_.rows - tile.first);
      body(tile);
    }
  }

  void compute_logits(const OpContext& context, const Tile& tile) const {
    const Array x = context.input(0).at(tile.first * shape_.width);
    const Product product = logits_product(tile.rows, x, context.parameter(0), {tile.logits});
    kernels::multiply(context.library(), context.threads(), product, tile.workspace);
  }

  void compute_gradients(const OpContext& context, const Tile& tile,
                         const engine::GradientTarget& target) const {
    kernels::narrow_in_place(context.threads(), tile.rows * shape_.vocabulary, tile.logits, shape_.type);
    const ConstArray dlogits{tile.logits, shape_.type};
    const Array x = context.input(0).at(tile.first * shape_.width);
    const Array dx = context.input_gradient(0).at(tile.first * shape_.width);
    kernels::multiply(context.library(), context.threads(),
                      input_product(tile.rows, dlogits, context.parameter(0), dx), tile.workspace);
    Product to_weight = weight_product(tile.rows, dlogits, x, target.data);
    to_weight.accumulate = target.accumulate;
    kernels::multiply(context.library(), context.threads(), to_weight, tile.workspace);
  }

  void logits_of_row(const OpContext& context) const {
    const Execution& run = context.run();
    const Array x = context.input(0).at(run.logits_row * shape_.width);
    auto* workspace = static_cast<std::byte*>(context.scratch()) + tile_bytes();
    const Product product = logits_product(1, x, context.parameter(0), {run.logits.data()});
    kernels::multiply(context.library(), context.threads(), product, workspace);
  }

  LossShape shape_;
};

}  // namespace

std::size_t logit_rows(const LossShape& shape) {
  const std::size_t most = std::max<std::size_t>(
      {16, kLogitsBytes / (shape.vocabulary * sizeof(float)), std::min(kLogitRows, shape.width / 2)});
  const std::size_t tiles = divide_up(shape.rows, most);
  return std::min(shape.rows, round_up(divide_up(shape.rows, tiles), 16));
}

std::unique_ptr<Op> make_loss(std::string name, ValueId x, const LossShape& shape) {
  if (shape.cut.is_cut()) return make_cut_loss(std::move(name), x, shape);
  return std::make_unique<Loss>(std::move(name), x, shape);
}

}  // namespace sluice::models
