#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/json.h"
#include "models/data/sampler.h"
#include "models/data/tokens.h"
#include "models/families/config.h"
#include "models/graph/cut.h"
#include "models/model/model.h"
#include "models/run/trainer.h"

namespace sluice::models {

// Returns the model that the settings name: a preset, with the byte vocabulary if requested, or a folder.
// Throws Error(kInvalidArgument), also where bytes are requested and the folder's weights are for other
// tokens, or its vocabulary is too small.
ModelConfig resolve_training_model(const TrainSettings& settings);

// Returns the number of consecutive micro-batches of a step that this rank computes, equal on all ranks.
std::size_t own_micro_batches(const TrainSettings& settings);
// Returns the memory of the tokens and targets of this rank's micro-batches in a step. check_token_bytes()
// throws Error(kBudget) where that is most of the stated memory.
std::uint64_t token_bytes(const TrainSettings& settings);
void check_token_bytes(const TrainSettings& settings);
std::size_t first_micro_batch(const TrainSettings& settings);  // index within the step

// The text for training and validation, and the buffers with the tokens of one step. Thread rule: one thread
// at a time.
class TrainingData {
 public:
  // REQUIRES: settings.length >= 1, and settings.memory is known. Throws Error(kInvalidArgument | kNotFound |
  // kIo), see open_tokens and split_windows, and Error(kBudget) where the tokens of one step do not fit.
  // Reads small token files completely.
  TrainingData(const TrainSettings& settings, const ModelConfig& config);

  // Returns this rank's micro-batches of a step whose first sample is `next`, valid until the next call of
  // this or validation().
  std::span<const MicroBatch> training(std::uint64_t next);
  bool has_validation() const { return validation_sampler_.has_value(); }
  // Returns micro-batch `index` of the validation data, in order, cyclically.
  const MicroBatch& validation(std::uint64_t index);

  std::uint64_t tokens() const { return source_->total(); }
  bool are_bytes() const { return source_->vocabulary().has_value(); }  // text instead of token ids
  // The fingerprint of the training data (docs/formats/checkpoint.md), 16 hexadecimal digits.
  const std::string& fingerprint() const { return fingerprint_; }
  std::uint64_t windows() const { return sampler_->windows(); }
  // Returns what identifies the validation data: fingerprint and windows. REQUIRES: has_validation()
  Json validation_identity() const;

 private:
  MicroBatch fill(TokenSource& source, const Sampler& sampler, std::uint64_t first, std::size_t slot);

  std::size_t batch_, length_, first_micro_batch_;
  std::string fingerprint_, validation_fingerprint_;
  // Null validation_source_: validation uses a part of the training data.
  std::unique_ptr<TokenSource> source_, validation_source_;
  std::optional<Sampler> sampler_, validation_sampler_;
  std::vector<std::int32_t> tokens_, targets_;
  std::vector<std::int32_t> whole_tokens_, whole_targets_;  // of a micro-batch on all ranks of "sequence"
  std::vector<RowPart> rows_;                               // this rank's part of it
  std::vector<MicroBatch> micro_batches_;
};

}  // namespace sluice::models
