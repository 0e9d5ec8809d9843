#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "core/json.h"

namespace sluice::models {

struct Family;

// A scaling of the rotary frequencies ("rope_type"): "linear" divides all of them by the factor, and "llama3"
// those of long wavelengths.
struct RopeScaling {
  enum class Kind : std::uint8_t { kLlama3, kLinear };
  Kind kind = Kind::kLlama3;
  double factor = 8;
  // Of Llama 3's alone.
  double low_frequency_factor = 1, high_frequency_factor = 4;
  std::size_t original_context = 8192;
};

// The shape of a transformer; one struct for all families.
struct ModelConfig {
  const Family* family = nullptr;  // one of families(), or a test's; never null in a complete configuration
  std::size_t vocabulary = 50257, context = 1024, layers = 12, width = 768, heads = 12, kv_heads = 12;
  std::size_t head_width = 64, hidden_width = 3072;  // of the feed-forward part
  float norm_epsilon = 1e-5f;
  double rope_theta = 10000;
  std::optional<RopeScaling> rope_scaling;
  bool tied_head = true;
  bool qkv_bias = false;  // Qwen2 has it; GPT-2 always has biases
  float embedding_dropout = 0, attention_dropout = 0, residual_dropout = 0;
  float initializer_range = 0.02f;
  Json hugging_face = nullptr;  // the config.json that it was read from, saved with the model; null: none
};

// Returns the presets: "tiny" (byte vocabulary, for tests), "mini" (11 million parameters, bytes),
// "gpt2-124m", "gpt2-355m", "gpt2-774m", "gpt2-1.5b", "tiny-llama", "llama-1b", "llama-3b", "llama-8b",
// "llama-70b": the published shapes (Llama 3.2 1B and 3B, 3.1 8B and 70B).
std::vector<std::string> preset_names();
bool is_preset(const std::string& model);
// `vocabulary` replaces the preset's (256: bytes). Throws Error(kInvalidArgument), with the nearest name, for
// an unknown preset.
ModelConfig preset(const std::string& name, std::optional<std::size_t> vocabulary = std::nullopt);

// Reads the config.json of a Hugging Face folder. Throws Error(kInvalidArgument), with the key, for a request
// that Sluice does not support (another model_type or activation, a sliding window, ...).
ModelConfig config_from_hugging_face(const Json& config, const std::string& source);
Json config_to_hugging_face(const ModelConfig& config, Dtype dtype);  // f32, bf16 or f16
// Throws Error(kInvalidArgument) for an impossible configuration.
void check_config(const ModelConfig& config);
// Accepts a preset's name, or a folder with a config.json.
ModelConfig resolve_model(const std::string& model);

}  // namespace sluice::models
