#include "models/graph/context.h"

#include "core/error.h"
#include "kernels/elementwise.h"

namespace sluice::models {
namespace {

void combine_gradients(const Graph& graph, const Step& step, Execution& execution) {
  if (step.kind == Step::Kind::kCopy && step.from == step.to) return;
  const Value& value = graph.values()[step.value];
  const auto array = [&](Location location) {
    return Array{execution.areas[static_cast<std::size_t>(location.area)] + location.offset, value.type};
  };
  const Array from = array(step.from), to = array(step.to);
  if (step.kind == Step::Kind::kCopy) {
    kernels::convert(execution.threads, value.elements, from, to);
  } else {
    kernels::add(execution.threads, value.elements, to, from, to);
  }
}

}  // namespace

// The stream consists of the step and the op's index in the model, in separate bits. Initial values use the
// run's own seed with arbitrary streams, so a constant changes the seed here.
RandomWords OpContext::random_words() const {
  constexpr int kOpBits = 24;
  constexpr std::uint64_t kDropoutSeed = 0x9E3779B97F4A7C15;
  const std::uint64_t op = execution_.first_op + step_.op;
  ensure(op >> kOpBits == 0 && execution_.step >> (64 - kOpBits) == 0,
         "op {} in step {} has no stream of random words of its own", op, execution_.step);
  return {execution_.seed ^ kDropoutSeed, execution_.step << kOpBits | op};
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
      case Step::Kind::kBackwardInputs:
        graph.ops()[step.op]->backward_inputs({execution, graph, step});
        break;
      case Step::Kind::kBackwardWeights:
        graph.ops()[step.op]->backward_weights({execution, graph, step});
        break;
      default:
        combine_gradients(graph, step, execution);
    }
  }
}

}  // namespace sluice::models
