#include "models/families/config.h"

#include <algorithm>
#include <filesystem>
#include <functional>
#include <limits>
#include <utility>

#include "core/error.h"

namespace sluice::models {
namespace {

ModelConfig gpt2(std::size_t layers, std::size_t width, std::size_t heads, std::size_t vocabulary = 50257,
                 std::size_t context = 1024) {
  ModelConfig config;
  config.vocabulary = vocabulary;
  config.context = context;
  config.layers = layers;
  config.width = width;
  config.heads = config.kv_heads = heads;
  config.head_width = width / heads;
  config.hidden_width = 4 * width;
  return config;
}

struct LlamaSizes {
  std::size_t layers, width, heads, kv_heads, head_width, hidden_width;
};

ModelConfig llama(const LlamaSizes& sizes, std::size_t vocabulary, std::size_t context) {
  ModelConfig config;
  config.family = Family::kLlama;
  config.vocabulary = vocabulary;
  config.context = context;
  config.layers = sizes.layers;
  config.width = sizes.width;
  config.heads = sizes.heads;
  config.kv_heads = sizes.kv_heads;
  config.head_width = sizes.head_width;
  config.hidden_width = sizes.hidden_width;
  config.tied_head = false;
  return config;
}

// The 3.1 and 3.2 releases: one vocabulary, one context, frequencies stretched by different factors.
ModelConfig llama3(const LlamaSizes& sizes, double factor, bool tied) {
  ModelConfig config = llama(sizes, 128256, 131072);
  config.rope_theta = 500000;
  config.rope_scaling = RopeScaling{factor, 1, 4, 8192};
  config.tied_head = tied;
  return config;
}

const std::vector<std::pair<std::string, std::function<ModelConfig()>>>& presets() {
  static const std::vector<std::pair<std::string, std::function<ModelConfig()>>> all = {
      {"tiny", [] { return gpt2(4, 128, 4, 256, 256); }},
      {"mini", [] { return gpt2(6, 384, 6, 256, 256); }},
      {"gpt2-124m", [] { return gpt2(12, 768, 12); }},
      {"gpt2-355m", [] { return gpt2(24, 1024, 16); }},
      {"gpt2-774m", [] { return gpt2(36, 1280, 20); }},
      {"gpt2-1.5b", [] { return gpt2(48, 1600, 25); }},
      {"tiny-llama",
       [] {
         return llama({4, 128, 4, 2, 32, 352}, 256, 256);
       }},
      {"llama-1b",
       [] {
         return llama3({16, 2048, 32, 8, 64, 8192}, 32, true);
       }},
      {"llama-3b",
       [] {
         return llama3({28, 3072, 24, 8, 128, 8192}, 32, true);
       }},
      {"llama-8b",
       [] {
         return llama3({32, 4096, 32, 8, 128, 14336}, 8, false);
       }},
      {"llama-70b",
       [] {
         return llama3({80, 8192, 64, 8, 128, 28672}, 8, false);
       }},
  };
  return all;
}

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : ", ") + word;
  return text;
}

[[noreturn]] void fail_unknown(const std::string& model) {
  const std::vector<std::string> known = preset_names();
  const std::string nearest = nearest_word(model, known);
  fail(ErrorCode::kInvalidArgument,
       "'{}' is neither a preset nor a folder with config.json{}; presets are {}", model,
       nearest.empty() ? "" : ": did you mean '" + nearest + "'?", joined(known));
}

}  // namespace

std::vector<std::string> preset_names() {
  std::vector<std::string> names;
  for (const auto& [name, make] : presets()) names.push_back(name);
  return names;
}

bool is_preset(const std::string& model) {
  const auto& all = presets();
  return std::any_of(all.begin(), all.end(), [&](const auto& known) { return known.first == model; });
}

ModelConfig preset(const std::string& name, std::optional<std::size_t> vocabulary) {
  for (const auto& [known, make] : presets()) {
    if (known != name) continue;
    ModelConfig config = make();
    if (vocabulary) config.vocabulary = *vocabulary;
    check_config(config);
    return config;
  }
  fail_unknown(name);
}

void check_config(const ModelConfig& config) {
  constexpr std::size_t kMost = std::numeric_limits<std::int32_t>::max();
  const std::pair<const char*, std::size_t> sizes[] = {
      {"vocabulary", config.vocabulary}, {"context", config.context},
      {"layers", config.layers},         {"width", config.width},
      {"heads", config.heads},           {"key/value heads", config.kv_heads},
      {"head width", config.head_width}, {"hidden width", config.hidden_width}};
  for (const auto& [name, size] : sizes) {
    if (size >= 1 && size <= kMost) continue;
    fail(ErrorCode::kInvalidArgument, "a model's {} is {}; between 1 and {} is possible", name, size, kMost);
  }
  constexpr std::size_t kMostLayers = 10'000;
  if (config.layers > kMostLayers)
    fail(ErrorCode::kInvalidArgument, "a model of {} layers is asked for; at most {} are possible",
         config.layers, kMostLayers);
  if (config.heads % config.kv_heads != 0) {
    fail(ErrorCode::kInvalidArgument, "{} heads cannot share {} key/value heads evenly", config.heads,
         config.kv_heads);
  }
  const bool is_gpt2 = config.family == Family::kGpt2;
  if (is_gpt2 && (config.heads * config.head_width != config.width || config.kv_heads != config.heads)) {
    fail(ErrorCode::kInvalidArgument,
         "a GPT-2 of width {} cannot have {} heads of width {} with {} key/value heads", config.width,
         config.heads, config.head_width, config.kv_heads);
  }
  if (!is_gpt2 && config.head_width % 2 != 0) {
    fail(ErrorCode::kInvalidArgument, "rotary positions need an even head width; it is {}",
         config.head_width);
  }
  for (const float dropout : {config.embedding_dropout, config.attention_dropout, config.residual_dropout}) {
    if (dropout >= 0 && dropout < 1) continue;
    fail(ErrorCode::kInvalidArgument, "a dropout of {} is asked for; at least 0 and less than 1 is possible",
         dropout);
  }
  if (!is_gpt2 && (config.embedding_dropout > 0 || config.residual_dropout > 0)) {
    fail(ErrorCode::kInvalidArgument, "the Llama family has dropout in its attention alone");
  }
}

ModelConfig resolve_model(const std::string& model) {
  for (const auto& [name, make] : presets()) {
    if (name == model) return make();
  }
  const std::filesystem::path folder(model);
  std::error_code ignored;
  if (!std::filesystem::is_directory(folder, ignored)) fail_unknown(model);
  const std::string path = (folder / "config.json").string();
  return config_from_hugging_face(read_json_file(path), path);
}

}  // namespace sluice::models
