#include "models/families/builder.h"

#include "models/families/family.h"
#include "models/ops/activation.h"
#include "models/ops/attention.h"
#include "models/ops/embedding.h"
#include "models/ops/loss.h"
#include "models/ops/norm.h"
#include "models/ops/residual.h"

namespace sluice::models {

Architecture uniform(Graph embedding, Graph block, Graph head, std::string block_prefix, std::size_t layers) {
  Architecture architecture{std::move(embedding), std::move(head), {}, {}, std::move(block_prefix)};
  architecture.blocks.push_back(std::move(block));
  architecture.block_of.assign(layers, 0);
  return architecture;
}

ValueId Builder::value(std::string name, std::size_t row_elements) {
  return graph_.add_value({std::move(name), shape_.rows() * row_elements, shape_.dtype});
}

std::size_t Builder::parameter(std::string name, std::vector<std::size_t> shape) {
  // Weight decay is for matrices, not for biases and norms.
  const std::uint32_t group = shape.size() >= 2 ? kDecayed : kNotDecayed;
  return graph_.add_parameter({std::move(name), std::move(shape), group}, false);
}

std::size_t Builder::table(std::string name, std::vector<std::size_t> shape, int uses, Table kind) {
  engine::ParameterSpec spec{std::move(name), std::move(shape), kTables, uses};
  spec.by_elements = true;
  spec.by_tokens = kind == Table::kOfTokens;
  return graph_.add_parameter(std::move(spec), kind == Table::kForeign);
}

ValueId Builder::input() {
  const ValueId x = value("input", shape_.config.width);
  graph_.set_input(x);
  return x;
}

ValueId Builder::linear(const std::string& op, ValueId x, std::size_t in, const std::vector<Weight>& weights,
                        const LinearOptions& options) {
  LinearShape shape{shape_.rows(), in, options.transposed, shape_.dtype, {}, options.rotary};
  std::size_t width = 0;
  for (const Weight& weight : weights) {
    LinearPart part;
    part.weight = options.transposed ? parameter(weight.name + ".weight", {weight.width, in})
                                     : parameter(weight.name + ".weight", {in, weight.width});
    if (weight.bias) part.bias = parameter(weight.name + ".bias", {weight.width});
    part.width = weight.width;
    part.offset = options.apart ? width * shape_.rows() : width;
    part.stride = weight.width;
    width += weight.width;
    shape.parts.push_back(part);
  }
  if (!options.apart) {
    for (LinearPart& part : shape.parts) part.stride = width;
  }
  const ValueId y = value(op, width);
  graph_.add_op(make_linear(op, x, y, shape));
  return y;
}

ValueId Builder::norm(const std::string& op, ValueId x, const std::string& name, bool has_beta) {
  NormShape shape{shape_.rows(), shape_.config.width, shape_.config.norm_epsilon, shape_.dtype, 0,
                  std::nullopt};
  shape.gamma = parameter(name + ".weight", {shape.width});
  if (has_beta) shape.beta = parameter(name + ".bias", {shape.width});
  const ValueId y = value(op, shape.width);
  const ValueId statistics = graph_.add_value(norm_statistics(op + " statistics", shape));
  graph_.add_op(make_norm(op, x, y, statistics, shape));
  return y;
}

ValueId Builder::attention(ValueId packed) {
  const ModelConfig& config = shape_.config;
  const AttentionSizes sizes{shape_.batch,    shape_.length,     config.heads,
                             config.kv_heads, config.head_width, config.attention_dropout,
                             shape_.dtype};
  const ValueId y = value("attention", config.heads * config.head_width);
  const ValueId log_sums = graph_.add_value(attention_log_sums("attention log-sums", sizes));
  graph_.add_op(make_attention("attention", packed, y, log_sums, sizes));
  return y;
}

ValueId Builder::gelu(ValueId x) {
  const std::size_t width = shape_.config.hidden_width;
  const ValueId y = value("gelu", width);
  graph_.add_op(make_gelu("gelu", x, y, shape_.rows() * width, shape_.dtype));
  return y;
}

ValueId Builder::swiglu(ValueId gates_and_ups) {
  const std::size_t width = shape_.config.hidden_width;
  const ValueId y = value("swiglu", width);
  graph_.add_op(make_swiglu("swiglu", gates_and_ups, y, shape_.rows() * width, shape_.dtype));
  return y;
}

ValueId Builder::residual(const std::string& op, std::optional<ValueId> residual, ValueId branch,
                          float dropout) {
  const std::size_t width = shape_.config.width;
  const ValueId y = value(op, width);
  const ResidualShape shape{shape_.rows() * width, shape_.length * width, dropout, shape_.dtype};
  graph_.add_op(make_residual(op, residual, branch, y, shape));
  return y;
}

ValueId Builder::embedding(const std::optional<std::string>& positions) {
  const ModelConfig& config = shape_.config;
  // A tied table's gradient is written by the head first (use 0). Positions have their gradient when the
  // embedding writes the table's, so they have the same use; their use 0 stays zero.
  const int use = config.tied_head ? 1 : 0;
  EmbeddingShape shape{shape_.batch,   shape_.length, config.width, config.vocabulary,
                       config.context, shape_.dtype,  {},           std::nullopt};
  shape.table = {
      table(std::string(config.family->table), {config.vocabulary, config.width}, use + 1, Table::kOfTokens),
      use};
  if (positions)
    shape.positions = ParameterUse{table(*positions, {config.context, config.width}, use + 1), use};
  const ValueId y = value("embedding", config.width);
  graph_.add_op(make_embedding("embedding", y, shape));
  return y;
}

void Builder::loss(ValueId x) {
  const ModelConfig& config = shape_.config;
  LossShape shape{shape_.rows(), config.width, config.vocabulary, shape_.dtype, {}};
  const std::vector<std::size_t> matrix = {config.vocabulary, config.width};
  shape.weight.slot = config.tied_head ? table(std::string(config.family->table), matrix, 2, Table::kForeign)
                                       : table(std::string(config.family->head), matrix);
  graph_.add_op(make_loss("loss", x, shape));
}

Graph Builder::finish(std::optional<ValueId> output) {
  if (output) graph_.set_output(*output);
  return std::move(graph_);
}

}  // namespace sluice::models
