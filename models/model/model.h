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

// A transformer for micro-batches of one shape: its units, and what a plan must know of them. Immutable.
class Model {
 public:
  // recompute: ops that the user wants to recompute in backward ("ln1+gelu"), as one more choice for the
  // plan, of that name; "", "auto", "none" and "full" add none. cut, sequence: how ranks share layers and
  // sequences. Throws Error(kInvalidArgument) where length exceeds the context, the configuration is
  // inconsistent, or a layer has too few heads or columns for the cut.
  Model(const ModelConfig& config, Dtype dtype, std::size_t batch, std::size_t length,
        const std::string& recompute = "", const TensorCut& cut = {}, const SequenceCut& sequence = {});
  // Makes a section of a pipeline: these units of a whole model, by chunk. Each chunk has at least one block;
  // the embedding is in the first one, the head in the last. Where the head is tied, the last section also
  // has a copy of the embedding's table as its first unit, without the lookup of tokens.
  Model(const Model& whole, const std::vector<engine::UnitRange>& chunks);
  ~Model();

  const ModelConfig& config() const;
  std::size_t batch() const;
  std::size_t length() const;
  // Units in forward order, with parameters named and shaped as in Hugging Face's files of that family
  // ("transformer.h.0.attn.c_attn.weight"; GPT-2's Conv1D weights are [in, out]).
  const std::vector<engine::UnitSpec>& units() const;
  kernels::AttentionShape attention() const;               // of one block for a micro-batch
  std::size_t text_cache_bytes(std::size_t tokens) const;  // for Runner::keep_text()
  // Describes sizes and work; allocates nothing. hidden_bytes: internal bytes of the library for f32 products
  // outside of the model. splits_backward: the gradients of weights have passes of their own.
  engine::Profile profile(std::size_t micro_batches, const kernels::MatrixLibrary& library,
                          std::size_t hidden_bytes = 0, bool splits_backward = false) const;

  struct Impl;
  const Impl& impl() const { return *impl_; }  // for the other files of the folder

 private:
  std::unique_ptr<Impl> impl_;
};

// The tokens of one micro-batch, [batch, length], sequence after sequence; where ranks share sequences, the
// rows of row_parts(). A target of kernels::kIgnoredTarget has no loss.
struct MicroBatch {
  std::span<const std::int32_t> tokens, targets;
  std::uint64_t first_sample = 0;  // global index of its first sequence, a part of dropout's random key
};

// Returns the number of targets with a loss.
std::uint64_t counted_targets(std::span<const MicroBatch> micro_batches);

struct TrainStep {
  std::uint64_t seed = 0, number = 0;  // parts of dropout's random key
  std::uint64_t targets = 0;           // counted_targets() of all micro-batches of the step on all ranks
  float loss_scale = 1;
};

// Returns the mean over all targets; the losses of micro-batches are added in their order.
double loss_of_step(std::span<const double> losses, std::uint64_t targets);

// Runs a model on an engine. Owns the activations and the workspace, allocated at construction, exactly as
// planned. Thread rule: one thread at a time.
class Runner {
 public:
  // place: the section of a pipeline that the model is, if any; then its profile is that of
  // engine::in_pipeline(), and the engine is connected to the other sections.
  Runner(const Model& model, const engine::Plan& plan, engine::ScheduledEngine& engine, Threads& threads,
         kernels::MatrixLibrary& library, allocator::Ledger& ledger, Trace* trace = nullptr,
         const Place& place = {}, const LayerRanks& layers = {});
  ~Runner();

  // Runs forward and backward of all micro-batches (as many as the profile was made for): each unit processes
  // a whole group of them, of the planned size, before the next unit. The caller calls engine.begin_step
  // before and engine.step after. Returns the sum of the losses of each micro-batch. Gradients are of
  // loss_of_step(), times step.loss_scale. `between` is called from time to time (progress, signals) and may
  // throw to abandon the step. Throws Error(kInvalidArgument) where step.targets is 0.
  std::vector<double> train_step(std::span<const MicroBatch> micro_batches, const TrainStep& step,
                                 const std::function<void()>& between = {});

  // Returns the sum of the losses of one micro-batch, or 0 without the head; without gradients or dropout.
  // Units are fetched one after another.
  double evaluate(const MicroBatch& micro_batch);

  // Caches the keys and values of a text of up to `tokens` tokens from one next_logits() to the next.
  // REQUIRES: text_cache_bytes(tokens) were added to the profile's workspace_bytes.
  void keep_text(std::size_t tokens);
  // The activations' memory, which is unused between steps.
  std::span<std::byte> idle_activations();
  // Computes the logits [vocabulary] of the last of `tokens` (at most model.length()); batch 1 suffices. With
  // keep_text(), where the text is the previous call's with one token more, only that token is computed.
  void next_logits(std::span<const std::int32_t> tokens, std::span<float> logits);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace sluice::models
