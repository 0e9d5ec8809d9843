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

// The computation of a unit on one micro-batch of fixed shape: a linear sequence of ops over named values.
// Everything that a plan needs (which activations are kept, what can be recomputed at which cost, where every
// byte lies) follows from the ops' declarations here: see recompute.h and program.h.
namespace sluice::models {

inline constexpr std::size_t kAlignment = 64;  // of every buffer, in bytes

using ValueId = std::size_t;

// An array that an op produces: an activation, or statistics for its own backward pass (which have no
// gradient).
struct Value {
  std::string name;
  std::size_t elements = 0;
  Dtype type = Dtype::kF32;
  bool has_gradient = true;
  std::size_t bytes() const { return round_up(elements * size_of(type), kAlignment); }
};

// A parameter as a unit's ops see it. A foreign one belongs to another unit, and has its full name.
struct GraphParameter {
  engine::ParameterSpec spec;
  bool foreign = false;
};

// An op's use of a parameter: the parameter's index in the graph, the number of this use, and the elements of
// its gradient that backward writes; nothing: all.
struct ParameterUse {
  std::size_t slot = 0;
  int use = 0;
  std::optional<std::vector<comm::Runs>> writes = {};
};

// One call of AxisRanks.
struct LayerCall {
  std::size_t values = 0;
  bool gathers = false;         // false: an all-reduce
  bool along_sequence = false;  // false: along "tensor"
  Dtype type = Dtype::kF32;
  bool beside_weights = false;  // it overlaps with the op's gradients of weights
};

// Forward may write the output over the input; backward may write the input's gradient over the output's.
struct InPlace {
  std::size_t input = 0, output = 0;
};

struct OpSpec {
  std::string name;  // its name in --recompute: "ln1", "attention"
  std::vector<ValueId> inputs = {}, outputs = {};
  std::vector<ValueId> saved = {};  // inputs and outputs that backward reads
  std::vector<ParameterUse> parameters = {};
  std::vector<InPlace> forward_in_place = {}, backward_in_place = {};
  std::vector<std::size_t> passes_gradient = {};  // inputs whose gradient equals the first output's
  bool adds_gradients = false;                    // backward can accumulate into its inputs' gradients
  bool changes_output_gradients = false;          // backward overwrites its outputs' gradients
  bool splits_backward = false;                   // backward can be split into two halves
  double forward_flops = 0, backward_flops = 0;   // of matrix products and attention
  double forward_bytes = 0, backward_bytes = 0;   // memory traffic of all other work
  double weights_flops = 0, weights_bytes = 0;    // the second half's part of backward
  // Collectives of forward, and of backward's first half.
  std::vector<LayerCall> forward_calls = {}, backward_calls = {};
};

class OpContext;

// An op is immutable. forward and backward write every element that they declare, and read nothing else.
// Equal inputs give the same bits wherever they lie, so that recomputation is exact.
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
  // The two halves of an op that splits backward, which together give the bits of backward(). The first one
  // computes the gradients of the inputs. The second one, which may run much later, computes those of the
  // parameters, from the saved values and the outputs' gradients as the first half has left them.
  virtual std::size_t weights_workspace(kernels::ProductSurvey& products) const;  // bytes
  virtual void backward_inputs(const OpContext& context) const;
  virtual void backward_weights(const OpContext& context) const;

 private:
  OpSpec spec_;
};

// The ops of a unit in order of execution. A graph without an input begins with tokens. A graph without an
// output ends in the loss, and its backward pass needs no forward pass.
class Graph {
 public:
  ValueId add_value(Value value);
  // Returns the parameter's slot. Names of the unit's own parameters lack the unit's prefix.
  std::size_t add_parameter(engine::ParameterSpec spec, bool foreign = false);
  void add_op(std::unique_ptr<Op> op);
  void set_input(ValueId value) { input_ = value; }
  void set_output(ValueId value) { output_ = value; }

  const std::vector<Value>& values() const { return values_; }
  const std::vector<GraphParameter>& parameters() const { return parameters_; }
  const std::vector<std::unique_ptr<Op>>& ops() const { return ops_; }
  std::optional<ValueId> input() const { return input_; }
  std::optional<ValueId> output() const { return output_; }
  std::optional<std::size_t> producer(ValueId value) const { return producers_[value]; }  // index of an op
  bool splits_backward() const;  // whether any op does

 private:
  std::vector<Value> values_;
  std::vector<GraphParameter> parameters_;
  std::vector<std::unique_ptr<Op>> ops_;
  std::vector<std::optional<std::size_t>> producers_;
  std::optional<ValueId> input_, output_;
};

}  // namespace sluice::models
