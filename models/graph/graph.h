#pragma once
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/given.h"
#include "core/bytes.h"
#include "core/dtype.h"
#include "engine/layout/layout.h"
#include "kernels/matrix.h"

// What a unit computes on one micro-batch of fixed shape: a straight line of ops over named values. All that
// the plan must know (what is kept, what can be recomputed and for how much, where every byte lies) follows
// from what the ops declare here: see recompute.h and program.h.
namespace sluice::models {

inline constexpr std::size_t kAlignment = 64;  // of every buffer

using ValueId = std::size_t;

// An array that an op makes: an activation, or statistics for its own backward pass (which have no gradient).
struct Value {
  std::string name;
  std::size_t elements = 0;
  Dtype type = Dtype::kF32;
  bool has_gradient = true;
  std::size_t bytes() const { return round_up(elements * size_of(type), kAlignment); }
};

// A parameter as a unit's ops see it. A foreign one belongs to another unit, and has its whole name.
struct GraphParameter {
  engine::ParameterSpec spec;
  bool foreign = false;
};

// One use of a parameter by an op: the parameter's index in the graph, the number of this use of it, and
// which elements of its gradient backward writes; nothing: all.
struct ParameterUse {
  std::size_t slot = 0;
  int use = 0;
  std::optional<std::vector<comm::Runs>> writes = {};
};

// One call of AxisRanks.
struct LayerCall {
  std::size_t values = 0;
  bool gathers = false;         // else they are added
  bool along_sequence = false;  // else along "tensor"
  Dtype type = Dtype::kF32;
  bool beside_weights = false;  // it goes on beside the op's gradients of weights
};

// In forward the output may lie where the input lay; in backward the input's gradient where the output's lay.
struct InPlace {
  std::size_t input = 0, output = 0;
};

struct OpSpec {
  std::string name;  // what --recompute calls it: "ln1", "attention"
  std::vector<ValueId> inputs = {}, outputs = {};
  std::vector<ValueId> saved = {};  // inputs and outputs that backward reads
  std::vector<ParameterUse> parameters = {};
  std::vector<InPlace> forward_in_place = {}, backward_in_place = {};
  std::vector<std::size_t> passes_gradient = {};  // inputs that get the first output's gradient as it is
  bool adds_gradients = false;                    // backward can add to the gradients of its inputs
  bool changes_output_gradients = false;          // backward overwrites the gradients of its outputs
  bool splits_backward = false;                   // backward can be done in two halves
  double forward_flops = 0, backward_flops = 0;   // of products and attention
  double forward_bytes = 0, backward_bytes = 0;   // memory traffic of everything else
  double weights_flops = 0, weights_bytes = 0;    // the part of backward that its second half has
  // What forward, and backward's first half, add or gather over ranks.
  std::vector<LayerCall> forward_calls = {}, backward_calls = {};
};

class OpContext;

// An op is immutable. forward and backward write every element of what they declare, and read nothing else;
// the same inputs give the same bits wherever they lie, which makes recomputation exact.
class Op {
 public:
  explicit Op(OpSpec spec) : spec_(std::move(spec)) {}
  virtual ~Op() = default;
  Op(const Op&) = delete;
  Op& operator=(const Op&) = delete;

  const OpSpec& spec() const { return spec_; }
  virtual std::size_t forward_workspace(kernels::ProductSurvey&) const { return 0; }   // bytes
  virtual std::size_t backward_workspace(kernels::ProductSurvey&) const { return 0; }  // bytes
  virtual void forward(const OpContext& context) const = 0;
  virtual void backward(const OpContext& context) const = 0;
  // Of an op that splits backward: two halves, which together give the bits of backward(). The first one
  // makes the gradients of the inputs. The second one, which may be much later, makes those of the
  // parameters. It has what is saved, and the gradients of the outputs as the first one has left them.
  virtual std::size_t weights_workspace(kernels::ProductSurvey& products) const;  // bytes
  virtual void backward_inputs(const OpContext& context) const;
  virtual void backward_weights(const OpContext& context) const;

 private:
  OpSpec spec_;
};

// The ops of a unit in order of execution. A graph without an input begins with tokens. One without an output
// ends in the loss, and its backward pass needs no forward pass.
class Graph {
 public:
  ValueId add_value(Value value);
  // Returns the parameter's slot. The name of a parameter of the unit itself lacks the unit's prefix.
  std::size_t add_parameter(engine::ParameterSpec spec, bool foreign = false);
  void add_op(std::unique_ptr<Op> op);
  void set_input(ValueId value) { input_ = value; }
  void set_output(ValueId value) { output_ = value; }

  const std::vector<Value>& values() const { return values_; }
  const std::vector<GraphParameter>& parameters() const { return parameters_; }
  const std::vector<std::unique_ptr<Op>>& ops() const { return ops_; }
  std::optional<ValueId> input() const { return input_; }
  std::optional<ValueId> output() const { return output_; }
  std::optional<std::size_t> producer(ValueId value) const { return producers_[value]; }  // an op
  bool splits_backward() const;                                                           // any op does

 private:
  std::vector<Value> values_;
  std::vector<GraphParameter> parameters_;
  std::vector<std::unique_ptr<Op>> ops_;
  std::vector<std::optional<std::size_t>> producers_;
  std::optional<ValueId> input_, output_;
};

}  // namespace sluice::models
