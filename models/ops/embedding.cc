#include "models/ops/embedding.h"

#include "kernels/elementwise.h"
#include "kernels/embedding.h"
#include "models/graph/context.h"

namespace sluice::models {
namespace {

OpSpec embedding_spec(std::string name, ValueId y, const EmbeddingShape& shape) {
  OpSpec spec{.name = std::move(name), .outputs = {y}, .parameters = {shape.table}};
  if (shape.positions) spec.parameters.push_back(*shape.positions);
  for (ParameterUse& use : spec.parameters) use.writes = shape.cut.written_alike();
  const std::size_t rows = row_count(shape.rows);
  spec.forward_bytes = 2.0 * static_cast<double>(rows * shape.width * size_of(shape.type));
  spec.backward_bytes =
      static_cast<double>(shape.vocabulary * shape.width * sizeof(float)) + spec.forward_bytes;
  return spec;
}

class Embedding : public Op {
 public:
  Embedding(std::string name, ValueId y, const EmbeddingShape& shape)
      : Op(embedding_spec(std::move(name), y, shape)), shape_(shape) {}

  std::size_t backward_workspace(kernels::ProductSurvey&) const override {
    return kernels::embedding_backward_workspace(row_count(shape_.rows));
  }

  void forward(const OpContext& context) const override {
    const ConstArray positions = shape_.positions ? context.parameter(1) : ConstArray{nullptr, shape_.type};
    for (const RowPart& part : shape_.rows)
      kernels::embedding_forward(context.threads(), context.run().tokens.subspan(part.row, part.rows),
                                 part.period, shape_.width, context.parameter(0), positions,
                                 context.run().first_position + part.position,
                                 context.output(0).at(part.row * shape_.width));
  }

  void backward(const OpContext& context) const override {
    const engine::GradientTarget table = context.gradient_of_tokens(0);
    const Array dy = context.output_gradient(0);
    const auto positions = shape_.positions ? context.gradient(1) : engine::GradientTarget();
    if (!shape_.cut.gives()) return;
    if (!table.accumulate) {
      kernels::fill(context.threads(), shape_.vocabulary * shape_.width, 0, {table.data, Dtype::kF32});
    }
    kernels::embedding_backward(context.threads(), context.run().tokens, shape_.width, dy, table.data,
                                context.scratch());
    if (shape_.positions) position_gradient(context, positions, dy);
  }

 private:
  void position_gradient(const OpContext& context, const engine::GradientTarget& positions,
                         ConstArray dy) const {
    const std::size_t period = shape_.rows[0].period;
    if (shape_.rows.size() == 1) {
      kernels::position_backward(context.threads(), shape_.rows[0].rows / period, period, shape_.context,
                                 shape_.width, dy, positions.data, positions.accumulate);
      return;
    }
    if (!positions.accumulate)  // adding -0 changes nothing in the other ranks' gradients
      kernels::fill(context.threads(), shape_.context * shape_.width, -0.0f, {positions.data});
    for (const RowPart& part : shape_.rows)
      kernels::position_backward(context.threads(), 1, part.rows, part.rows, shape_.width,
                                 dy.at(part.row * shape_.width),
                                 positions.data + part.position * shape_.width, true);
  }

  EmbeddingShape shape_;
};

}  // namespace

std::unique_ptr<Op> make_embedding(std::string name, ValueId y, const EmbeddingShape& shape) {
  return std::make_unique<Embedding>(std::move(name), y, shape);
}

}  // namespace sluice::models
