#include "models/ops/norm.h"

#include "core/error.h"
#include "kernels/norm.h"
#include "models/graph/context.h"

namespace sluice::models {
namespace {

OpSpec norm_spec(std::string name, ValueId x, ValueId y, ValueId statistics, const NormShape& shape) {
  const double bytes = static_cast<double>(shape.rows * shape.width * size_of(shape.type));
  OpSpec spec{.name = std::move(name),
              .inputs = {x},
              .outputs = {y, statistics},
              .saved = {x, statistics},
              .parameters = {{shape.gamma, 0, shape.cut.written_alike()}},
              .forward_bytes = 2 * bytes,
              .backward_bytes = 4 * bytes};
  if (shape.beta) spec.parameters.push_back({*shape.beta, 0, shape.cut.written_alike()});
  return spec;
}

class Norm : public Op {
 public:
  Norm(std::string name, ValueId x, ValueId y, ValueId statistics, const NormShape& shape)
      : Op(norm_spec(std::move(name), x, y, statistics, shape)), shape_(shape) {}

  std::size_t backward_workspace(kernels::ProductSurvey&) const override {
    return kernels::norm_backward_workspace(shape_.rows, shape_.width);
  }

  void forward(const OpContext& context) const override {
    if (shape_.beta) {
      kernels::layernorm_forward(context.threads(), shape_.rows, shape_.width, context.input(0),
                                 context.parameter(0), context.parameter(1), shape_.epsilon,
                                 context.output(0), context.statistics(1));
    } else {
      kernels::rmsnorm_forward(context.threads(), shape_.rows, shape_.width, context.input(0),
                               context.parameter(0), shape_.epsilon, context.output(0),
                               context.statistics(1));
    }
  }

  void backward(const OpContext& context) const override {
    const engine::GradientTarget gamma = context.gradient(0),
                                 beta = shape_.beta ? context.gradient(1) : gamma;
    if (shape_.beta) {
      ensure(gamma.accumulate == beta.accumulate,
             "the two gradients of a norm are at different micro-batches");
      kernels::layernorm_backward(context.threads(), shape_.rows, shape_.width, context.input(0),
                                  context.parameter(0), context.statistics(1), context.output_gradient(0),
                                  context.input_gradient(0), gamma.data, beta.data, gamma.accumulate,
                                  context.scratch());
    } else {
      kernels::rmsnorm_backward(context.threads(), shape_.rows, shape_.width, context.input(0),
                                context.parameter(0), context.statistics(1), context.output_gradient(0),
                                context.input_gradient(0), gamma.data, gamma.accumulate, context.scratch());
    }
  }

 private:
  NormShape shape_;
};

}  // namespace

Value norm_statistics(std::string name, const NormShape& shape) {
  return {std::move(name), shape.rows * (shape.beta ? 2 : 1), Dtype::kF32, false};
}

std::unique_ptr<Op> make_norm(std::string name, ValueId x, ValueId y, ValueId statistics,
                              const NormShape& shape) {
  return std::make_unique<Norm>(std::move(name), x, y, statistics, shape);
}

}  // namespace sluice::models
