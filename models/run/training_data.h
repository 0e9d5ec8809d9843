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

// Returns the model that the settings name: a preset, with the vocabulary of bytes where that is asked for,
// or a folder. Throws Error(kInvalidArgument), also where bytes are asked for and the folder has weights of
// other tokens, or a vocabulary that is too small.
ModelConfig resolve_training_model(const TrainSettings& settings);

// The micro-batches of a step that this rank computes: consecutive ones, as many on each rank.
std::size_t own_micro_batches(const TrainSettings& settings);
// The memory that the tokens and targets of a step's own micro-batches take. The second one throws
// Error(kBudget) where that is most of what is stated.
std::uint64_t token_bytes(const TrainSettings& settings);
void check_token_bytes(const TrainSettings& settings);
std::size_t first_micro_batch(const TrainSettings& settings);  // the index in the step

// The text that a run learns from and is judged by, and the buffers that hold the tokens of one step.
// Thread rule: one thread at a time.
class TrainingData {
 public:
  // REQUIRES: settings.length >= 1, and settings.memory is known.
  // Throws Error(kInvalidArgument | kNotFound | kIo), see open_tokens and split_windows, and Error(kBudget)
  // where the tokens of one step alone would not fit. Reads all of token files that are not large.
  TrainingData(const TrainSettings& settings, const ModelConfig& config);

  // The rank's micro-batches of a step whose first sample is `next`, valid until the next call, or
  // validation()'s.
  std::span<const MicroBatch> training(std::uint64_t next);
  bool has_validation() const { return validation_sampler_.has_value(); }
  // Micro-batch `index` of the validation data, in order; at its end it begins anew.
  const MicroBatch& validation(std::uint64_t index);

  std::uint64_t tokens() const { return source_->total(); }
  bool are_bytes() const {
    return source_->vocabulary().has_value();
  }  // bytes of text, else ids of token files
  // The fingerprint of the training data (docs/formats/checkpoint.md), as 16 hexadecimal digits.
  const std::string& fingerprint() const { return fingerprint_; }
  std::uint64_t windows() const { return sampler_->windows(); }
  // What the validation data is: fingerprint and windows. REQUIRES: has_validation()
  Json validation_identity() const;

 private:
  MicroBatch fill(TokenSource& source, const Sampler& sampler, std::uint64_t first, std::size_t slot);

  std::size_t batch_, length_, first_micro_batch_;
  std::string fingerprint_, validation_fingerprint_;
  std::unique_ptr<TokenSource> source_,
      validation_source_;  // null: validation is by a part of the training data
  std::optional<Sampler> sampler_, validation_sampler_;
  std::vector<std::int32_t> tokens_, targets_;
  std::vector<std::int32_t> whole_tokens_, whole_targets_;  // of a micro-batch
  std::vector<RowPart> rows_;                               // of it, that are this rank's
  std::vector<MicroBatch> micro_batches_;
};

}  // namespace sluice::models
