#pragma once
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "core/trace.h"
#include "models/graph/context.h"
#include "models/model/model_impl.h"
#include "models/model/neighbours.h"
#include "models/model/text_cache.h"

namespace sluice::models {

// The layout of the activations: inputs and kept values, by unit, item and micro-batch; and the buffers that
// pass between sections, border gradients and outputs, by item and micro-batch. An item is a group of
// micro-batches that pass through a unit together.
struct ActivationLayout {
  struct Offsets {  // of the first item's first micro-batch; the others follow
    std::size_t input = 0, input_bytes = 0, kept = 0, kept_bytes = 0;
    std::size_t kept_for_weights = 0, kept_for_weights_bytes = 0, left_for_weights = 0,
                left_for_weights_bytes = 0;
  };
  std::vector<Offsets> units;
  std::size_t border = 0, output = 0, border_bytes = 0;
  std::size_t bytes = 0;
};

// Runs a model's programs in given memory, with parameters of any ParameterSource: item after item, forward
// and backward, through all units; a section of a pipeline runs in the order of its actions.
class Executor {
 public:
  struct Resources {
    ParameterSource& source;
    Threads& threads;
    kernels::MatrixLibrary& library;
    Trace* trace = nullptr;
    LayerRanks layers = {};
  };
  using Between = std::function<void()>;

  // choices: by unit.
  Executor(const Model::Impl& model, std::vector<Choice> choices, std::size_t group,
           const Resources& resources, const Place& place = {});

  std::size_t activation_bytes() const { return layout_.bytes; }
  std::size_t workspace_bytes() const { return workspace_bytes_; }
  // Returns the bytes of activations that are unused from the end of backward to the next forward pass.
  std::size_t lendable_bytes() const { return layout_.border; }
  // To be called before any pass. REQUIRES: both have the sizes returned above, and are aligned to
  // kAlignment.
  void set_memory(std::span<std::byte> activations, std::span<std::byte> workspace);

  // Returns the sum of the losses of each micro-batch; zeros from a section without the head.
  std::vector<double> train_step(std::span<const MicroBatch> micro_batches, const TrainStep& step,
                                 const Between& between);
  double evaluate(const MicroBatch& micro_batch);  // returns the sum of the losses
  // Does not compute tokens again whose keys and values are in the cache; stores those that it computes.
  void next_logits(std::span<const std::int32_t> tokens, std::span<float> logits, TextCache* cache = nullptr);

  // For tests: sets a function that is called before each step of a program.
  using Observer = std::function<void(const Program&, std::size_t, std::span<std::byte>)>;
  void observe(Observer observer) { observer_ = std::move(observer); }

 private:
  struct Key {
    std::uint64_t seed = 0, step = 0;
    float gradient_scale = 1;
  };
  struct Step {
    std::span<const MicroBatch> micro_batches;
    Key key;
    const Between& between;
    std::vector<double> losses;
    std::vector<engine::Action> under_way;  // receives and sends in flight
    std::size_t items = 0;
  };
  Execution execution(engine::UnitId unit, std::size_t item, std::size_t place,
                      const MicroBatch& micro_batch);
  engine::UnitId first_of(std::size_t chunk) const { return model_.chunks()[chunk].first; }
  // The bytes that an action receives or sends for an item of `micro_batches` micro-batches.
  std::span<std::byte> message(const engine::Action& action, std::size_t micro_batches) const;
  void begin(const engine::Action& action, std::size_t micro_batches, std::vector<engine::Action>& under_way);
  void await(const engine::Action& action, std::vector<engine::Action>& under_way);
  void act(const engine::Action& action, const engine::Pipeline& pipeline, Step& step);
  void run(engine::UnitId unit, const Program& program, Execution& execution, const Between& between);
  void run_pass(const Pass& pass, std::size_t item, Step& step);
  void hold(const Pass& pass);  // for a unit whose gradient becomes complete without any computation
  void claim_activations(const Pass& pass) const;
  void lend_activations(const Pass& pass) const;
  struct Text {  // the text that a forward pass continues
    TextCache* cache = nullptr;
    std::size_t first_position = 0, rows = 0;
  };
  double run_forward(const MicroBatch& micro_batch, std::span<float> logits, std::size_t logits_row,
                     const Text& text);
  void padded_logits(std::span<const std::int32_t> tokens, std::span<float> logits, TextCache* cache);
  void whole_logits(std::span<const std::int32_t> tokens, std::span<float> logits, TextCache* cache);
  Executor* one_token();  // null where memory does not suffice
  void check_logits(std::span<const std::int32_t> tokens, std::span<float> logits) const;
  void check(const MicroBatch& micro_batch) const;
  void check_tokens(std::span<const std::int32_t> tokens) const;

  const Model::Impl& model_;
  const bool splits_backward_;
  std::vector<Choice> choices_;
  std::vector<std::shared_ptr<const UnitProgram>> programs_;  // by unit; equal ones are shared
  std::vector<Pass> passes_;
  std::size_t group_;
  Resources resources_;
  Place place_;
  engine::PipelineBuffers buffers_;
  std::vector<std::size_t> held_;  // items in memory, by chunk
  ActivationLayout layout_;
  std::size_t workspace_bytes_ = 0;
  std::span<std::byte> activations_, workspace_;
  Observer observer_;
  std::unique_ptr<const Model::Impl> one_token_model_;
  std::unique_ptr<Executor> one_token_;
};

}  // namespace sluice::models
