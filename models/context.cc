#include "models/context.h"

#include "kernels/elementwise.h"

namespace sluice::models {
namespace {

void combine_gradients(const Graph& graph, const Step& step, Execution& execution) {
  if (step.kind == Step::Kind::kCopy && step.from == step.to) return;
  const Value& value = graph.values()[step.value];
  const auto array = [&](Place place) {
    return Array{execution.areas[static_cast<std::size_t>(place.area)] + place.offset, value.type};
  };
  const Array from = array(step.from), to = array(step.to);
  if (step.kind == Step::Kind::kCopy) {
    kernels::convert(execution.threads, value.elements, from, to);
  } else {
    kernels::add(execution.threads, value.elements, to, from, to);
  }
}

}  // namespace

// Bit 63 keeps these streams apart from those of initialisation; 24 bits name the op in the model, the rest
// the step.
std::uint64_t OpContext::random_stream() const {
  return std::uint64_t{1} << 63 | execution_.step << 24 | (execution_.unit * 32 + step_.op);
}

void execute(const Graph& graph, const Program& program, Execution& execution,
             const BeforeStep& before_step) {
  for (std::size_t index = 0; index < program.steps.size(); ++index) {
    if (before_step) before_step(index);
    const Step& step = program.steps[index];
    switch (step.kind) {
      case Step::Kind::kForward:
        graph.ops()[step.op]->forward({execution, graph, step});
        break;
      case Step::Kind::kBackward:
        graph.ops()[step.op]->backward({execution, graph, step});
        break;
      default:
        combine_gradients(graph, step, execution);
    }
  }
}

}  // namespace sluice::models
