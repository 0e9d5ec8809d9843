#include "models/ops/linear.h"

#include <algorithm>
#include <functional>

#include "kernels/elementwise.h"
#include "kernels/reduce.h"
#include "models/graph/context.h"
#include "models/ops/piece_sums.h"

namespace sluice::models {
namespace {

using kernels::Product;

std::size_t biased_width(const LinearShape& shape) {
  std::size_t width = 0;
  for (const LinearPart& part : shape.parts) width += shape.weights[part.weight].bias ? part.columns.size : 0;
  return width;
}

// Returns this rank's columns of a weight or its bias.
std::vector<comm::Runs> written_columns(const LinearShape& shape, std::size_t weight, bool bias) {
  std::vector<comm::Runs> runs;
  for (const LinearPart& part : shape.parts) {
    if (part.weight != weight) continue;
    const auto [first, size] = part.columns;
    if (bias)
      runs.push_back({first, size});
    else if (shape.transposed)
      runs.push_back({first * shape.in, size * shape.in});
    else
      runs.push_back({first, size, shape.weights[weight].width, shape.in});
  }
  return runs;
}

OpSpec linear_spec(std::string name, ValueId x, ValueId y, const LinearShape& shape) {
  OpSpec spec{.name = std::move(name),
              .inputs = {x},
              .outputs = {y},
              .saved = {x},
              .adds_gradients = true,
              .changes_output_gradients = !shape.turned.empty(),
              .splits_backward = true};
  for (std::size_t i = 0; i < shape.weights.size(); ++i) {
    const LinearWeight& weight = shape.weights[i];
    spec.parameters.push_back({weight.weight, 0, written_columns(shape, i, false)});
    if (weight.bias) spec.parameters.push_back({*weight.bias, 0, written_columns(shape, i, true)});
  }
  for (const LinearPart& part : shape.parts)
    spec.forward_flops += 2.0 * static_cast<double>(shape.rows * shape.in * part.columns.size);
  spec.backward_flops = 2 * spec.forward_flops;
  spec.backward_bytes = static_cast<double>(shape.rows * biased_width(shape) * size_of(shape.type));
  spec.weights_flops = spec.forward_flops;
  spec.weights_bytes = spec.backward_bytes;
  for (const auto& [rotary, offset] : shape.turned) {
    const std::size_t turned = shape.rows * rotary.heads * rotary.head_width;
    const double bytes = 2.0 * static_cast<double>(turned * size_of(shape.type));
    spec.forward_bytes += bytes;
    spec.backward_bytes += bytes;
  }
  if (shape.cut.ranks > 1) spec.backward_calls = {{.values = shape.rows * shape.in, .beside_weights = true}};
  return spec;
}

class Linear : public Op {
 public:
  Linear(std::string name, ValueId x, ValueId y, const LinearShape& shape)
      : Op(linear_spec(std::move(name), x, y, shape)),
        shape_(shape),
        input_sums_(shape.cut, shape.rows * shape.in) {
    std::size_t parameter = 0;
    for (const LinearWeight& weight : shape_.weights) {
      parameters_.push_back(parameter);
      parameter += weight.bias ? 2 : 1;
    }
  }

  std::size_t forward_workspace(kernels::ProductSurvey& products) const override {
    std::size_t bytes = 0;
    for (const LinearPart& part : shape_.parts) {
      bytes = std::max(bytes, products.workspace(forward_product(part, blank(), blank(), blank())));
    }
    return bytes;
  }

  std::size_t backward_workspace(kernels::ProductSurvey& products) const override {
    std::size_t bytes = 0;
    for (const LinearPart& part : shape_.parts)
      bytes = std::max(bytes, products.workspace(input_product(part, blank(), blank(), input_sum_type())));
    return input_sums_bytes() + std::max(bytes, weights_workspace(products));
  }

  std::size_t weights_workspace(kernels::ProductSurvey& products) const override {
    std::size_t bytes = 0;
    for (const LinearPart& part : shape_.parts)
      bytes = std::max(bytes, products.workspace(weight_product(part, blank(), blank(), {})));
    if (biased_width(shape_) == 0) return bytes;
    for (const LinearPart& part : shape_.parts)
      bytes = std::max(bytes, sums_bytes() + kernels::column_sum_workspace(shape_.rows, part.stride));
    return bytes;
  }

  void forward(const OpContext& context) const override {
    const Array y = context.output(0);
    for (const LinearPart& part : shape_.parts) {
      Product product =
          forward_product(part, context.input(0), context.parameter(parameters_[part.weight]), y);
      if (shape_.weights[part.weight].bias)
        product.bias = context.parameter(parameters_[part.weight] + 1).at(part.columns.first).data;
      kernels::multiply(context.library(), context.threads(), product, context.scratch());
    }
    turn_output(context, context.run().first_position, false, y);
  }

  // The ranks sum the gradients of the input while each computes gradients of weights.
  void backward(const OpContext& context) const override {
    input_gradients(context, [&] { weight_gradients(context, context.scratch_from(input_sums_bytes())); });
  }
  void backward_inputs(const OpContext& context) const override {
    input_gradients(context, [] {});
  }
  void backward_weights(const OpContext& context) const override {
    weight_gradients(context, context.scratch());
  }

 private:
  void input_gradients(const OpContext& context, const std::function<void()>& beside) const {
    turn_output(context, 0, true, context.output_gradient(0));
    if (shape_.cut.is_cut()) return add_input_gradients(context, beside);
    bool first = true;
    for (const LinearPart& part : shape_.parts) {
      multiply_to_input(context, part, context.input_gradient(0), context.adds(0) || !first,
                        context.scratch());
      first = false;
    }
    beside();
  }

  void weight_gradients(const OpContext& context, void* workspace) const {
    const Array dy = context.output_gradient(0);
    for (std::size_t i = 0; i < shape_.weights.size(); ++i) {
      const engine::GradientTarget target = context.gradient(parameters_[i]);
      for (const LinearPart& part : shape_.parts) {
        if (part.weight != i) continue;
        Product product = weight_product(part, context.input(0), dy, {target.data, Dtype::kF32});
        product.accumulate = target.accumulate;
        kernels::multiply(context.library(), context.threads(), product, workspace);
      }
    }
    if (biased_width(shape_) > 0) bias_gradients(context, dy, workspace);
  }

  void turn_output(const OpContext& context, std::size_t first_position, bool inverse, Array y) const {
    for (const auto& [rotary, offset] : shape_.turned)
      turn(context.threads(), rotary, shape_.row_parts, first_position, inverse, y.at(offset));
  }

  void multiply_to_input(const OpContext& context, const LinearPart& part, Array dx, bool accumulate,
                         void* workspace) const {
    Product product =
        input_product(part, context.output_gradient(0), context.parameter(parameters_[part.weight]), dx);
    product.accumulate = accumulate;
    kernels::multiply(context.library(), context.threads(), product, workspace);
  }

  void add_input_gradients(const OpContext& context, const std::function<void()>& beside) const {
    void* const workspace = context.scratch_from(input_sums_bytes());
    const Array sum = input_sums_.add(
        context, context.scratch(), "gradients of " + spec().name,
        [&](std::size_t piece, Array into) {
          bool first = true;
          for (const LinearPart& part : shape_.parts) {
            if (part.piece != piece) continue;
            multiply_to_input(context, part, into, !first, workspace);
            first = false;
          }
        },
        beside);
    const Array dx = context.input_gradient(0);
    if (context.adds(0))
      kernels::add(context.threads(), shape_.rows * shape_.in, dx, sum, dx);
    else
      kernels::convert(context.threads(), shape_.rows * shape_.in, sum, dx);
  }

  // A placeholder where only the sizes of products count.
  Array blank() const { return {nullptr, shape_.type}; }
  std::size_t input_sums_bytes() const { return shape_.cut.is_cut() ? input_sums_.bytes() : 0; }
  Array input_sum_type() const { return shape_.cut.is_cut() ? Array{} : blank(); }

  // A piece's parts with biases are adjacent in each row, so that one sum over rows serves them all.
  bool is_one_part() const { return shape_.parts.size() == 1 && !shape_.cut.is_cut(); }
  std::size_t sums_bytes() const {
    std::size_t widest = 0;
    for (const LinearPart& part : shape_.parts) widest = std::max(widest, part.stride);
    return is_one_part() ? 0 : round_up(widest * sizeof(float), kAlignment);
  }

  Product forward_product(const LinearPart& part, ConstArray x, ConstArray weight, Array y) const {
    Product product{shape_.rows, part.columns.size, shape_.in, x, at(part, weight), y.at(part.offset)};
    product.transpose_b = shape_.transposed;
    if (!shape_.transposed) product.ldb = shape_.weights[part.weight].width;
    product.ldc = part.stride;
    return product;
  }

  Product input_product(const LinearPart& part, ConstArray dy, ConstArray weight, Array dx) const {
    Product product{shape_.rows, shape_.in, part.columns.size, dy.at(part.offset), at(part, weight), dx};
    product.transpose_b = !shape_.transposed;
    if (!shape_.transposed) product.ldb = shape_.weights[part.weight].width;
    product.lda = part.stride;
    return product;
  }

  Product weight_product(const LinearPart& part, ConstArray x, ConstArray dy, Array dweight) const {
    const std::size_t first = part.columns.first * (shape_.transposed ? shape_.in : 1);
    Product product{shape_.in,          part.columns.size, shape_.rows, x,
                    dy.at(part.offset), dweight.at(first), true};
    product.ldb = part.stride;
    if (!shape_.transposed) {
      product.ldc = shape_.weights[part.weight].width;
      return product;
    }
    std::swap(product.m, product.n);
    std::swap(product.a, product.b);
    std::swap(product.lda, product.ldb);
    return product;
  }

  // Returns the weight's data from the part's first column on.
  ConstArray at(const LinearPart& part, ConstArray weight) const {
    return weight.at(part.columns.first * (shape_.transposed ? shape_.in : 1));
  }

  void bias_gradients(const OpContext& context, ConstArray dy, void* memory) const {
    auto* const workspace = static_cast<std::byte*>(memory) + sums_bytes();
    std::vector<engine::GradientTarget> targets(shape_.weights.size());
    for (std::size_t i = 0; i < targets.size(); ++i) {
      if (!shape_.weights[i].bias) continue;
      targets[i] = context.gradient(parameters_[i] + 1);
    }
    if (is_one_part()) {
      kernels::column_sum(context.threads(), shape_.rows, shape_.parts[0].stride, dy, targets[0].data,
                          targets[0].accumulate, workspace);
      return;
    }
    auto* const sums = static_cast<float*>(memory);
    const LinearPart* first = nullptr;  // of the piece
    for (const LinearPart& part : shape_.parts) {
      if (first == nullptr || part.piece != first->piece) {
        first = &part;
        kernels::column_sum(context.threads(), shape_.rows, part.stride, dy.at(part.offset), sums, false,
                            workspace);
      }
      const engine::GradientTarget& target = targets[part.weight];
      if (target.data == nullptr) continue;
      const Array to{target.data + part.columns.first}, sum{sums + (part.offset - first->offset)};
      if (target.accumulate) {
        kernels::add(context.threads(), part.columns.size, to, sum, to);
      } else {
        kernels::convert(context.threads(), part.columns.size, sum, to);
      }
    }
  }

  LinearShape shape_;
  PieceSums input_sums_;
  std::vector<std::size_t> parameters_;  // by weight: the index of its parameter, which its bias follows
};

}  // namespace

std::unique_ptr<Op> make_linear(std::string name, ValueId x, ValueId y, const LinearShape& shape) {
  return std::make_unique<Linear>(std::move(name), x, y, shape);
}

}  // namespace sluice::models
