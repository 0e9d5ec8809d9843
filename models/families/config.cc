#include "models/families/config.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <limits>
#include <utility>

#include "core/error.h"
#include "models/families/families.h"

namespace sluice::models {
namespace {

std::vector<Preset> presets() {
  std::vector<Preset> all;
  for (const Family* family : families())
    for (Preset& preset : family->presets()) {
      preset.config.family = family;
      all.push_back(std::move(preset));
    }
  return all;
}

[[noreturn]] void fail_unknown(const std::string& model) {
  const std::vector<std::string> known = preset_names();
  const std::string nearest = nearest_word(model, known);
  fail(ErrorCode::kInvalidArgument,
       "'{}' is neither a preset nor a folder with config.json{}; presets are {}", model,
       nearest.empty() ? "" : ": did you mean '" + nearest + "'?", fmt::join(known, ", "));
}

}  // namespace

std::vector<std::string> preset_names() {
  std::vector<std::string> names;
  for (const Preset& preset : presets()) names.emplace_back(preset.name);
  return names;
}

bool is_preset(const std::string& model) {
  const std::vector<std::string> known = preset_names();
  return std::ranges::find(known, model) != known.end();
}

ModelConfig preset(const std::string& name, std::optional<std::size_t> vocabulary) {
  for (auto& [known, config] : presets()) {
    if (known != name) continue;
    if (vocabulary) config.vocabulary = *vocabulary;
    check_config(config);
    return config;
  }
  fail_unknown(name);
}

void check_config(const ModelConfig& config) {
  ensure(config.family != nullptr, "a model is of no family");
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
  for (const float dropout : {config.embedding_dropout, config.attention_dropout, config.residual_dropout}) {
    if (dropout >= 0 && dropout < 1) continue;
    fail(ErrorCode::kInvalidArgument, "a dropout of {} is asked for; at least 0 and less than 1 is possible",
         dropout);
  }
  config.family->check(config);
}

ModelConfig resolve_model(const std::string& model) {
  if (is_preset(model)) return preset(model);
  const std::filesystem::path folder(model);
  std::error_code ignored;
  if (!std::filesystem::is_directory(folder, ignored)) fail_unknown(model);
  const std::string path = (folder / "config.json").string();
  if (!std::filesystem::exists(path, ignored))
    fail(ErrorCode::kInvalidArgument,
         "the folder '{}' has no config.json; name a preset or a Hugging Face folder, as each checkpoint in "
         "an --out folder is one",
         model);
  return config_from_hugging_face(read_json_file(path), path);
}

}  // namespace sluice::models
