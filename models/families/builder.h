#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "models/families/config.h"
#include "models/graph/cut.h"
#include "models/graph/graph.h"
#include "models/ops/linear.h"

namespace sluice::models {

// The parameter groups of every model. Matrices and tables decay, biases and norms do not.
inline constexpr std::uint32_t kDecayed = 0, kNotDecayed = 1, kTables = 2;

// The model and the micro-batch that a family's graphs are made for.
struct Shape {
  ModelConfig config;
  Dtype dtype = Dtype::kF32;
  std::size_t batch = 0, length = 0;
  TensorCut cut = {};         // of each layer, over ranks
  SequenceCut sequence = {};  // of each sequence, over ranks
  std::vector<RowPart> row_parts() const { return models::row_parts(sequence, batch, length); }
  std::size_t rows() const { return batch * length / sequence.ranks; }  // that are on this rank
};

// A model's graphs. Blocks that compute alike share one, in which names lack the block's prefix.
struct Architecture {
  Graph embedding, head;
  std::vector<Graph> blocks;          // the different ones, each once
  std::vector<std::size_t> block_of;  // by the block's number: the index of its graph
  std::string block_prefix;           // with {} for the block's number
};
// Makes the architecture of a model whose blocks are all alike.
Architecture uniform(Graph embedding, Graph block, Graph head, std::string block_prefix, std::size_t layers);

// Makes a graph in the terms of transformers: values are rows of tokens, and uses declare parameters.
class Builder {
 public:
  explicit Builder(const Shape& shape) : shape_(shape) {}

  ValueId input();
  // How a family has its weights: [out, in], or [in, out] as in GPT-2, and whether they have biases.
  struct Weights {
    bool transposed = false, bias = false;
  };
  // Queries, keys and values of each row side by side, by one weight for all three or one for each (names
  // without
  // ".weight"). frequencies: of rotary positions; empty: there are none.
  ValueId to_heads(const std::string& op, ValueId x, const std::vector<std::string>& names, Weights weights,
                   const std::vector<double>& frequencies = {});
  // Hidden columns, one array after the other where there are several weights.
  ValueId to_hidden(const std::string& op, ValueId x, const std::vector<std::string>& names, Weights weights);
  // From what attention gives, and from hidden columns, to the width of the residual stream.
  ValueId from_heads(const std::string& op, ValueId x, const std::string& name, Weights weights);
  ValueId from_hidden(const std::string& op, ValueId x, const std::string& name, Weights weights);
  ValueId norm(const std::string& op, ValueId x, const std::string& parameter, bool has_beta);
  ValueId attention(ValueId packed);
  ValueId gelu(ValueId x);
  ValueId swiglu(ValueId gates_and_ups);
  ValueId residual(const std::string& op, std::optional<ValueId> residual, ValueId branch, float dropout);
  // Looks the tokens up in the family's table.
  ValueId embedding(const std::optional<std::string>& positions);
  // Computes the loss with the embedding's table where the head is tied, else with the head's own weight.
  void loss(ValueId x);

  Graph finish(std::optional<ValueId> output);

 private:
  ValueId value(std::string name, std::size_t row_elements);
  std::size_t parameter(std::string name, std::vector<std::size_t> shape);
  // Declares a weight and its bias.
  LinearWeight weight(const std::string& name, std::size_t in, std::size_t out, Weights weights);
  ValueId to_width(const std::string& op, ValueId x, const std::string& name, Weights weights, std::size_t in,
                   std::vector<Range> inputs);
  std::size_t own_hidden() const { return total(shape_.cut.parts(shape_.config.hidden_width)); }
  std::vector<HeadPiece> own_heads() const;
  enum class Table { kPlain, kOfTokens, kForeign };  // kOfTokens: its last use looks tokens up
  // Declares a parameter with a row for each token or position.
  std::size_t table(std::string name, std::vector<std::size_t> shape, int uses = 1,
                    Table kind = Table::kPlain);

  const Shape& shape_;
  Graph graph_;
};

}  // namespace sluice::models
