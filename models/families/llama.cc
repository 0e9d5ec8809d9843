#include "models/families/llama.h"

#include <array>
#include <cmath>
#include <numbers>

#include "core/error.h"

namespace sluice::models {
namespace llama {
namespace {

struct LlamaSizes {
  std::size_t layers, width, heads, kv_heads, head_width, hidden_width;
};

ModelConfig sized(const LlamaSizes& sizes, std::size_t vocabulary, std::size_t context) {
  ModelConfig config;
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

// The 3.1 and 3.2 releases: one vocabulary, one context, rotary frequencies scaled by different factors.
ModelConfig llama3(const LlamaSizes& sizes, double factor, bool tied) {
  ModelConfig config = sized(sizes, 128256, 131072);
  config.rope_theta = 500000;
  config.rope_scaling = RopeScaling{RopeScaling::Kind::kLlama3, factor, 1, 4, 8192};
  config.tied_head = tied;
  return config;
}

std::vector<Preset> llama_presets() {
  return {{"tiny-llama", sized({4, 128, 4, 2, 32, 352}, 256, 256)},
          {"llama-1b", llama3({16, 2048, 32, 8, 64, 8192}, 32, true)},
          {"llama-3b", llama3({28, 3072, 24, 8, 128, 8192}, 32, true)},
          {"llama-8b", llama3({32, 4096, 32, 8, 128, 14336}, 8, false)},
          {"llama-70b", llama3({80, 8192, 64, 8, 128, 28672}, 8, false)}};
}

std::vector<Preset> no_presets() { return {}; }

// Both keys are at the top of config.json, or (since transformers 5) in rope_parameters.
void read_rope(const ConfigReader& reader, ModelConfig& config) {
  config.rope_theta = reader.positive("rope_theta", 10000);
  const std::string key = reader.has("rope_parameters") ? "rope_parameters" : "rope_scaling";
  if (!reader.has(key)) return;
  const ConfigReader rope = reader.inner(key);
  config.rope_theta = rope.positive("rope_theta", config.rope_theta);
  if (rope.number("partial_rotary_factor", 1) != 1)
    rope.refuse("partial_rotary_factor", "1: Sluice turns whole heads");
  const std::string type = rope.text("rope_type", rope.text("type", "default"));
  if (type == "default") return;
  if (type != "llama3" && type != "linear")
    rope.refuse(rope.has("rope_type") ? "rope_type" : "type", "default, linear or llama3");
  RopeScaling scaling;
  scaling.factor = rope.number("factor");
  if (scaling.factor < 1) rope.refuse("factor", "at least 1");
  if (type == "linear") {
    scaling.kind = RopeScaling::Kind::kLinear;
    config.rope_scaling = scaling;
    return;
  }
  scaling.low_frequency_factor = rope.number("low_freq_factor");
  scaling.high_frequency_factor = rope.number("high_freq_factor");
  scaling.original_context = rope.size("original_max_position_embeddings");
  if (scaling.low_frequency_factor <= 0) rope.refuse("low_freq_factor", "above 0");
  if (scaling.high_frequency_factor <= scaling.low_frequency_factor)
    rope.refuse("high_freq_factor", "above low_freq_factor");
  config.rope_scaling = scaling;
}

ModelConfig read_sizes(const ConfigReader& reader) {
  ModelConfig config;
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

ModelConfig read_llama(const ConfigReader& reader) {
  reader.only("attention_bias", false);
  reader.only("mlp_bias", false);
  return read_sizes(reader);
}

ModelConfig read_qwen2(const ConfigReader& reader) {
  ModelConfig config = read_sizes(reader);
  config.qkv_bias = true;
  reader.only("use_sliding_window", false);
  reader.only_full_attention();
  return config;
}

// Where the key is absent, transformers has this window.
constexpr std::size_t kMistralWindow = 4096;

ModelConfig read_mistral(const ConfigReader& reader) {
  (void)reader.size("num_key_value_heads");  // where it is absent, transformers has not as many as heads
  ModelConfig config = read_sizes(reader);
  const bool everywhere = reader.is_null("sliding_window");
  if (!everywhere && reader.size("sliding_window", kMistralWindow) < config.context)
    reader.refuse(
        "sliding_window",
        fmt::format(
            "null, or at least max_position_embeddings ({}; lower that for shorter texts): each token "
            "attends to all earlier ones",
            config.context));
  return config;
}

Json rope_to_json(const RopeScaling& scaling) {
  if (scaling.kind == RopeScaling::Kind::kLinear)
    return {{"rope_type", "linear"}, {"factor", scaling.factor}};
  return {{"rope_type", "llama3"},
          {"factor", scaling.factor},
          {"low_freq_factor", scaling.low_frequency_factor},
          {"high_freq_factor", scaling.high_frequency_factor},
          {"original_max_position_embeddings", scaling.original_context}};
}

Json write_sizes(const ModelConfig& config) {
  Json json = {{"vocab_size", config.vocabulary},
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
  return json;
}

Json write_llama(const ModelConfig& config) {
  Json json = write_sizes(config);
  json["attention_bias"] = json["mlp_bias"] = false;
  return json;
}

Json write_qwen2(const ModelConfig& config) {
  Json json = write_sizes(config);
  json["use_sliding_window"] = false;
  return json;
}

Json write_mistral(const ModelConfig& config) {
  Json json = write_sizes(config);
  json["sliding_window"] = nullptr;
  return json;
}

void check(const ModelConfig& config) {
  if (config.head_width % 2 != 0)
    fail(ErrorCode::kInvalidArgument, "rotary positions need an even head width; it is {}",
         config.head_width);
  if (config.embedding_dropout > 0 || config.residual_dropout > 0)
    fail(ErrorCode::kInvalidArgument, "the Llama family has dropout in its attention alone");
}

// Llama 3's scaling divides low frequencies by the factor, leaves high ones, and interpolates those in
// between.
double stretched(double frequency, const RopeScaling& scaling) {
  if (scaling.kind == RopeScaling::Kind::kLinear) return frequency / scaling.factor;
  const double context = static_cast<double>(scaling.original_context);
  const double wavelength = 2 * std::numbers::pi / frequency;
  if (wavelength > context / scaling.low_frequency_factor) return frequency / scaling.factor;
  if (wavelength < context / scaling.high_frequency_factor) return frequency;
  const double smooth = (context / wavelength - scaling.low_frequency_factor) /
                        (scaling.high_frequency_factor - scaling.low_frequency_factor);
  return (1 - smooth) * frequency / scaling.factor + smooth * frequency;
}

// Returns transformers' rotary frequencies, with the scaling that the configuration has.
std::vector<double> rotary_frequencies(const ModelConfig& config) {
  std::vector<double> frequencies(config.head_width / 2);
  for (std::size_t i = 0; i < frequencies.size(); ++i) {
    const double exponent = 2 * static_cast<double>(i) / static_cast<double>(config.head_width);
    frequencies[i] = std::pow(config.rope_theta, -exponent);
    if (config.rope_scaling) frequencies[i] = stretched(frequencies[i], *config.rope_scaling);
  }
  return frequencies;
}

Graph embedding(const Shape& shape) {
  Builder builder(shape);
  return builder.finish(builder.embedding(std::nullopt));
}

Graph block(const Shape& shape) {
  const ModelConfig& config = shape.config;
  Builder builder(shape);
  const ValueId x = builder.input();
  const ValueId n1 = builder.norm("ln1", x, "input_layernorm", false);
  const Builder::Weights weights{.transposed = true};
  const ValueId qkv =
      builder.to_heads("qkv", n1, {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"},
                       {.transposed = true, .bias = config.qkv_bias}, rotary_frequencies(config));
  const ValueId projected = builder.from_heads("proj", builder.attention(qkv), "self_attn.o_proj", weights);
  const ValueId middle = builder.residual("add1", x, projected, 0);
  const ValueId n2 = builder.norm("ln2", middle, "post_attention_layernorm", false);
  const ValueId up = builder.to_hidden("up", n2, {"mlp.gate_proj", "mlp.up_proj"}, weights);
  const ValueId down = builder.from_hidden("down", builder.swiglu(up), "mlp.down_proj", weights);
  return builder.finish(builder.residual("add2", middle, down, 0));
}

Graph head(const Shape& shape) {
  Builder builder(shape);
  const ValueId x = builder.input();
  builder.loss(builder.norm("norm", x, "model.norm", false));
  return builder.finish(std::nullopt);
}

Architecture build(const Shape& shape) {
  return uniform(embedding(shape), block(shape), head(shape), "model.layers.{}.", shape.config.layers);
}

constexpr std::array<std::string_view, 1> kBuffers = {".rotary_emb.inv_freq"};

constexpr Family kBoth = {.model_type = "llama",
                          .architecture = "LlamaForCausalLM",
                          .presets = llama_presets,
                          .read = read_llama,
                          .write = write_llama,
                          .check = check,
                          .build = build,
                          .first_values = usual_first_values,
                          .prefix = "model.",
                          .table = "model.embed_tokens.weight",
                          .head = "lm_head.weight",
                          .buffers = kBuffers};

// A family with the same graph, and no presets.
constexpr Family variant(std::string_view model_type, std::string_view architecture,
                         decltype(Family::read) read, decltype(Family::write) write) {
  Family family = kBoth;
  family.model_type = model_type;
  family.architecture = architecture;
  family.presets = no_presets;
  family.read = read;
  family.write = write;
  return family;
}

}  // namespace
}  // namespace llama

constinit const Family kLlama = llama::kBoth;
constinit const Family kMistral =
    llama::variant("mistral", "MistralForCausalLM", llama::read_mistral, llama::write_mistral);
constinit const Family kQwen2 =
    llama::variant("qwen2", "Qwen2ForCausalLM", llama::read_qwen2, llama::write_qwen2);

}  // namespace sluice::models
