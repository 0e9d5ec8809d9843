#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "models/families/config.h"
#include "models/graph/cut.h"
#include "models/graph/graph.h"
#include "models/ops/linear.h"

namespace sluice::models {

// The parameter groups of every model. Weight decay applies to matrices and tables, not to biases and norms.
inline constexpr std::uint32_t kDecayed = 0, kNotDecayed = 1, kTables = 2;

// The inputs from which a family makes its graphs: a model and a micro-batch.
struct Shape {
  ModelConfig config;
  Dtype dtype = Dtype::kF32;
  std::size_t batch = 0, length = 0;
  TensorCut cut = {};         // how ranks share each layer
  SequenceCut sequence = {};  // how ranks share each sequence
  std::vector<RowPart> row_parts() const { return models::row_parts(sequence, batch, length); }
  std::size_t rows() const { return batch * length / sequence.ranks; }  // rows (tokens) on this rank
};

// A model's graphs. Equal blocks share one graph, in which names lack the block's prefix.
struct Architecture {
  Graph embedding, head;
  std::vector<Graph> blocks;          // the distinct graphs
  std::vector<std::size_t> block_of;  // by block: the index of its graph
  std::string block_prefix;           // {} stands for the block's number
};
// Makes the architecture of a model whose blocks are all equal.
Architecture uniform(Graph embedding, Graph block, Graph head, std::string block_prefix, std::size_t layers);

// Makes a graph from a transformer's parts: values have one row for each token, and each use of a parameter
// declares it.
class Builder {
 public:
  explicit Builder(const Shape& shape)
      : shape_(shape), piece_rows_(shape.rows() / shape.sequence.own_pieces()) {}

  ValueId input();
  // How a family stores its weights: [out, in], or [in, out] as in GPT-2, and whether they have biases.
  struct Weights {
    bool transposed = false, bias = false;
  };
  // Projects to queries, keys and values, side by side in each row, by one weight for all three or one for
  // each (names without ".weight"). frequencies: of rotary positions; empty: none.
  ValueId to_heads(const std::string& op, ValueId x, const std::vector<std::string>& names, Weights weights,
                   const std::vector<double>& frequencies = {});
  // Projects to the hidden columns of the feed-forward part, one array after the other for several weights.
  ValueId to_hidden(const std::string& op, ValueId x, const std::vector<std::string>& names, Weights weights);
  // Projects attention's output, or the hidden columns, to the width of the residual stream.
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
  // Adds an op that computes row by row. make: returns that of one of this rank's pieces of sequences, by the
  // shape of a rank that has only this one.
  void add(const std::function<std::unique_ptr<Op>(const Shape&)>& make);
  ValueId value(std::string name, std::size_t row_elements);
  std::size_t parameter(std::string name, std::vector<std::size_t> shape);
  // Declares a weight and its bias.
  LinearWeight weight(const std::string& name, std::size_t in, std::size_t out, Weights weights);
  ValueId to_width(const std::string& op, ValueId x, const std::string& name, Weights weights, std::size_t in,
                   const std::vector<Range>& inputs);
  std::size_t own_hidden() const { return total(shape_.cut.parts(shape_.config.hidden_width)); }
  std::vector<HeadPiece> own_heads() const;
  enum class Table { kPlain, kOfTokens, kForeign };  // kOfTokens: its last use is the lookup of tokens
  // Declares a parameter with a row for each token or position.
  std::size_t table(std::string name, std::vector<std::size_t> shape, int uses = 1,
                    Table kind = Table::kPlain);

  const Shape& shape_;
  const std::size_t piece_rows_;  // rows of a piece of the sequences
  Graph graph_;
};

}  // namespace sluice::models
