#include "models/families/gpt2.h"

namespace sluice::models {
namespace {

constexpr const char* kTable = "transformer.wte.weight";

Graph embedding(const Shape& shape) {
  Builder builder(shape);
  ValueId x = builder.embedding(kTable, "transformer.wpe.weight");
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
  const ValueId qkv = builder.linear("qkv", n1, config.width, {{"attn.c_attn", 3 * config.width, true}}, {});
  const ValueId mixed = builder.attention(qkv);
  const ValueId projected =
      builder.linear("proj", mixed, config.width, {{"attn.c_proj", config.width, true}}, {});
  const ValueId middle = builder.residual("add1", x, projected, config.residual_dropout);
  const ValueId n2 = builder.norm("ln2", middle, "ln_2", true);
  const ValueId up = builder.linear("up", n2, config.width, {{"mlp.c_fc", config.hidden_width, true}}, {});
  const ValueId down =
      builder.linear("down", builder.gelu(up), config.hidden_width, {{"mlp.c_proj", config.width, true}}, {});
  return builder.finish(builder.residual("add2", middle, down, config.residual_dropout));
}

Graph head(const Shape& shape) {
  Builder builder(shape);
  const ValueId x = builder.input();
  builder.loss(builder.norm("norm", x, "transformer.ln_f", true), kTable, "lm_head.weight");
  return builder.finish(std::nullopt);
}

}  // namespace

Architecture make_gpt2(const Shape& shape) {
  return {embedding(shape), block(shape), head(shape), "transformer.h.{}."};
}

}  // namespace sluice::models
