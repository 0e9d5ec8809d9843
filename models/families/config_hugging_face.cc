#include <cmath>
#include <limits>

#include "core/error.h"
#include "models/families/config.h"

namespace sluice::models {
namespace {

// One config.json, with messages that name it.
class Reader {
 public:
  Reader(const Json& config, const std::string& source) : config_(config), source_(source) {
    if (!config.is_object()) fail(ErrorCode::kInvalidArgument, "{}: not an object", source);
  }

  bool has(const std::string& key) const {
    const auto found = config_.find(key);
    return found != config_.end() && !found->is_null();
  }

  std::size_t size(const std::string& key) const {
    require(key);
    const Json& value = config_.at(key);
    if (!value.is_number_integer() || value.get<std::int64_t>() < 1)
      refuse(key, "a whole number of at least 1");
    return value.get<std::size_t>();
  }
  std::size_t size(const std::string& key, std::size_t otherwise) const {
    return has(key) ? size(key) : otherwise;
  }

  double number(const std::string& key) const {
    require(key);
    const Json& value = config_.at(key);
    if (!value.is_number() || !std::isfinite(value.get<double>())) refuse(key, "a number");
    return value.get<double>();
  }
  double number(const std::string& key, double otherwise) const { return has(key) ? number(key) : otherwise; }
  double positive(const std::string& key, double otherwise) const {
    const double value = number(key, otherwise);
    if (value <= 0) refuse(key, "a number above 0");
    return value;
  }
  float single(const std::string& key, double otherwise) const {
    const double value = number(key, otherwise);
    if (std::abs(value) > std::numeric_limits<float>::max()) refuse(key, "within the range of f32");
    return static_cast<float>(value);
  }
  float epsilon(const std::string& key, double otherwise) const {
    const float value = single(key, otherwise);
    if (value <= 0) refuse(key, "a number above 0, in f32 too");
    return value;
  }
  float dropout(const std::string& key, double otherwise) const {
    const float value = single(key, otherwise);
    if (value < 0 || value >= 1) refuse(key, "a number of at least 0 and less than 1");
    return value;
  }

  bool flag(const std::string& key, bool otherwise) const {
    if (!has(key)) return otherwise;
    if (!config_.at(key).is_boolean()) refuse(key, "true or false");
    return config_.at(key).get<bool>();
  }

  std::string text(const std::string& key, const std::string& otherwise) const {
    if (!has(key)) return otherwise;
    if (!config_.at(key).is_string()) refuse(key, "a text");
    return config_.at(key).get<std::string>();
  }

  // For what Sluice computes in one way only.
  void only(const std::string& key, bool value) const {
    if (flag(key, value) != value)
      refuse(key, value ? "true: Sluice has nothing else" : "false: Sluice has nothing else");
  }
  void only_full_attention() const {
    if (!has("layer_types")) return;
    for (const Json& type : config_.at("layer_types")) {
      if (type != "full_attention") refuse("layer_types", "full_attention everywhere");
    }
  }
  void absent(const std::string& key) const {
    if (has(key)) refuse(key, "absent: Sluice has nothing of the kind");
  }

  [[noreturn]] void refuse(const std::string& key, const std::string& expected) const {
    fail(ErrorCode::kInvalidArgument, "{}: '{}' is {}; it must be {}", source_, key,
         config_.contains(key) ? config_.at(key).dump().substr(0, 80) : "missing", expected);
  }

  Reader inner(const std::string& key) const { return {config_.at(key), source_ + ": " + key}; }

 private:
  void require(const std::string& key) const {
    if (has(key)) return;
    std::vector<std::string> keys;
    for (const auto& item : config_.items()) keys.push_back(item.key());
    const std::string nearest = nearest_word(key, keys);
    fail(ErrorCode::kInvalidArgument, "{}: '{}' is missing{}", source_, key,
         nearest.empty() ? "" : "; is '" + nearest + "' meant?");
  }

  const Json& config_;
  std::string source_;
};

ModelConfig gpt2_from(const Reader& reader) {
  ModelConfig config;
  config.vocabulary = reader.size("vocab_size");
  config.context = reader.size("n_positions");
  config.layers = reader.size("n_layer");
  config.width = reader.size("n_embd");
  config.heads = config.kv_heads = reader.size("n_head");
  if (config.width % config.heads != 0) reader.refuse("n_head", "a divisor of n_embd");
  config.head_width = config.width / config.heads;
  config.hidden_width = reader.size("n_inner", 4 * config.width);
  config.norm_epsilon = reader.epsilon("layer_norm_epsilon", 1e-5);
  config.tied_head = reader.flag("tie_word_embeddings", true);
  config.embedding_dropout = reader.dropout("embd_pdrop", 0.1);
  config.attention_dropout = reader.dropout("attn_pdrop", 0.1);
  config.residual_dropout = reader.dropout("resid_pdrop", 0.1);
  const std::string activation = reader.text("activation_function", "gelu_new");
  if (activation != "gelu_new" && activation != "gelu_pytorch_tanh")
    reader.refuse("activation_function", "gelu_new");
  reader.only("scale_attn_weights", true);
  reader.only("scale_attn_by_inverse_layer_idx", false);
  reader.only("add_cross_attention", false);
  return config;
}

// rope_scaling and rope_theta at the top, or (since transformers 5) both in rope_parameters.
void read_rope(const Reader& reader, ModelConfig& config) {
  config.rope_theta = reader.positive("rope_theta", 10000);
  const std::string key = reader.has("rope_parameters") ? "rope_parameters" : "rope_scaling";
  if (!reader.has(key)) return;
  const Reader rope = reader.inner(key);
  config.rope_theta = rope.positive("rope_theta", config.rope_theta);
  if (rope.number("partial_rotary_factor", 1) != 1)
    rope.refuse("partial_rotary_factor", "1: Sluice turns whole heads");
  const std::string type = rope.text("rope_type", rope.text("type", "default"));
  if (type == "default") return;
  if (type != "llama3") rope.refuse(rope.has("rope_type") ? "rope_type" : "type", "default or llama3");
  RopeScaling scaling;
  scaling.factor = rope.number("factor");
  scaling.low_frequency_factor = rope.number("low_freq_factor");
  scaling.high_frequency_factor = rope.number("high_freq_factor");
  scaling.original_context = rope.size("original_max_position_embeddings");
  if (scaling.factor < 1) rope.refuse("factor", "at least 1");
  if (scaling.low_frequency_factor <= 0) rope.refuse("low_freq_factor", "above 0");
  if (scaling.high_frequency_factor <= scaling.low_frequency_factor)
    rope.refuse("high_freq_factor", "above low_freq_factor");
  config.rope_scaling = scaling;
}

ModelConfig llama_from(const Reader& reader) {
  ModelConfig config;
  config.family = Family::kLlama;
  config.vocabulary = reader.size("vocab_size");
  config.context = reader.size("max_position_embeddings");
  config.layers = reader.size("num_hidden_layers");
  config.width = reader.size("hidden_size");
  config.heads = reader.size("num_attention_heads");
  config.kv_heads = reader.size("num_key_value_heads", config.heads);
  if (config.heads % config.kv_heads != 0)
    reader.refuse("num_key_value_heads", "a divisor of num_attention_heads");
  if (!reader.has("head_dim") && config.width % config.heads != 0) {
    reader.refuse("num_attention_heads", "a divisor of hidden_size, as there is no head_dim");
  }
  config.head_width = reader.size("head_dim", config.width / config.heads);
  if (config.head_width % 2 != 0) reader.refuse("head_dim", "even, for rotary positions");
  config.hidden_width = reader.size("intermediate_size");
  config.norm_epsilon = reader.epsilon("rms_norm_eps", 1e-6);
  config.tied_head = reader.flag("tie_word_embeddings", false);
  config.attention_dropout = reader.dropout("attention_dropout", 0);
  if (reader.text("hidden_act", "silu") != "silu") reader.refuse("hidden_act", "silu");
  read_rope(reader, config);
  return config;
}

ModelConfig qwen2_from(const Reader& reader) {
  ModelConfig config = llama_from(reader);
  config.qkv_bias = true;
  reader.only("use_sliding_window", false);
  reader.only_full_attention();
  return config;
}

Json rope_to_json(const RopeScaling& scaling) {
  return {{"rope_type", "llama3"},
          {"factor", scaling.factor},
          {"low_freq_factor", scaling.low_frequency_factor},
          {"high_freq_factor", scaling.high_frequency_factor},
          {"original_max_position_embeddings", scaling.original_context}};
}

// The shortest decimals that are the same float again, so that 1e-5 is written as people write it.
double shortest(float value) { return std::stod(fmt::format("{}", value)); }

Json gpt2_to(const ModelConfig& config) {
  return {{"model_type", "gpt2"},
          {"architectures", {"GPT2LMHeadModel"}},
          {"vocab_size", config.vocabulary},
          {"n_positions", config.context},
          {"n_ctx", config.context},
          {"n_layer", config.layers},
          {"n_embd", config.width},
          {"n_head", config.heads},
          {"n_inner", config.hidden_width},
          {"activation_function", "gelu_new"},
          {"layer_norm_epsilon", shortest(config.norm_epsilon)},
          {"embd_pdrop", shortest(config.embedding_dropout)},
          {"attn_pdrop", shortest(config.attention_dropout)},
          {"resid_pdrop", shortest(config.residual_dropout)}};
}

Json llama_to(const ModelConfig& config) {
  Json json = {{"model_type", config.qkv_bias ? "qwen2" : "llama"},
               {"architectures", {config.qkv_bias ? "Qwen2ForCausalLM" : "LlamaForCausalLM"}},
               {"vocab_size", config.vocabulary},
               {"max_position_embeddings", config.context},
               {"num_hidden_layers", config.layers},
               {"hidden_size", config.width},
               {"num_attention_heads", config.heads},
               {"num_key_value_heads", config.kv_heads},
               {"head_dim", config.head_width},
               {"intermediate_size", config.hidden_width},
               {"hidden_act", "silu"},
               {"rms_norm_eps", shortest(config.norm_epsilon)},
               {"rope_theta", config.rope_theta},
               {"attention_dropout", shortest(config.attention_dropout)}};
  if (config.rope_scaling) json["rope_scaling"] = rope_to_json(*config.rope_scaling);
  if (config.qkv_bias) {
    json["use_sliding_window"] = false;
  } else {
    json["attention_bias"] = false;
    json["mlp_bias"] = false;
  }
  return json;
}

}  // namespace

ModelConfig config_from_hugging_face(const Json& json, const std::string& source) {
  const Reader reader(json, source);
  reader.absent("quantization_config");
  if (!reader.has("model_type")) reader.refuse("model_type", "gpt2, llama or qwen2");
  const std::string type = reader.text("model_type", "");
  ModelConfig config;
  if (type == "gpt2") {
    config = gpt2_from(reader);
  } else if (type == "llama") {
    reader.only("attention_bias", false);
    reader.only("mlp_bias", false);
    config = llama_from(reader);
  } else if (type == "qwen2") {
    config = qwen2_from(reader);
  } else {
    const std::string nearest = nearest_word(type, {"gpt2", "llama", "qwen2"});
    reader.refuse("model_type",
                  "gpt2, llama or qwen2" + (nearest.empty() ? "" : " (the nearest is " + nearest + ")"));
  }
  config.initializer_range = reader.single("initializer_range", 0.02);
  if (config.initializer_range < 0) reader.refuse("initializer_range", "at least 0");
  config.hugging_face = json;
  check_config(config);
  return config;
}

Json config_to_hugging_face(const ModelConfig& config, Dtype dtype) {
  Json json = config.hugging_face;
  if (json.is_null()) {
    json = config.family == Family::kGpt2 ? gpt2_to(config) : llama_to(config);
    json["tie_word_embeddings"] = config.tied_head;
    json["initializer_range"] = shortest(config.initializer_range);
    // Text models made here have no token that begins or ends a text.
    json["bos_token_id"] = nullptr;
    json["eos_token_id"] = nullptr;
  }
  // Transformers 5 writes "dtype" and reads both.
  json.erase("dtype");
  json["torch_dtype"] = dtype == Dtype::kF32 ? "float32" : dtype == Dtype::kBf16 ? "bfloat16" : "float16";
  return json;
}

}  // namespace sluice::models
