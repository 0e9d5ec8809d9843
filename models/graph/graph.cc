#include "models/graph/graph.h"

#include <algorithm>
#include <utility>

#include "core/error.h"

namespace sluice::models {

std::size_t Op::weights_workspace(kernels::ProductSurvey&) const {
  fail(ErrorCode::kInternal, "op '{}' does not split its backward pass", spec_.name);
}
void Op::backward_inputs(const OpContext&) const {
  fail(ErrorCode::kInternal, "op '{}' does not split its backward pass", spec_.name);
}
void Op::backward_weights(const OpContext&) const {
  fail(ErrorCode::kInternal, "op '{}' does not split its backward pass", spec_.name);
}

bool Graph::splits_backward() const {
  return std::ranges::any_of(ops_, [](const auto& op) { return op->spec().splits_backward; });
}

ValueId Graph::add_value(Value value) {
  values_.push_back(std::move(value));
  producers_.emplace_back();
  return values_.size() - 1;
}

std::size_t Graph::add_parameter(engine::ParameterSpec spec, bool foreign) {
  parameters_.push_back({std::move(spec), foreign});
  return parameters_.size() - 1;
}

void Graph::add_op(std::unique_ptr<Op> op) {
  const OpSpec& spec = op->spec();
  for (const ValueId value : spec.inputs) {
    ensure(producers_[value] || input_ == value, "op '{}' reads '{}' before it is made", spec.name,
           values_[value].name);
  }
  for (const ValueId value : spec.outputs) {
    ensure(!producers_[value] && input_ != value, "'{}' is made twice", values_[value].name);
    producers_[value] = ops_.size();
  }
  for (const ValueId value : spec.saved) {
    ensure(std::ranges::count(spec.inputs, value) + std::ranges::count(spec.outputs, value) > 0,
           "op '{}' saves '{}', which is none of its values", spec.name, values_[value].name);
  }
  for (const ParameterUse& use : spec.parameters) {
    ensure(use.slot < parameters_.size(), "op '{}' uses an unknown parameter", spec.name);
  }
  ops_.push_back(std::move(op));
}

}  // namespace sluice::models
