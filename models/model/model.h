#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "allocator/ledger.h"
#include "core/threads.h"
#include "core/trace.h"
#include "engine/plan/plan.h"
#include "engine/plan/profile.h"
#include "engine/steps/scheduled_engine.h"
#include "kernels/attention.h"
#include "kernels/matrix.h"
#include "models/families/config.h"
#include "models/graph/context.h"
#include "models/graph/cut.h"
#include "models/model/neighbours.h"

namespace sluice::models {

// A transformer for micro-batches of one shape: its units, and what the plan must know of them. Immutable.
class Model {
 public:
  // Throws Error(kInvalidArgument) where length exceeds the context, or the configuration is inconsistent.
  // recompute: ops that the user wants to run again in backward ("ln1+gelu"): one more choice for the plan,
  // of that name. "", "auto", "none" and "full" add nothing.
  // cut: how its layers are computed, in pieces, over ranks; kInvalidArgument where a layer has fewer.
  Model(const ModelConfig& config, Dtype dtype, std::size_t batch, std::size_t length,
        const std::string& recompute = "", const TensorCut& cut = {}, const SequenceCut& sequence = {});
  // The section of a pipeline that has these units of a model of its own shape, by chunk: at least one block
  // each, the embedding with the first ones, the head with the last. Where the head is tied, the last section
  // also has a copy of the embedding, as its first unit, which the lookups of the first section do not reach.
  Model(const Model& whole, const std::vector<engine::UnitRange>& chunks);
  ~Model();

  const ModelConfig& config() const;
  std::size_t batch() const;
  std::size_t length() const;
  // Units in order of forward, with parameters named and shaped as in Hugging Face's files of that family
  // ("transformer.h.0.attn.c_attn.weight"; GPT-2's Conv1D weights are [in, out]).
  const std::vector<engine::UnitSpec>& units() const;
  kernels::AttentionShape attention() const;               // of a micro-batch in a block
  std::size_t text_cache_bytes(std::size_t tokens) const;  // of Runner::keep_text()
  // States sizes and work; nothing is allocated. hidden_bytes: what the library takes for itself for products
  // in f32 that are not the model's. splits_backward: the gradients of weights have passes of their own.
  engine::Profile profile(std::size_t micro_batches, const kernels::MatrixLibrary& library,
                          std::size_t hidden_bytes = 0, bool splits_backward = false) const;

  struct Impl;
  const Impl& impl() const { return *impl_; }  // for the other files of the folder

 private:
  std::unique_ptr<Impl> impl_;
};

// Tokens of one micro-batch, [batch, length], by sequences; where these are cut over ranks, the rows of
// row_parts(). A target of kernels::kIgnoredTarget has no loss.
struct MicroBatch {
  std::span<const std::int32_t> tokens, targets;
  std::uint64_t first_sample = 0;  // global index of its first sequence: keys the dropout
};

// How many targets have a loss.
std::uint64_t counted_targets(std::span<const MicroBatch> micro_batches);

struct TrainStep {
  std::uint64_t seed = 0, number = 0;  // both key the dropout
  std::uint64_t targets = 0;  // that count, of all micro-batches of the step, also those of other ranks
  float loss_scale = 1;
};

// The mean over the targets of all micro-batches, whose losses are added in their order.
double loss_of_step(std::span<const double> losses, std::uint64_t targets);

// Runs a model on an engine: owns the activations and the workspace (taken at construction, exactly as
// planned). Thread rule: one thread at a time.
class Runner {
 public:
  // place: where the model is a section of a pipeline; its profile is that of engine::in_pipeline(), and the
  // engine has the other sections.
  Runner(const Model& model, const engine::Plan& plan, engine::ScheduledEngine& engine, Threads& threads,
         kernels::MatrixLibrary& library, allocator::Ledger& ledger, Trace* trace = nullptr,
         const Place& place = {}, const LayerRanks& layers = {});
  ~Runner();

  // Runs forward and backward of all micro-batches (as many as the profile was made for), in the vertical
  // order, in groups as planned. The caller has called engine.begin_step and calls engine.step afterwards.
  // Returns the sum of the losses of each micro-batch. Gradients are of loss_of_step(), times
  // step.loss_scale. `between` is called from time to time (progress, signals) and may throw to give the step
  // up. Throws Error(kInvalidArgument) where step.targets is 0.
  std::vector<double> train_step(std::span<const MicroBatch> micro_batches, const TrainStep& step,
                                 const std::function<void()>& between = {});

  // Returns the mean loss of one micro-batch, or 0 without the head; without gradients or dropout. Units come
  // in one after another.
  double evaluate(const MicroBatch& micro_batch);

  // From now on the keys and values of a text of up to `tokens` tokens are kept from one next_logits() to the
  // next. REQUIRES: text_cache_bytes(tokens) were added to the profile's workspace_bytes.
  void keep_text(std::size_t tokens);
  // The activations' memory, which nothing uses between steps.
  std::span<std::byte> idle_activations();
  // Computes the logits [vocabulary] of the last of `tokens` (at most model.length()); batch 1 suffices.
  // Where the text is kept, and is the last call's with one token more, only that token is computed.
  void next_logits(std::span<const std::int32_t> tokens, std::span<float> logits);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace sluice::models
