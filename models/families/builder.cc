#include "models/families/builder.h"

#include "models/families/family.h"
#include "models/ops/activation.h"
#include "models/ops/attention.h"
#include "models/ops/embedding.h"
#include "models/ops/loss.h"
#include "models/ops/norm.h"
#include "models/ops/residual.h"
#include "models/ops/row_pieces.h"

namespace sluice::models {

Architecture uniform(Graph embedding, Graph block, Graph head, std::string block_prefix, std::size_t layers) {
  Architecture architecture{std::move(embedding), std::move(head), {}, {}, std::move(block_prefix)};
  architecture.blocks.push_back(std::move(block));
  architecture.block_of.assign(layers, 0);
  return architecture;
}

void Builder::add(const std::function<std::unique_ptr<Op>(const Shape&)>& make) {
  std::vector<std::unique_ptr<Op>> pieces;
  for (std::size_t i = 0; i < shape_.sequence.own_pieces(); ++i) {
    Shape piece = shape_;
    piece.sequence = shape_.sequence.of_piece(shape_.sequence.first_piece() + i);
    pieces.push_back(make(piece));
  }
  graph_.add_op(in_row_pieces(std::move(pieces)));
}

ValueId Builder::value(std::string name, std::size_t row_elements) {
  return graph_.add_value({std::move(name), shape_.rows() * row_elements, shape_.dtype});
}

std::size_t Builder::parameter(std::string name, std::vector<std::size_t> shape) {
  // Weight decay applies to matrices, not to biases and norms.
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

std::vector<HeadPiece> Builder::own_heads() const {
  return head_pieces(shape_.cut, shape_.config.heads, shape_.config.kv_heads);
}

LinearWeight Builder::weight(const std::string& name, std::size_t in, std::size_t out, Weights weights) {
  LinearWeight weight;
  weight.weight =
      parameter(name + ".weight", weights.transposed ? std::vector{out, in} : std::vector{in, out});
  if (weights.bias) weight.bias = parameter(name + ".bias", {out});
  weight.width = out;
  return weight;
}

ValueId Builder::to_heads(const std::string& op, ValueId x, const std::vector<std::string>& names,
                          Weights weights, const std::vector<double>& frequencies) {
  const ModelConfig& config = shape_.config;
  const std::size_t head = config.head_width, queries = config.heads * head, keys = config.kv_heads * head;
  LinearShape shape{piece_rows_, config.width, weights.transposed, shape_.dtype, shape_.cut};
  const bool packed = names.size() == 1;
  for (std::size_t i = 0; i < names.size(); ++i)
    shape.weights.push_back(
        weight(names[i], config.width, packed ? queries + 2 * keys : (i == 0 ? queries : keys), weights));
  std::size_t begin = 0;  // offset of the piece in the output
  for (const HeadPiece& piece : own_heads()) {
    const std::size_t number = shape.parts.empty() ? 0 : shape.parts.back().piece + 1;
    const std::size_t stride = piece.packed() * head;
    std::size_t offset = begin;
    const auto add = [&](std::size_t of, Range columns) {
      shape.parts.push_back({of, columns, offset, stride, number});
      offset += columns.size;
    };
    const Range query{piece.heads.first * head, piece.heads.size * head},
        key{piece.kv_heads.first * head, piece.kv_heads.size * head};
    if (packed && !shape_.cut.is_cut()) {
      add(0, {0, stride});
    } else if (packed) {
      add(0, query);
      add(0, {queries + key.first, key.size});
      add(0, {queries + keys + key.first, key.size});
    } else {
      add(0, query);
      add(1, key);
      add(2, key);
    }
    if (!frequencies.empty())
      shape.turned.push_back({{piece.heads.size + piece.kv_heads.size, head, stride, frequencies}, begin});
    begin += piece_rows_ * stride;
  }
  const ValueId y = value(op, begin / piece_rows_);
  add([&](const Shape& piece) {
    shape.row_parts = piece.row_parts();
    return make_linear(op, x, y, shape);
  });
  return y;
}

ValueId Builder::to_hidden(const std::string& op, ValueId x, const std::vector<std::string>& names,
                           Weights weights) {
  const ModelConfig& config = shape_.config;
  LinearShape shape{piece_rows_, config.width, weights.transposed, shape_.dtype, shape_.cut};
  for (const std::string& name : names)
    shape.weights.push_back(weight(name, config.width, config.hidden_width, weights));
  const std::vector<Range> parts = shape_.cut.parts(config.hidden_width);
  std::size_t columns = 0;  // columns of earlier pieces
  for (std::size_t piece = 0; piece < parts.size(); ++piece) {
    for (std::size_t i = 0; i < names.size(); ++i)
      shape.parts.push_back(
          {i, parts[piece], piece_rows_ * (i * own_hidden() + columns), parts[piece].size, piece});
    columns += parts[piece].size;
  }
  const ValueId y = value(op, names.size() * columns);
  add([&](const Shape&) { return make_linear(op, x, y, shape); });
  return y;
}

ValueId Builder::from_heads(const std::string& op, ValueId x, const std::string& name, Weights weights) {
  const std::size_t head = shape_.config.head_width;
  std::vector<Range> inputs;
  for (const HeadPiece& piece : own_heads())
    inputs.push_back({piece.heads.first * head, piece.heads.size * head});
  return to_width(op, x, name, weights, shape_.config.heads * head, inputs);
}

ValueId Builder::from_hidden(const std::string& op, ValueId x, const std::string& name, Weights weights) {
  return to_width(op, x, name, weights, shape_.config.hidden_width,
                  shape_.cut.parts(shape_.config.hidden_width));
}

ValueId Builder::to_width(const std::string& op, ValueId x, const std::string& name, Weights weights,
                          std::size_t in, const std::vector<Range>& inputs) {
  const std::size_t width = shape_.config.width;
  const LinearWeight own = weight(name, in, width, weights);
  const ValueId y = value(op, width);
  if (shape_.cut.is_cut()) {
    const RowLinearShape shape{piece_rows_, in,         width,   weights.transposed, shape_.dtype, shape_.cut,
                               inputs,      own.weight, own.bias};
    add([&](const Shape&) { return make_row_linear(op, x, y, shape); });
  } else {
    LinearShape shape{piece_rows_, in, weights.transposed, shape_.dtype};
    shape.weights = {own};
    shape.parts = {{0, {0, width}, 0, width, 0}};
    add([&](const Shape&) { return make_linear(op, x, y, shape); });
  }
  return y;
}

ValueId Builder::norm(const std::string& op, ValueId x, const std::string& name, bool has_beta) {
  NormShape shape{shape_.rows(), shape_.config.width, shape_.config.norm_epsilon, shape_.dtype, 0,
                  std::nullopt,  shape_.cut};
  shape.gamma = parameter(name + ".weight", {shape.width});
  if (has_beta) shape.beta = parameter(name + ".bias", {shape.width});
  const ValueId y = value(op, shape.width);
  const ValueId statistics = graph_.add_value(norm_statistics(op + " statistics", shape));
  shape.rows = piece_rows_;
  add([&](const Shape&) { return make_norm(op, x, y, statistics, shape); });
  return y;
}

ValueId Builder::attention(ValueId packed) {
  const ModelConfig& config = shape_.config;
  const AttentionSizes sizes{
      shape_.batch, shape_.length, config.head_width, config.heads, config.attention_dropout,
      shape_.dtype, own_heads(),   shape_.sequence};
  const ValueId y = value("attention", sizes.heads() * config.head_width);
  const ValueId log_sums = graph_.add_value(attention_log_sums("attention log-sums", sizes));
  graph_.add_op(make_attention("attention", packed, y, log_sums, sizes));
  return y;
}

ValueId Builder::gelu(ValueId x) {
  const std::size_t width = own_hidden();
  const ValueId y = value("gelu", width);
  add([&](const Shape&) { return make_gelu("gelu", x, y, piece_rows_ * width, shape_.dtype); });
  return y;
}

ValueId Builder::swiglu(ValueId gates_and_ups) {
  const std::size_t width = own_hidden();
  const ValueId y = value("swiglu", width);
  add([&](const Shape&) {
    return make_swiglu("swiglu", gates_and_ups, y, piece_rows_ * width, shape_.dtype);
  });
  return y;
}

ValueId Builder::residual(const std::string& op, std::optional<ValueId> residual, ValueId branch,
                          float dropout) {
  const std::size_t width = shape_.config.width;
  const ValueId y = value(op, width);
  add([&](const Shape& piece) {
    return make_residual(op, residual, branch, y,
                         {width, shape_.length, piece.row_parts(), dropout, shape_.dtype});
  });
  return y;
}

ValueId Builder::embedding(const std::optional<std::string>& positions) {
  const ModelConfig& config = shape_.config;
  // A tied table's gradient is first written by the head (use 0). The positions' gradient is complete when
  // the embedding writes the table's, so it has the same use number; its use 0 stays zero.
  const int use = config.tied_head ? 1 : 0;
  EmbeddingShape shape{config.width, {}, config.vocabulary, config.context, shape_.dtype, {}, {}, shape_.cut};
  shape.table = {
      table(std::string(config.family->table), {config.vocabulary, config.width}, use + 1, Table::kOfTokens),
      use};
  if (positions)
    shape.positions = ParameterUse{table(*positions, {config.context, config.width}, use + 1), use};
  const ValueId y = value("embedding", config.width);
  add([&](const Shape& piece) {
    shape.rows = piece.row_parts();
    return make_embedding("embedding", y, shape);
  });
  return y;
}

void Builder::loss(ValueId x) {
  const ModelConfig& config = shape_.config;
  LossShape shape{piece_rows_, config.width, config.vocabulary, shape_.dtype, {}, shape_.cut};
  const std::vector<std::size_t> matrix = {config.vocabulary, config.width};
  shape.weight.slot = config.tied_head ? table(std::string(config.family->table), matrix, 2, Table::kForeign)
                                       : table(std::string(config.family->head), matrix);
  add([&](const Shape&) { return make_loss("loss", x, shape); });
}

Graph Builder::finish(std::optional<ValueId> output) {
  if (output) graph_.set_output(*output);
  return std::move(graph_);
}

}  // namespace sluice::models
