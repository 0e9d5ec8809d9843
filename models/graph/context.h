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

// What the ops need of the engine, which the tests replace by plain memory.
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
  // The same where the gradient is 0 in all rows but these; an op that is to accumulate writes nothing there.
  // A source that has no use for that does as it does without.
  virtual engine::GradientTarget gradient_of_rows(engine::ParameterId parameter, int use,
                                                  std::size_t micro_batch,
                                                  std::span<const std::int32_t> /*rows*/) {
    return gradient(parameter, use, micro_batch);
  }
  virtual void progress() = 0;
  // The model has no need of the activations from byte `from` on, until take_activations_back() returns those
  // before byte `until` to it. A source that has no use for them does nothing.
  virtual void lend_activations(std::size_t /*from*/) {}
  virtual void take_activations_back(std::size_t /*until*/) {}
};

// The ranks along the mesh's axis "tensor", or "sequence", which compute a micro-batch together
// (graph/cut.h). Calls are collective over them, come in the same order on all of them, and wait. `name` says
// what for.
class AxisRanks {
 public:
  virtual ~AxisRanks() = default;
  // Afterwards `values` are the sums over all ranks, added pairwise. Calls `beside`, if not null, while they
  // are on their way.
  virtual void all_reduce(const std::string& name, std::span<float> values,
                          const std::function<void()>& beside = {}) = 0;
  // Each rank has one of the parts that the `count` values fall into, all of one size; afterwards it has all
  // of them.
  virtual void all_gather(const std::string& name, Array values, std::size_t count) = 0;
};

// The ranks along the axes over which layers are cut. REQUIRES: not null where they are.
struct LayerRanks {
  AxisRanks *tensor = nullptr, *sequence = nullptr;
};

// The keys and values of one text in one unit, with room for `capacity` rows of each, one row a token. A pass
// stores `rows` of them, from its first position on.
struct UnitCache {
  std::byte *keys = nullptr, *values = nullptr;
  std::size_t capacity = 0, rows = 0;
};

// What a unit's ops work on in one pass of one micro-batch.
struct Execution {
  Threads& threads;
  kernels::MatrixLibrary& library;
  ParameterSource& source;
  std::span<const engine::ParameterId> parameters;  // by the graph's slots
  std::array<std::byte*, kAreas> areas = {};
  std::span<const std::int32_t> tokens = {}, targets = {};
  std::size_t micro_batch = 0;  // within the step
  bool training = true;         // else there is no dropout
  std::uint64_t seed = 0, step = 0, first_sample = 0;
  std::uint64_t first_op = 0;    // the index in the model of the unit's first op
  float gradient_scale = 1;      // factor of the gradient of every row's loss
  double loss = 0;               // sum over rows, set by the op that computes it
  std::span<float> logits = {};  // where given, forward writes the logits of one row to it instead of a loss
  std::size_t logits_row = 0;
  std::size_t first_position = 0;  // the position of each sequence's first token
  LayerRanks layers = {};
  UnitCache cache = {};  // where given, attention stores there; a pass of one token also reads there
};

// A stream of CounterRandom (core/random.h).
struct RandomWords {
  std::uint64_t seed = 0, stream = 0;
};

// What an op may touch in one step of a program: each array at the location that was planned for it.
class OpContext {
 public:
  OpContext(Execution& execution, const Graph& graph, const Step& step)
      : execution_(execution), graph_(graph), step_(step), spec_(graph.ops()[step.op]->spec()) {}

  Execution& run() const { return execution_; }
  Threads& threads() const { return execution_.threads; }
  kernels::MatrixLibrary& library() const { return execution_.library; }

  Array input(std::size_t i) const { return array(step_.inputs[i], spec_.inputs[i]); }
  Array output(std::size_t i) const { return array(step_.outputs[i], spec_.outputs[i]); }
  float* statistics(std::size_t output_index) const { return output(output_index).f32(); }
  Array input_gradient(std::size_t i) const { return array(step_.input_gradients[i], spec_.inputs[i]); }
  Array output_gradient(std::size_t i) const { return array(step_.output_gradients[i], spec_.outputs[i]); }
  bool adds(std::size_t i) const { return step_.adds[i]; }  // the input's gradient is added to what is there
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
  // Names the op's random words in this training step: a recomputation has the same, no other op or step has.
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

// Runs a program; before_step is called before each of its steps with the step's index.
using BeforeStep = std::function<void(std::size_t)>;
void execute(const Graph& graph, const Program& program, Execution& execution, const BeforeStep& before_step);

}  // namespace sluice::models
