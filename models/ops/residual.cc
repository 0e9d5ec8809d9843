#include "models/ops/residual.h"

#include "kernels/elementwise.h"
#include "models/graph/context.h"

namespace sluice::models {
namespace {

OpSpec residual_spec(std::string name, std::optional<ValueId> residual, ValueId branch, ValueId y,
                     const ResidualShape& shape) {
  OpSpec spec{.name = std::move(name), .inputs = {branch}, .outputs = {y}, .forward_in_place = {{0, 0}}};
  if (shape.dropout == 0) {
    spec.passes_gradient = {0};
  } else {
    spec.backward_in_place = {{0, 0}};
  }
  if (residual) {
    spec.inputs.push_back(*residual);
    spec.forward_in_place.push_back({1, 0});
    spec.passes_gradient.push_back(1);
  }
  const double bytes = static_cast<double>(row_count(shape.rows) * shape.width * size_of(shape.type));
  spec.forward_bytes = 3 * bytes;
  spec.backward_bytes = shape.dropout == 0 ? 0 : 2 * bytes;
  return spec;
}

class Residual : public Op {
 public:
  Residual(std::string name, std::optional<ValueId> residual, ValueId branch, ValueId y,
           const ResidualShape& shape)
      : Op(residual_spec(std::move(name), residual, branch, y, shape)), shape_(shape) {}

  void forward(const OpContext& context) const override {
    const Execution& run = context.run();
    const RandomWords words = context.random_words();
    for (const RowPart& part : shape_.rows) {
      const std::size_t at = part.row * shape_.width;
      const ConstArray residual =
          spec().inputs.size() == 2 ? context.input(1).at(at) : Array{nullptr, shape_.type};
      kernels::dropout_add(context.threads(), part.rows * shape_.width, context.input(0).at(at), residual,
                           run.training ? shape_.dropout : 0.0f, words.seed, words.stream,
                           first_index(run, part), context.output(0).at(at));
    }
  }

  void backward(const OpContext& context) const override {
    if (shape_.dropout == 0) return;  // the gradients pass through unchanged
    const RandomWords words = context.random_words();
    for (const RowPart& part : shape_.rows) {
      const std::size_t at = part.row * shape_.width;
      kernels::dropout_backward(context.threads(), part.rows * shape_.width,
                                context.output_gradient(0).at(at), shape_.dropout, words.seed, words.stream,
                                first_index(context.run(), part), context.input_gradient(0).at(at));
    }
  }

 private:
  std::uint64_t first_index(const Execution& run, const RowPart& part) const {
    return (run.first_sample * shape_.length + part.whole_row) * shape_.width;
  }

  ResidualShape shape_;
};

}  // namespace

std::unique_ptr<Op> make_residual(std::string name, std::optional<ValueId> residual, ValueId branch,
                                  ValueId y, const ResidualShape& shape) {
  return std::make_unique<Residual>(std::move(name), residual, branch, y, shape);
}

}  // namespace sluice::models
