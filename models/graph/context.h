#pragma once
#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "core/threads.h"
#include "engine/steps/scheduled_engine.h"
#include "kernels/matrix.h"
#include "models/graph/graph.h"
#include "models/graph/program.h"

namespace sluice::models {

// The ops' interface to the engine; tests implement it with plain memory.
class ParameterSource {
 public:
  virtual ~ParameterSource() = default;
  virtual void acquire(const engine::Access& access) = 0;
  virtual void release(const engine::Access& access) = 0;
  virtual void acquire_for_reading(engine::UnitId unit) = 0;
  virtual void release_from_reading(engine::UnitId unit) = 0;
  virtual ConstArray value(engine::ParameterId parameter) = 0;
  virtual engine::GradientTarget gradient(engine::ParameterId parameter, int use,
                                          std::size_t micro_batch) = 0;
  // The same for a gradient that is 0 in all rows but these; an accumulating op writes to no other row. The
  // default ignores the rows.
  virtual engine::GradientTarget gradient_of_rows(engine::ParameterId parameter, int use,
                                                  std::size_t micro_batch,
                                                  std::span<const std::int32_t> /*rows*/) {
    return gradient(parameter, use, micro_batch);
  }
  virtual void progress() = 0;
  // Lends out the activations from byte `from` on, which the model does not need until
  // take_activations_back() has returned those before byte `until`. The default does nothing.
  virtual void lend_activations(std::size_t /*from*/) {}
  virtual void take_activations_back(std::size_t /*until*/) {}
};

// The ranks along the mesh's axis "tensor" or "sequence", which compute a micro-batch together (graph/cut.h).
// Calls are collective and blocking, and come in the same order on all of these ranks. `name` is for error
// messages.
class AxisRanks {
 public:
  virtual ~AxisRanks() = default;
  // Replaces `values` by their sums over all ranks, added pairwise. Calls `beside`, if not null, while the
  // messages are in flight.
  virtual void all_reduce(const std::string& name, std::span<float> values,
                          const std::function<void()>& beside = {}) = 0;
  // Each rank has one of the equal parts of the `count` values, in the order of the ranks; afterwards each
  // rank has all parts.
  virtual void all_gather(const std::string& name, Array values, std::size_t count) = 0;
};

// The ranks along the axes that layers are cut over. REQUIRES: not null for an axis with several ranks.
struct LayerRanks {
  AxisRanks *tensor = nullptr, *sequence = nullptr;
};

// A cache of the keys and values of one text in one unit, with room for `capacity` rows (tokens) of each. A
// pass stores `rows` of them, beginning at its first position.
struct UnitCache {
  std::byte *keys = nullptr, *values = nullptr;
  std::size_t capacity = 0, rows = 0;
};

// The inputs of a unit's ops in one pass of one micro-batch.
struct Execution {
  Threads& threads;
  kernels::MatrixLibrary& library;
  ParameterSource& source;
  std::span<const engine::ParameterId> parameters;  // by slot of the graph
  std::array<std::byte*, kAreas> areas = {};
  std::span<const std::int32_t> tokens = {}, targets = {};
  std::size_t micro_batch = 0;  // within the step; where rows are computed in pieces, each counts as one
  bool training = true;         // false: without dropout
  std::uint64_t seed = 0, step = 0, first_sample = 0;
  std::uint64_t first_op = 0;    // the index of the unit's first op in the model
  float gradient_scale = 1;      // multiplies the gradient of every row's loss
  double loss = 0;               // sum over rows, set by the loss op
  std::span<float> logits = {};  // if given, forward writes the logits of row logits_row instead of a loss
  std::size_t logits_row = 0;
  std::size_t first_position = 0;  // the position of each sequence's first token
  LayerRanks layers = {};
  UnitCache cache = {};  // if set, attention stores into it; a pass of one token also reads it
};

// A stream of CounterRandom (core/random.h).
struct RandomWords {
  std::uint64_t seed = 0, stream = 0;
};

// The arrays of an op in one step of a program, each at its planned location.
class OpContext {
 public:
  OpContext(Execution& execution, const Graph& graph, const Step& step)
      : execution_(execution), graph_(graph), step_(step), spec_(graph.ops()[step.op]->spec()) {}

  Execution& run() const { return execution_; }
  const Graph& graph() const { return graph_; }
  const Step& step() const { return step_; }
  Threads& threads() const { return execution_.threads; }
  kernels::MatrixLibrary& library() const { return execution_.library; }

  Array input(std::size_t i) const { return array(step_.inputs[i], spec_.inputs[i]); }
  Array output(std::size_t i) const { return array(step_.outputs[i], spec_.outputs[i]); }
  float* statistics(std::size_t output_index) const { return output(output_index).f32(); }
  Array input_gradient(std::size_t i) const { return array(step_.input_gradients[i], spec_.inputs[i]); }
  Array output_gradient(std::size_t i) const { return array(step_.output_gradients[i], spec_.outputs[i]); }
  bool adds(std::size_t i) const { return step_.adds[i]; }  // whether the input's gradient is accumulated
  void* scratch() const { return pointer(step_.scratch); }
  void* scratch_from(std::size_t byte) const { return pointer(step_.scratch) + byte; }

  ConstArray parameter(std::size_t i) const { return execution_.source.value(id(i)); }
  engine::GradientTarget gradient(std::size_t i) const {
    return execution_.source.gradient(id(i), spec_.parameters[i].use, execution_.micro_batch);
  }
  engine::GradientTarget gradient_of_tokens(std::size_t i) const {
    return execution_.source.gradient_of_rows(id(i), spec_.parameters[i].use, execution_.micro_batch,
                                              execution_.tokens);
  }
  // Returns the stream of the op's random words in this training step. A recomputation uses the same stream,
  // other ops and steps use other ones.
  RandomWords random_words() const;

 private:
  engine::ParameterId id(std::size_t i) const { return execution_.parameters[spec_.parameters[i].slot]; }
  std::byte* pointer(Location location) const {
    std::byte* base = execution_.areas[static_cast<std::size_t>(location.area)];
    return base == nullptr ? nullptr : base + location.offset;
  }
  Array array(Location location, ValueId value) const {
    return {pointer(location), graph_.values()[value].type};
  }

  Execution& execution_;
  const Graph& graph_;
  const Step& step_;
  const OpSpec& spec_;
};

// Runs a program; calls before_step with the index of each step before it.
using BeforeStep = std::function<void(std::size_t)>;
void execute(const Graph& graph, const Program& program, Execution& execution, const BeforeStep& before_step);

}  // namespace sluice::models
