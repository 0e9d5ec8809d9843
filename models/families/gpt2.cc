#include "models/families/gpt2.h"

#include <array>
#include <cmath>

#include "core/error.h"

namespace sluice::models {
namespace gpt2 {
namespace {

ModelConfig sized(std::size_t layers, std::size_t width, std::size_t heads, std::size_t vocabulary = 50257,
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

std::vector<Preset> presets() {
  return {{"tiny", sized(4, 128, 4, 256, 256)}, {"mini", sized(6, 384, 6, 256, 256)},
          {"gpt2-124m", sized(12, 768, 12)},    {"gpt2-355m", sized(24, 1024, 16)},
          {"gpt2-774m", sized(36, 1280, 20)},   {"gpt2-1.5b", sized(48, 1600, 25)}};
}

ModelConfig read(const ConfigReader& reader) {
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

Json write(const ModelConfig& config) {
  return {{"vocab_size", config.vocabulary},
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

void check(const ModelConfig& config) {
  if (config.heads * config.head_width != config.width || config.kv_heads != config.heads) {
    fail(ErrorCode::kInvalidArgument,
         "a GPT-2 of width {} cannot have {} heads of width {} with {} key/value heads", config.width,
         config.heads, config.head_width, config.kv_heads);
  }
}

Graph embedding(const Shape& shape) {
  Builder builder(shape);
  ValueId x = builder.embedding("transformer.wpe.weight");
  if (shape.config.embedding_dropout > 0) {
    x = builder.residual("dropout", std::nullopt, x, shape.config.embedding_dropout);
  }
  return builder.finish(x);
}

Graph block(const Shape& shape) {
  const ModelConfig& config = shape.config;
  Builder builder(shape);
  const ValueId x = builder.input();
  const ValueId n1 = builder.norm("ln1", x, "ln_1", true);
  const Builder::Weights weights{.transposed = false, .bias = true};
  const ValueId mixed = builder.attention(builder.to_heads("qkv", n1, {"attn.c_attn"}, weights));
  const ValueId projected = builder.from_heads("proj", mixed, "attn.c_proj", weights);
  const ValueId middle = builder.residual("add1", x, projected, config.residual_dropout);
  const ValueId n2 = builder.norm("ln2", middle, "ln_2", true);
  const ValueId up = builder.to_hidden("up", n2, {"mlp.c_fc"}, weights);
  const ValueId down = builder.from_hidden("down", builder.gelu(up), "mlp.c_proj", weights);
  return builder.finish(builder.residual("add2", middle, down, config.residual_dropout));
}

Graph head(const Shape& shape) {
  Builder builder(shape);
  const ValueId x = builder.input();
  builder.loss(builder.norm("norm", x, "transformer.ln_f", true));
  return builder.finish(std::nullopt);
}

Architecture build(const Shape& shape) {
  return uniform(embedding(shape), block(shape), head(shape), "transformer.h.{}.", shape.config.layers);
}

// Projections into the residual stream start with smaller values, the more of them there are.
FirstValues first_values(const ModelConfig& config, const engine::ParameterSpec& parameter) {
  FirstValues values = usual_first_values(config, parameter);
  if (parameter.name.ends_with(".c_proj.weight"))
    values.deviation =
        static_cast<float>(config.initializer_range / std::sqrt(2.0 * static_cast<double>(config.layers)));
  return values;
}

constexpr std::array<std::string_view, 2> kBuffers = {".attn.bias", ".attn.masked_bias"};

}  // namespace
}  // namespace gpt2

constinit const Family kGpt2 = {.model_type = "gpt2",
                                .architecture = "GPT2LMHeadModel",
                                .presets = gpt2::presets,
                                .read = gpt2::read,
                                .write = gpt2::write,
                                .check = gpt2::check,
                                .build = gpt2::build,
                                .first_values = gpt2::first_values,
                                .prefix = "transformer.",
                                .table = "transformer.wte.weight",
                                .head = "lm_head.weight",
                                .buffers = gpt2::kBuffers};

}  // namespace sluice::models
