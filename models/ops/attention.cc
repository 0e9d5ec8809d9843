#include "models/ops/attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/error.h"
#include "kernels/attention.h"
#include "models/graph/context.h"

namespace sluice::models {

OpSpec attention_spec(std::string name, ValueId packed, ValueId y, ValueId log_sums,
                      const AttentionSizes& sizes) {
  // Each head has two products over half of length x length, and five in backward.
  const double product = static_cast<double>(sizes.batch * sizes.heads() * sizes.length) *
                         static_cast<double>(sizes.length * sizes.head_width) /
                         static_cast<double>(sizes.sequence.ranks);
  return {.name = std::move(name),
          .inputs = {packed},
          .outputs = {y, log_sums},
          .saved = {packed, y, log_sums},
          .forward_flops = 2 * product,
          .backward_flops = 5 * product};
}

std::vector<AttentionPiece> placed_pieces(const AttentionSizes& sizes) {
  std::vector<AttentionPiece> pieces;
  const std::size_t rows = sizes.batch * sizes.length / sizes.sequence.pieces;
  AttentionPiece next{{}, sizes.head_width};
  for (const HeadPiece& piece : sizes.pieces) {
    next.of = piece;
    pieces.push_back(next);
    next.packed += rows * next.packed_width();
    next.output += rows * piece.heads.size * sizes.head_width;
    next.log_sums += rows * piece.heads.size;
  }
  return pieces;
}

kernels::AttentionShape attention_shape(const AttentionSizes& sizes, const AttentionPiece& piece) {
  kernels::AttentionShape shape;
  shape.batch = sizes.batch;
  shape.length = sizes.length;
  shape.heads = piece.of.heads.size;
  shape.kv_heads = piece.of.kv_heads.size;
  shape.head_width = sizes.head_width;
  shape.q_stride = shape.k_stride = shape.v_stride = piece.packed_width();
  shape.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(sizes.head_width)));
  shape.dropout = sizes.dropout;
  return shape;
}

kernels::AttentionShape attention_shape(const OpContext& context, const AttentionSizes& sizes,
                                        const AttentionPiece& piece) {
  const Execution& run = context.run();
  kernels::AttentionShape shape = attention_shape(sizes, piece);
  if (!run.training) shape.dropout = 0;
  const RandomWords words = context.random_words();
  shape.seed = words.seed;
  shape.stream = words.stream;
  shape.all_heads = sizes.all_heads;
  shape.first_index =
      (run.first_sample * sizes.all_heads + piece.of.heads.first) * sizes.length * sizes.length;
  return shape;
}

namespace {

class Attention : public Op {
 public:
  Attention(std::string name, ValueId packed, ValueId y, ValueId log_sums, const AttentionSizes& sizes)
      : Op(attention_spec(std::move(name), packed, y, log_sums, sizes)),
        sizes_(sizes),
        pieces_(placed_pieces(sizes)) {}

  std::size_t forward_workspace(kernels::ProductSurvey& products) const override {
    std::size_t bytes = 0;
    for (const AttentionPiece& piece : pieces_)
      bytes = std::max(
          bytes, kernels::attention_forward_workspace(attention_shape(sizes_, piece), products.threads()));
    return bytes;
  }
  std::size_t backward_workspace(kernels::ProductSurvey& products) const override {
    std::size_t bytes = 0;
    for (const AttentionPiece& piece : pieces_)
      bytes = std::max(
          bytes, kernels::attention_backward_workspace(attention_shape(sizes_, piece), products.threads()));
    return bytes;
  }

  void forward(const OpContext& context) const override {
    if (context.run().cache.keys != nullptr) store(context.run(), context.input(0));
    if (context.run().cache.keys != nullptr && sizes_.length == 1) return decode(context);
    for (const AttentionPiece& piece : pieces_) {
      const Array packed = context.input(0).at(piece.packed);
      kernels::attention_forward(context.threads(), attention_shape(context, sizes_, piece), packed,
                                 packed.at(piece.keys()), packed.at(piece.values()),
                                 context.output(0).at(piece.output), context.statistics(1) + piece.log_sums,
                                 context.scratch());
    }
  }

  void backward(const OpContext& context) const override {
    for (const AttentionPiece& piece : pieces_) {
      const Array packed = context.input(0).at(piece.packed),
                  gradient = context.input_gradient(0).at(piece.packed);
      kernels::attention_backward(context.threads(), attention_shape(context, sizes_, piece), packed,
                                  packed.at(piece.keys()), packed.at(piece.values()),
                                  context.output(0).at(piece.output), context.statistics(1) + piece.log_sums,
                                  context.output_gradient(0).at(piece.output), gradient,
                                  gradient.at(piece.keys()), gradient.at(piece.values()), context.scratch());
    }
  }

 private:
  // Models with a text cache are not cut.
  std::size_t cached_width() const { return pieces_[0].of.kv_heads.size * sizes_.head_width; }

  void store(const Execution& run, Array packed) const {
    const UnitCache& cache = run.cache;
    ensure(pieces_.size() == 1 && sizes_.batch == 1 && run.first_position + cache.rows <= cache.capacity &&
               cache.rows <= sizes_.length,
           "{} rows from {} on are to be kept of one text where {} are possible", cache.rows,
           run.first_position, cache.capacity);
    const std::size_t bytes = cached_width() * size_of(sizes_.type);
    for (std::size_t row = 0; row < cache.rows; ++row) {
      const std::size_t at = row * pieces_[0].packed_width(), to = (run.first_position + row) * bytes;
      std::memcpy(cache.keys + to, packed.at(at + pieces_[0].keys()).data, bytes);
      std::memcpy(cache.values + to, packed.at(at + pieces_[0].values()).data, bytes);
    }
  }

  void decode(const OpContext& context) const {
    const UnitCache& cache = context.run().cache;
    kernels::AttentionShape one = attention_shape(context, sizes_, pieces_[0]);
    one.length = context.run().first_position + 1;
    one.k_stride = one.v_stride = cached_width();
    kernels::attention_decode(context.threads(), one, cache.capacity, context.input(0),
                              {cache.keys, sizes_.type}, {cache.values, sizes_.type}, context.output(0));
  }

  AttentionSizes sizes_;
  std::vector<AttentionPiece> pieces_;
};

}  // namespace

std::size_t AttentionSizes::heads() const {
  std::size_t sum = 0;
  for (const HeadPiece& piece : pieces) sum += piece.heads.size;
  return sum;
}

Value attention_log_sums(std::string name, const AttentionSizes& sizes) {
  return {std::move(name), sizes.batch * sizes.heads() * sizes.length / sizes.sequence.ranks, Dtype::kF32,
          false};
}

std::unique_ptr<Op> make_attention(std::string name, ValueId packed, ValueId y, ValueId log_sums,
                                   const AttentionSizes& sizes) {
  if (sizes.sequence.is_cut()) return make_sequence_attention(std::move(name), packed, y, log_sums, sizes);
  return std::make_unique<Attention>(std::move(name), packed, y, log_sums, sizes);
}

}  // namespace sluice::models
