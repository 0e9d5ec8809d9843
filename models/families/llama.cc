#include "models/families/llama.h"

#include "models/ops/rotary.h"

namespace sluice::models {
namespace {

constexpr const char* kTable = "model.embed_tokens.weight";

Rotary rotary(const Shape& shape) {
  const ModelConfig& config = shape.config;
  return {shape.length, config.heads + config.kv_heads, config.head_width,
          (config.heads + 2 * config.kv_heads) * config.head_width, rotary_frequencies(config)};
}

Graph embedding(const Shape& shape) {
  Builder builder(shape);
  return builder.finish(builder.embedding(kTable, std::nullopt));
}

Graph block(const Shape& shape) {
  const ModelConfig& config = shape.config;
  const std::size_t queries = config.heads * config.head_width, keys = config.kv_heads * config.head_width;
  const bool bias = config.qkv_bias;
  Builder builder(shape);
  const ValueId x = builder.input();
  const ValueId n1 = builder.norm("ln1", x, "input_layernorm", false);
  const ValueId qkv = builder.linear("qkv", n1, config.width,
                                     {{"self_attn.q_proj", queries, bias},
                                      {"self_attn.k_proj", keys, bias},
                                      {"self_attn.v_proj", keys, bias}},
                                     {true, false, rotary(shape)});
  const ValueId mixed = builder.attention(qkv);
  const Builder::LinearOptions transposed{true, false, std::nullopt};
  const ValueId projected =
      builder.linear("proj", mixed, queries, {{"self_attn.o_proj", config.width}}, transposed);
  const ValueId middle = builder.residual("add1", x, projected, 0);
  const ValueId n2 = builder.norm("ln2", middle, "post_attention_layernorm", false);
  const ValueId up = builder.linear(
      "up", n2, config.width, {{"mlp.gate_proj", config.hidden_width}, {"mlp.up_proj", config.hidden_width}},
      {true, true, std::nullopt});
  const ValueId down = builder.linear("down", builder.swiglu(up), config.hidden_width,
                                      {{"mlp.down_proj", config.width}}, transposed);
  return builder.finish(builder.residual("add2", middle, down, 0));
}

Graph head(const Shape& shape) {
  Builder builder(shape);
  const ValueId x = builder.input();
  builder.loss(builder.norm("norm", x, "model.norm", false), kTable, "lm_head.weight");
  return builder.finish(std::nullopt);
}

}  // namespace

Architecture make_llama(const Shape& shape) {
  return {embedding(shape), block(shape), head(shape), "model.layers.{}."};
}

}  // namespace sluice::models
