#include <fmt/ranges.h>

#include "core/error.h"
#include "models/families/config.h"
#include "models/families/families.h"

namespace sluice::models {
namespace {

const Family& family_of(const ConfigReader& reader) {
  const std::string type = reader.text("model_type", "");
  std::vector<std::string> known;
  for (const Family* family : families()) {
    if (family->model_type == type) return *family;
    known.emplace_back(family->model_type);
  }
  const std::string nearest = nearest_word(type, known);
  reader.refuse(
      "model_type",
      fmt::format("one of {}{}; in Python sluice.torch.from_pretrained() trains models of other types",
                  fmt::join(known, ", "), nearest.empty() ? "" : " (the nearest is " + nearest + ")"));
}

}  // namespace

ModelConfig config_from_hugging_face(const Json& json, const std::string& source) {
  const ConfigReader reader(json, source);
  reader.absent("quantization_config");
  const Family& family = family_of(reader);
  ModelConfig config = family.read(reader);
  config.family = &family;
  config.initializer_range = reader.single("initializer_range", 0.02);
  if (config.initializer_range < 0) reader.refuse("initializer_range", "at least 0");
  config.hugging_face = json;
  check_config(config);
  return config;
}

Json config_to_hugging_face(const ModelConfig& config, Dtype dtype) {
  Json json = config.hugging_face;
  if (json.is_null()) {
    json = config.family->write(config);
    json["model_type"] = config.family->model_type;
    json["architectures"] = Json::array({config.family->architecture});
    json["tie_word_embeddings"] = config.tied_head;
    json["initializer_range"] = shortest(config.initializer_range);
    // Models made here have no tokens for the beginning and the end of a text.
    json["bos_token_id"] = nullptr;
    json["eos_token_id"] = nullptr;
  }
  // Transformers 5 writes "dtype" and reads both keys.
  json.erase("dtype");
  json["torch_dtype"] = dtype == Dtype::kF32 ? "float32" : dtype == Dtype::kBf16 ? "bfloat16" : "float16";
  return json;
}

}  // namespace sluice::models
