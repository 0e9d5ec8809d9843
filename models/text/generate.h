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
  std::string prompt;      // text; token ids where the model's tokens are not bytes
  std::optional<std::string> prompt_tokens;  // token ids, whatever the model's tokens are; then no prompt
  std::uint64_t tokens = 200;
  // The most tokens that the next one follows from; by default as many as the model has learned from at once,
  // or its context, up to 1024, where that is not known.
  std::optional<std::uint64_t> window;
  double temperature = 0.8;  // 0: the likeliest token
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

// Samples settings.tokens tokens after the prompt, within the memory that is stated. Throws Error.
void generate(const GenerateSettings& settings, const GenerateEvents& events);

struct Sampling {
  double temperature = 1;
  std::uint64_t top_k = 0;
  double top_p = 1;
};
// Returns the token into whose part of the distribution `uniform` (in [0, 1)) falls, ties in their order.
std::int32_t sample_token(std::span<const float> logits, const Sampling& sampling, double uniform);

}  // namespace sluice::models
