#include "models/ops/linear.h"

#include <algorithm>

#include "kernels/elementwise.h"
#include "kernels/reduce.h"
#include "models/graph/context.h"

namespace sluice::models {
namespace {

using kernels::Product;

std::size_t biased_width(const LinearShape& shape) {
  std::size_t width = 0;
  for (const LinearPart& part : shape.parts) width += part.bias ? part.width : 0;
  return width;
}

OpSpec linear_spec(std::string name, ValueId x, ValueId y, const LinearShape& shape) {
  OpSpec spec{.name = std::move(name),
              .inputs = {x},
              .outputs = {y},
              .saved = {x},
              .adds_gradients = true,
              .changes_output_gradients = shape.rotary.has_value(),
              .splits_backward = true};
  for (const LinearPart& part : shape.parts) {
    spec.parameters.push_back({part.weight, 0});
    if (part.bias) spec.parameters.push_back({*part.bias, 0});
    spec.forward_flops += 2.0 * static_cast<double>(shape.rows * shape.in * part.width);
  }
  spec.backward_flops = 2 * spec.forward_flops;
  spec.backward_bytes = static_cast<double>(shape.rows * biased_width(shape) * size_of(shape.type));
  spec.weights_flops = spec.forward_flops;
  spec.weights_bytes = spec.backward_bytes;
  if (shape.rotary) {
    const std::size_t turned = shape.rows * shape.rotary->heads * shape.rotary->head_width;
    spec.forward_bytes = 2.0 * static_cast<double>(turned * size_of(shape.type));
    spec.backward_bytes += spec.forward_bytes;
  }
  return spec;
}

class Linear : public Op {
 public:
  Linear(std::string name, ValueId x, ValueId y, const LinearShape& shape)
      : Op(linear_spec(std::move(name), x, y, shape)), shape_(shape) {}

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
      bytes = std::max(bytes, products.workspace(input_product(part, blank(), blank(), blank())));
    return std::max(bytes, weights_workspace(products));
  }

  std::size_t weights_workspace(kernels::ProductSurvey& products) const override {
    std::size_t bytes = 0;
    for (const LinearPart& part : shape_.parts)
      bytes = std::max(bytes, products.workspace(weight_product(part, blank(), blank(), {})));
    if (biased_width(shape_) == 0) return bytes;
    return std::max(bytes, sums_bytes() + kernels::column_sum_workspace(shape_.rows, row_width()));
  }

  void forward(const OpContext& context) const override {
    const Array y = context.output(0);
    std::size_t parameter = 0;
    for (const LinearPart& part : shape_.parts) {
      Product product = forward_product(part, context.input(0), context.parameter(parameter++), y);
      if (part.bias) product.bias = context.parameter(parameter++).data;
      kernels::multiply(context.library(), context.threads(), product, context.scratch());
    }
    if (shape_.rotary)
      turn(context.threads(), *shape_.rotary, shape_.rows, context.run().first_position, false, y);
  }

  void backward(const OpContext& context) const override { backward(context, true, true); }
  void backward_inputs(const OpContext& context) const override { backward(context, true, false); }
  void backward_weights(const OpContext& context) const override { backward(context, false, true); }

 private:
  void backward(const OpContext& context, bool of_inputs, bool of_weights) const {
    const Array dy = context.output_gradient(0);
    if (of_inputs && shape_.rotary) turn(context.threads(), *shape_.rotary, shape_.rows, 0, true, dy);
    std::size_t parameter = 0;
    for (const LinearPart& part : shape_.parts) {
      if (of_inputs) input_gradient(context, part, parameter, dy);
      if (of_weights) weight_gradient(context, part, parameter, dy);
      parameter += part.bias ? 2 : 1;
    }
    if (of_weights && biased_width(shape_) > 0) bias_gradients(context, dy);
  }

  void input_gradient(const OpContext& context, const LinearPart& part, std::size_t parameter,
                      ConstArray dy) const {
    Product product = input_product(part, dy, context.parameter(parameter), context.input_gradient(0));
    product.accumulate = context.adds(0) || parameter > 0;
    kernels::multiply(context.library(), context.threads(), product, context.scratch());
  }

  void weight_gradient(const OpContext& context, const LinearPart& part, std::size_t parameter,
                       ConstArray dy) const {
    const engine::GradientTarget target = context.gradient(parameter);
    Product product = weight_product(part, context.input(0), dy, {target.data, Dtype::kF32});
    product.accumulate = target.accumulate;
    kernels::multiply(context.library(), context.threads(), product, context.scratch());
  }

  // Stands for an array where only the sizes of products count.
  Array blank() const { return {nullptr, shape_.type}; }

  // All parts with a bias lie side by side in rows, so that one sum over the rows serves them.
  std::size_t row_width() const { return shape_.parts.front().stride; }
  std::size_t sums_bytes() const {
    return shape_.parts.size() == 1 ? 0 : round_up(row_width() * sizeof(float), kAlignment);
  }

  Product forward_product(const LinearPart& part, ConstArray x, ConstArray weight, Array y) const {
    Product product{shape_.rows, part.width, shape_.in, x, weight, y.at(part.offset)};
    product.transpose_b = shape_.transposed;
    product.ldc = part.stride;
    return product;
  }

  Product input_product(const LinearPart& part, ConstArray dy, ConstArray weight, Array dx) const {
    Product product{shape_.rows, shape_.in, part.width, dy.at(part.offset), weight, dx};
    product.transpose_b = !shape_.transposed;
    product.lda = part.stride;
    return product;
  }

  Product weight_product(const LinearPart& part, ConstArray x, ConstArray dy, Array dweight) const {
    Product product{shape_.in, part.width, shape_.rows, x, dy.at(part.offset), dweight, true};
    product.ldb = part.stride;
    if (!shape_.transposed) return product;
    std::swap(product.m, product.n);
    std::swap(product.a, product.b);
    std::swap(product.lda, product.ldb);
    return product;
  }

  void bias_gradients(const OpContext& context, ConstArray dy) const {
    auto* workspace = static_cast<std::byte*>(context.scratch()) + sums_bytes();
    if (shape_.parts.size() == 1) {
      const engine::GradientTarget target = context.gradient(1);
      kernels::column_sum(context.threads(), shape_.rows, row_width(), dy, target.data, target.accumulate,
                          workspace);
      return;
    }
    auto* sums = static_cast<float*>(context.scratch());
    kernels::column_sum(context.threads(), shape_.rows, row_width(), dy, sums, false, workspace);
    std::size_t parameter = 0;
    for (const LinearPart& part : shape_.parts) {
      ++parameter;
      if (!part.bias) continue;
      const engine::GradientTarget target = context.gradient(parameter++);
      const Array to{target.data}, sum{sums + part.offset};
      if (target.accumulate) {
        kernels::add(context.threads(), part.width, to, sum, to);
      } else {
        kernels::convert(context.threads(), part.width, sum, to);
      }
    }
  }

  LinearShape shape_;
};

}  // namespace

std::unique_ptr<Op> make_linear(std::string name, ValueId x, ValueId y, const LinearShape& shape) {
  return std::make_unique<Linear>(std::move(name), x, y, shape);
}

}  // namespace sluice::models
