#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "offload/records.h"

namespace sluice::models {

struct GenerateSettings {
  std::string checkpoint;  // a checkpoint, an output folder (its newest one), or a Hugging Face folder
  bool best = false;       // of an output folder the best checkpoint by validation
  std::string prompt;      // text; token ids for a model whose tokens are not bytes
  std::optional<std::string> prompt_tokens;  // token ids for any model, instead of a prompt
  std::uint64_t tokens = 200;
  // The most preceding tokens that the next one depends on; by default as many as the longest sample in
  // training, or, where that is unknown, the model's context up to 1024.
  std::optional<std::uint64_t> window;
  double temperature = 0.8;  // 0: always the likeliest token
  std::uint64_t top_k = 0;   // 0: all
  double top_p = 1;
  std::uint64_t seed = 1;
  std::uint64_t memory = 0;  // as in TrainSettings
  std::vector<offload::DiskFolder> disk;
  int threads = 0;
};

struct GenerateEvents {
  std::function<void(bool tokens_are_bytes)> begin;
  std::function<void(std::int32_t token)> token;
};

// Samples settings.tokens tokens after the prompt, within the stated memory. Throws Error.
void generate(const GenerateSettings& settings, const GenerateEvents& events);

struct Sampling {
  double temperature = 1;
  std::uint64_t top_k = 0;
  double top_p = 1;
};
// Returns the token whose part of the cumulative distribution contains `uniform` (in [0, 1)), with ties in
// their order.
std::int32_t sample_token(std::span<const float> logits, const Sampling& sampling, double uniform);

}  // namespace sluice::models
