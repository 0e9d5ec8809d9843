#include "models/ops/row_pieces.h"

#include <utility>

#include "core/pairwise.h"
#include "models/graph/context.h"

namespace sluice::models {
namespace {

std::vector<LayerCall> repeated(const std::vector<LayerCall>& calls, std::size_t times) {
  std::vector<LayerCall> all;
  for (; times > 0; --times) all.insert(all.end(), calls.begin(), calls.end());
  return all;
}

OpSpec spec_of(const std::vector<std::unique_ptr<Op>>& pieces) {
  OpSpec spec = pieces.front()->spec();
  for (double* const each : {&spec.forward_flops, &spec.backward_flops, &spec.forward_bytes,
                             &spec.backward_bytes, &spec.weights_flops, &spec.weights_bytes})
    *each *= static_cast<double>(pieces.size());
  spec.forward_calls = repeated(spec.forward_calls, pieces.size());
  spec.backward_calls = repeated(spec.backward_calls, pieces.size());
  return spec;
}

class RowPieces : public Op {
 public:
  explicit RowPieces(std::vector<std::unique_ptr<Op>> pieces)
      : Op(spec_of(pieces)), pieces_(std::move(pieces)) {}

  std::size_t forward_workspace(kernels::ProductSurvey& products) const override {
    return pieces_.front()->forward_workspace(products);
  }
  std::size_t backward_workspace(kernels::ProductSurvey& products) const override {
    return pieces_.front()->backward_workspace(products);
  }
  std::size_t weights_workspace(kernels::ProductSurvey& products) const override {
    return pieces_.front()->weights_workspace(products);
  }

  void forward(const OpContext& context) const override { for_each_piece(context, &Op::forward); }
  void backward(const OpContext& context) const override { for_each_piece(context, &Op::backward); }
  void backward_inputs(const OpContext& context) const override {
    for_each_piece(context, &Op::backward_inputs);
  }
  void backward_weights(const OpContext& context) const override {
    for_each_piece(context, &Op::backward_weights);
  }

 private:
  void for_each_piece(const OpContext& context, void (Op::*pass)(const OpContext&) const) const {
    std::vector<double> losses;
    for (std::size_t piece = 0; piece < pieces_.size(); ++piece) {
      Execution run = context.run();
      const auto part_of_rows = [&](std::span<const std::int32_t> rows) {
        return rows.subspan(piece * (rows.size() / pieces_.size()), rows.size() / pieces_.size());
      };
      run.tokens = part_of_rows(run.tokens);
      run.targets = part_of_rows(run.targets);
      run.micro_batch = run.micro_batch * pieces_.size() + piece;
      run.loss = 0;
      const Step step = step_of(context, piece);
      (*pieces_[piece].*pass)({run, context.graph(), step});
      losses.push_back(run.loss);
    }
    context.run().loss += pairwise_sum<double>(losses);
  }

  // Returns the step with the locations of the piece's parts of the arrays.
  Step step_of(const OpContext& context, std::size_t piece) const {
    Step step = context.step();
    const auto move = [&](std::vector<Location>& locations, const std::vector<ValueId>& values) {
      for (std::size_t i = 0; i < locations.size(); ++i) {
        const Value& value = context.graph().values()[values[i]];
        locations[i].offset += piece * (value.elements / pieces_.size()) * size_of(value.type);
      }
    };
    move(step.inputs, spec().inputs);
    move(step.outputs, spec().outputs);
    move(step.input_gradients, spec().inputs);
    move(step.output_gradients, spec().outputs);
    return step;
  }

  std::vector<std::unique_ptr<Op>> pieces_;
};

}  // namespace

std::unique_ptr<Op> in_row_pieces(std::vector<std::unique_ptr<Op>> pieces) {
  if (pieces.size() == 1) return std::move(pieces.front());
  return std::make_unique<RowPieces>(std::move(pieces));
}

}  // namespace sluice::models
