#include <algorithm>

#include "kernels/elementwise.h"
#include "kernels/reduce.h"
#include "models/graph/context.h"
#include "models/ops/linear.h"
#include "models/ops/piece_sums.h"

namespace sluice::models {
namespace {

using kernels::Product;

// Returns this rank's rows of the weight.
std::vector<comm::Runs> written_rows(const RowLinearShape& shape) {
  std::vector<comm::Runs> runs;
  for (const auto& [first, size] : shape.inputs)
    runs.push_back(shape.transposed ? comm::Runs{first, size, shape.in, shape.out}
                                    : comm::Runs{first * shape.out, size * shape.out});
  return runs;
}

OpSpec row_linear_spec(std::string name, ValueId x, ValueId y, const RowLinearShape& shape) {
  OpSpec spec{.name = std::move(name),
              .inputs = {x},
              .outputs = {y},
              .saved = {x},
              .parameters = {{shape.weight, 0, written_rows(shape)}},
              .splits_backward = true};
  if (shape.bias) spec.parameters.push_back({*shape.bias, 0, shape.cut.written_alike()});
  const double outputs = static_cast<double>(shape.rows * shape.out);
  spec.forward_flops = 2 * outputs * static_cast<double>(total(shape.inputs));
  spec.backward_flops = 2 * spec.forward_flops;
  spec.forward_bytes = outputs * static_cast<double>(sizeof(float) + size_of(shape.type));
  spec.backward_bytes = shape.bias ? outputs * static_cast<double>(size_of(shape.type)) : 0;
  spec.weights_flops = spec.forward_flops;
  spec.weights_bytes = spec.backward_bytes;
  if (shape.cut.ranks > 1) spec.forward_calls = {{shape.rows * shape.out}};
  return spec;
}

class RowLinear : public Op {
 public:
  RowLinear(std::string name, ValueId x, ValueId y, const RowLinearShape& shape)
      : Op(row_linear_spec(std::move(name), x, y, shape)),
        shape_(shape),
        sums_(shape.cut, shape.rows * shape.out) {}

  std::size_t forward_workspace(kernels::ProductSurvey& products) const override {
    std::size_t bytes = 0;
    for (std::size_t piece = 0; piece < shape_.inputs.size(); ++piece)
      bytes = std::max(bytes, products.workspace(forward_product(piece, blank(), blank(), {})));
    return sums_.bytes() + bytes;
  }

  std::size_t backward_workspace(kernels::ProductSurvey& products) const override {
    std::size_t bytes = 0;
    for (std::size_t piece = 0; piece < shape_.inputs.size(); ++piece)
      bytes = std::max(bytes, products.workspace(input_product(piece, blank(), blank(), blank())));
    return std::max(bytes, weights_workspace(products));
  }

  std::size_t weights_workspace(kernels::ProductSurvey& products) const override {
    std::size_t bytes = shape_.bias ? kernels::column_sum_workspace(shape_.rows, shape_.out) : 0;
    for (std::size_t piece = 0; piece < shape_.inputs.size(); ++piece)
      bytes = std::max(bytes, products.workspace(weight_product(piece, blank(), blank(), {})));
    return bytes;
  }

  void forward(const OpContext& context) const override {
    void* const workspace = context.scratch_from(sums_.bytes());
    const Array sum = sums_.add(context, context.scratch(), spec().name, [&](std::size_t piece, Array into) {
      Product product = forward_product(piece, context.input(0), context.parameter(0), into);
      // The bias is added to the first piece's part of the sum.
      if (shape_.bias && shape_.cut.first_piece() + piece == 0) product.bias = context.parameter(1).data;
      kernels::multiply(context.library(), context.threads(), product, workspace);
    });
    kernels::convert(context.threads(), shape_.rows * shape_.out, sum, context.output(0));
  }

  void backward(const OpContext& context) const override {
    backward_inputs(context);
    backward_weights(context);
  }

  void backward_inputs(const OpContext& context) const override {
    for (std::size_t piece = 0; piece < shape_.inputs.size(); ++piece)
      kernels::multiply(
          context.library(), context.threads(),
          input_product(piece, context.output_gradient(0), context.parameter(0), context.input_gradient(0)),
          context.scratch());
  }

  void backward_weights(const OpContext& context) const override {
    const engine::GradientTarget target = context.gradient(0);
    for (std::size_t piece = 0; piece < shape_.inputs.size(); ++piece) {
      Product product =
          weight_product(piece, context.input(0), context.output_gradient(0), {target.data, Dtype::kF32});
      product.accumulate = target.accumulate;
      kernels::multiply(context.library(), context.threads(), product, context.scratch());
    }
    if (!shape_.bias) return;
    const engine::GradientTarget bias = context.gradient(1);
    if (!shape_.cut.gives()) return;
    kernels::column_sum(context.threads(), shape_.rows, shape_.out, context.output_gradient(0), bias.data,
                        bias.accumulate, context.scratch());
  }

 private:
  Array blank() const { return {nullptr, shape_.type}; }

  // Returns the offset of a piece's array in the input.
  std::size_t offset(std::size_t piece) const {
    std::size_t columns = 0;
    for (std::size_t i = 0; i < piece; ++i) columns += shape_.inputs[i].size;
    return shape_.rows * columns;
  }
  // Returns the offset of a piece's first row of W; the stride of W follows.
  std::size_t first(std::size_t piece) const {
    return shape_.inputs[piece].first * (shape_.transposed ? 1 : shape_.out);
  }
  std::size_t stride() const { return shape_.transposed ? shape_.in : shape_.out; }

  Product forward_product(std::size_t piece, ConstArray x, ConstArray weight, Array y) const {
    Product product{
        shape_.rows, shape_.out, shape_.inputs[piece].size, x.at(offset(piece)), weight.at(first(piece)), y};
    product.transpose_b = shape_.transposed;
    product.ldb = stride();
    return product;
  }

  Product input_product(std::size_t piece, ConstArray dy, ConstArray weight, Array dx) const {
    Product product{shape_.rows, shape_.inputs[piece].size, shape_.out,
                    dy,          weight.at(first(piece)),   dx.at(offset(piece))};
    product.transpose_b = !shape_.transposed;
    product.ldb = stride();
    return product;
  }

  Product weight_product(std::size_t piece, ConstArray x, ConstArray dy, Array dweight) const {
    Product product{shape_.inputs[piece].size, shape_.out, shape_.rows, x.at(offset(piece)), dy,
                    dweight.at(first(piece)),  true};
    product.ldc = stride();
    if (!shape_.transposed) return product;
    std::swap(product.m, product.n);
    std::swap(product.a, product.b);
    return product;
  }

  RowLinearShape shape_;
  PieceSums sums_;
};

}  // namespace

std::unique_ptr<Op> make_row_linear(std::string name, ValueId x, ValueId y, const RowLinearShape& shape) {
  return std::make_unique<RowLinear>(std::move(name), x, y, shape);
}

}  // namespace sluice::models
