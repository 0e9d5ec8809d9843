#include "models/graph/program.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <optional>
#include <utility>

#include "core/bytes.h"
#include "core/error.h"
#include "models/graph/tensors.h"

namespace sluice::models {
namespace {

using MaybeTensor = std::optional<TensorId>;

// A step whose arrays have no locations yet.
struct Draft {
  Step step;
  std::vector<MaybeTensor> inputs, outputs, input_gradients, output_gradients;
  MaybeTensor scratch, from, to;
};

class Compiler {
 public:
  Compiler(const Graph& graph, const Choice& choice, kernels::ProductSurvey& products, bool splits_backward)
      : graph_(graph),
        products_(products),
        splits_backward_(splits_backward),
        values_(graph.values().size()),
        gradients_(graph.values().size()),
        kept_(graph.values().size()),
        left_(graph.values().size()),
        left_gradients_(graph.values().size()) {
    locate(choice);
  }

  std::size_t bytes_of(Area area) const { return area_bytes_[static_cast<std::size_t>(area)]; }
  Program forward();
  Program backward();
  Program weights();

 private:
  std::ptrdiff_t now() const { return static_cast<std::ptrdiff_t>(drafts_.size()); }
  std::size_t bytes(ValueId value) const { return graph_.values()[value].bytes(); }
  const Op& op(std::size_t index) const { return *graph_.ops()[index]; }

  bool splits(std::size_t index) const { return splits_backward_ && op(index).spec().splits_backward; }
  Location next_in(Area area, ValueId value);
  void locate(const Choice& choice);
  TensorId held_before(ValueId value, Location location);
  void run_forward(std::size_t index);
  void demand(ValueId value);
  void run_backward(std::size_t index);
  std::vector<std::size_t> gradients_of_inputs(Draft& draft, const OpSpec& spec);
  void pass_gradient(ValueId from, ValueId to);
  void add_gradient(TensorId from, ValueId to);
  TensorId new_gradient(ValueId value);
  MaybeTensor scratch(std::size_t size);
  Program finish();

  const Graph& graph_;
  kernels::ProductSurvey& products_;
  const bool splits_backward_;
  Tensors tensors_;
  std::vector<Draft> drafts_;
  std::vector<MaybeTensor> values_, gradients_;  // by value: those that exist at this step
  // By value: its location when kept from forward to backward; and, for the weights' pass, those where
  // backward leaves it and its gradient.
  std::vector<std::optional<Location>> kept_, left_, left_gradients_;
  std::array<std::size_t, kAreas> area_bytes_ = {};
  bool is_forward_ = false;
};

Location Compiler::next_in(Area area, ValueId value) {
  std::size_t& end = area_bytes_[static_cast<std::size_t>(area)];
  return {area, std::exchange(end, end + bytes(value))};
}

// Chooses the locations of values that outlive a program.
void Compiler::locate(const Choice& choice) {
  std::vector<bool> for_weights(graph_.values().size());
  for (std::size_t index = 0; index < graph_.ops().size(); ++index) {
    const OpSpec& spec = op(index).spec();
    if (!splits(index)) continue;
    for (const ValueId value : spec.saved) for_weights[value] = true;
    for (const ValueId value : spec.outputs) left_gradients_[value] = next_in(Area::kLeftForWeights, value);
    ensure(
        std::ranges::count(spec.saved, graph_.input()) + std::ranges::count(spec.outputs, graph_.output()) ==
            0,
        "the gradients of weights of op '{}' need what comes from, or goes to, another unit, which is not "
        "there any more",
        spec.name);
  }
  for (const ValueId value : kept_values(graph_, choice))
    kept_[value] = next_in(for_weights[value] ? Area::kKeptForWeights : Area::kKept, value);
  for (ValueId value = 0; value < for_weights.size(); ++value)
    if (for_weights[value] && !kept_[value]) left_[value] = next_in(Area::kLeftForWeights, value);
}

TensorId Compiler::held_before(ValueId value, Location location) {
  const TensorId tensor = tensors_.add(bytes(value), location);
  tensors_.read(tensor, Tensors::kBefore);
  tensors_.read(tensor, Tensors::kAfter);
  return tensor;
}

MaybeTensor Compiler::scratch(std::size_t size) {
  if (size == 0) return std::nullopt;
  const TensorId tensor = tensors_.add(round_up(size, kAlignment));
  tensors_.write(tensor, now());
  return tensor;
}

void Compiler::run_forward(std::size_t index) {
  const OpSpec& spec = op(index).spec();
  Draft draft;
  draft.step.kind = Step::Kind::kForward;
  draft.step.op = index;
  for (const ValueId value : spec.inputs) {
    draft.inputs.push_back(values_[value]);
    tensors_.read(*values_[value], now());
  }
  for (const ValueId value : spec.outputs) {
    std::optional<Location> fixed;
    if (is_forward_) fixed = graph_.output() == value ? Location{Area::kOutput, 0} : kept_[value];
    if (!is_forward_ && !values_[value]) fixed = left_[value];
    const TensorId tensor = tensors_.add(bytes(value), fixed);
    tensors_.write(tensor, now());
    if (fixed) tensors_.read(tensor, Tensors::kAfter);
    draft.outputs.push_back(tensor);
    if (!values_[value])
      values_[value] = tensor;  // otherwise it is kept, and the op runs again only for another output
  }
  for (const InPlace& pair : spec.forward_in_place) {
    tensors_.allow_in_place(*draft.inputs[pair.input], *draft.outputs[pair.output], now());
  }
  draft.scratch = scratch(op(index).forward_workspace(products_));
  drafts_.push_back(std::move(draft));
}

Program Compiler::forward() {
  is_forward_ = true;
  if (graph_.input()) values_[*graph_.input()] = held_before(*graph_.input(), {Area::kInput, 0});
  for (std::size_t index = 0; index < graph_.ops().size(); ++index) run_forward(index);
  return finish();
}

void Compiler::demand(ValueId value) {
  if (values_[value]) return;
  const std::size_t producer = *graph_.producer(value);
  for (const ValueId input : op(producer).spec().inputs) demand(input);
  run_forward(producer);
}

TensorId Compiler::new_gradient(ValueId value) {
  std::optional<Location> fixed = left_gradients_[value];
  if (graph_.input() == value) fixed = Location{Area::kBorder, 0};
  const TensorId tensor = tensors_.add(bytes(value), fixed);
  if (fixed) tensors_.read(tensor, Tensors::kAfter);
  return tensor;
}

void Compiler::pass_gradient(ValueId from, ValueId to) {
  if (gradients_[to]) return add_gradient(*gradients_[from], to);
  gradients_[to] = new_gradient(to);
  Draft draft;
  draft.step.kind = Step::Kind::kCopy;
  draft.step.value = to;
  draft.from = gradients_[from];
  draft.to = gradients_[to];
  tensors_.copy(*draft.from, *draft.to, now());
  drafts_.push_back(std::move(draft));
}

void Compiler::add_gradient(TensorId from, ValueId to) {
  Draft draft;
  draft.step.kind = Step::Kind::kAdd;
  draft.step.value = to;
  draft.from = from;
  draft.to = gradients_[to];
  tensors_.read(from, now());
  tensors_.write(*draft.to, now());
  drafts_.push_back(std::move(draft));
}

// Chooses where the op writes the gradients of its inputs. Returns the inputs whose gradients are accumulated
// later.
std::vector<std::size_t> Compiler::gradients_of_inputs(Draft& draft, const OpSpec& spec) {
  std::vector<std::size_t> to_add;
  draft.input_gradients.resize(spec.inputs.size());
  draft.step.adds.resize(spec.inputs.size());
  for (std::size_t i = 0; i < spec.inputs.size(); ++i) {
    if (std::ranges::count(spec.passes_gradient, i) > 0) continue;
    const ValueId value = spec.inputs[i];
    const bool present = gradients_[value].has_value();
    draft.step.adds[i] = present && spec.adds_gradients;
    if (!present) gradients_[value] = new_gradient(value);
    if (present && !spec.adds_gradients) {
      draft.input_gradients[i] = tensors_.add(bytes(value));
      to_add.push_back(i);
    } else {
      draft.input_gradients[i] = gradients_[value];
    }
    tensors_.write(*draft.input_gradients[i], now());
  }
  return to_add;
}

void Compiler::run_backward(std::size_t index) {
  const OpSpec& spec = op(index).spec();
  for (const ValueId value : spec.saved) demand(value);
  Draft draft;
  draft.step.kind = splits(index) ? Step::Kind::kBackwardInputs : Step::Kind::kBackward;
  draft.step.op = index;
  const auto saved = [&](ValueId value) -> MaybeTensor {
    if (std::ranges::count(spec.saved, value) == 0) return std::nullopt;
    tensors_.read(*values_[value], now());
    return values_[value];
  };
  for (const ValueId value : spec.inputs) draft.inputs.push_back(saved(value));
  for (const ValueId value : spec.outputs) draft.outputs.push_back(saved(value));
  for (const ValueId value : spec.outputs) {
    draft.output_gradients.push_back(gradients_[value]);
    if (!gradients_[value]) continue;
    tensors_.read(*gradients_[value], now());
    if (spec.changes_output_gradients) tensors_.write(*gradients_[value], now());
  }
  const std::vector<std::size_t> to_add = gradients_of_inputs(draft, spec);
  for (const InPlace& pair : spec.backward_in_place) {
    tensors_.allow_in_place(*draft.output_gradients[pair.output], *draft.input_gradients[pair.input], now());
  }
  draft.scratch = scratch(op(index).backward_workspace(products_));
  const std::vector<MaybeTensor> written = draft.input_gradients;
  drafts_.push_back(std::move(draft));
  for (const std::size_t input : to_add) add_gradient(*written[input], spec.inputs[input]);
  for (const std::size_t input : spec.passes_gradient)
    pass_gradient(spec.outputs.front(), spec.inputs[input]);
}

Program Compiler::backward() {
  is_forward_ = false;
  if (graph_.input()) values_[*graph_.input()] = held_before(*graph_.input(), {Area::kInput, 0});
  for (ValueId value = 0; value < kept_.size(); ++value) {
    if (kept_[value]) values_[value] = held_before(value, *kept_[value]);
  }
  if (graph_.output()) {
    const TensorId handed = tensors_.add(bytes(*graph_.output()), Location{Area::kBorder, 0});
    tensors_.read(handed, Tensors::kBefore);
    gradients_[*graph_.output()] = handed;
  }
  for (std::size_t index = graph_.ops().size(); index-- > 0;) run_backward(index);
  return finish();
}

Program Compiler::weights() {
  for (ValueId value = 0; value < values_.size(); ++value) {
    if (kept_[value]) values_[value] = held_before(value, *kept_[value]);
    if (left_[value]) values_[value] = held_before(value, *left_[value]);
    if (left_gradients_[value]) gradients_[value] = held_before(value, *left_gradients_[value]);
  }
  for (std::size_t index = graph_.ops().size(); index-- > 0;) {
    if (!splits(index)) continue;
    const OpSpec& spec = op(index).spec();
    const auto saved = [&](ValueId value) {
      return std::ranges::count(spec.saved, value) > 0 ? values_[value] : std::nullopt;
    };
    Draft draft;
    draft.step.kind = Step::Kind::kBackwardWeights;
    draft.step.op = index;
    for (const ValueId value : spec.inputs) draft.inputs.push_back(saved(value));
    for (const ValueId value : spec.outputs) draft.outputs.push_back(saved(value));
    for (const ValueId value : spec.outputs) draft.output_gradients.push_back(gradients_[value]);
    draft.input_gradients.resize(spec.inputs.size());
    draft.scratch = scratch(op(index).weights_workspace(products_));
    drafts_.push_back(std::move(draft));
  }
  return finish();
}

Program Compiler::finish() {
  Program program;
  tensors_.assign(program);
  const auto location = [&](const MaybeTensor& tensor) {
    return tensor ? tensors_.location(*tensor) : Location{};
  };
  const auto locations = [&](const std::vector<MaybeTensor>& tensors) {
    std::vector<Location> result;
    for (const MaybeTensor& tensor : tensors) result.push_back(location(tensor));
    return result;
  };
  for (Draft& draft : drafts_) {
    Step step = std::move(draft.step);
    step.inputs = locations(draft.inputs);
    step.outputs = locations(draft.outputs);
    step.input_gradients = locations(draft.input_gradients);
    step.output_gradients = locations(draft.output_gradients);
    step.scratch = location(draft.scratch);
    step.from = location(draft.from);
    step.to = location(draft.to);
    program.steps.push_back(std::move(step));
  }
  return program;
}

}  // namespace

std::size_t place_buffers(std::vector<Buffer>& buffers) {
  std::vector<std::size_t> order(buffers.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order,
                           [&](std::size_t a, std::size_t b) { return buffers[a].bytes > buffers[b].bytes; });
  std::vector<const Buffer*> placed;  // by offset
  std::size_t peak = 0;
  for (const std::size_t index : order) {
    Buffer& buffer = buffers[index];
    buffer.offset = 0;
    for (const Buffer* other : placed) {
      if (other->first > buffer.last || buffer.first > other->last) continue;
      if (other->offset >= buffer.offset + buffer.bytes) break;
      buffer.offset = std::max(buffer.offset, other->offset + other->bytes);
    }
    placed.insert(std::ranges::upper_bound(placed, buffer.offset, {}, &Buffer::offset), &buffer);
    peak = std::max(peak, buffer.offset + buffer.bytes);
  }
  return peak;
}

UnitProgram compile(const Graph& graph, const Choice& choice, kernels::ProductSurvey& products,
                    bool splits_backward) {
  UnitProgram program;
  Compiler forward(graph, choice, products, splits_backward);
  program.kept_bytes = forward.bytes_of(Area::kKept);
  program.kept_for_weights_bytes = forward.bytes_of(Area::kKeptForWeights);
  program.left_for_weights_bytes = forward.bytes_of(Area::kLeftForWeights);
  program.forward = forward.forward();
  program.backward = Compiler(graph, choice, products, splits_backward).backward();
  program.weights = Compiler(graph, choice, products, splits_backward).weights();
  return program;
}

}  // namespace sluice::models
