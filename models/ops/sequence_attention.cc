#include <algorithm>

#include "kernels/elementwise.h"
#include "models/ops/attention.h"

namespace sluice::models {
namespace {

OpSpec sequence_attention_spec(std::string name, ValueId packed, ValueId y, ValueId log_sums,
                               const AttentionSizes& sizes) {
  OpSpec spec = attention_spec(std::move(name), packed, y, log_sums, sizes);
  for (const HeadPiece& piece : sizes.pieces) {
    const std::size_t values = sizes.batch * sizes.length * 2 * piece.kv_heads.size * sizes.head_width;
    const LayerCall gather{values, true, true, sizes.type};
    spec.forward_calls.push_back(gather);
    spec.backward_calls.push_back(gather);
    spec.backward_calls.push_back({values, false, true});
  }
  return spec;
}

class SequenceAttention : public Op {
 public:
  SequenceAttention(std::string name, ValueId packed, ValueId y, ValueId log_sums,
                    const AttentionSizes& sizes)
      : Op(sequence_attention_spec(std::move(name), packed, y, log_sums, sizes)),
        sizes_(sizes),
        pieces_(placed_pieces(sizes)) {
    for (std::size_t rank = 0; rank < sizes.sequence.ranks; ++rank)
      rows_.push_back(row_parts({sizes.sequence.ranks, rank}, sizes.batch, sizes.length));
  }

  std::size_t forward_workspace(kernels::ProductSurvey& products) const override {
    return workspace([&](const kernels::AttentionShape& shape, const Memory& memory) {
      return memory.sums + kernels::attention_forward_workspace(shape, products.threads());
    });
  }
  std::size_t backward_workspace(kernels::ProductSurvey& products) const override {
    return workspace([&](const kernels::AttentionShape& shape, const Memory& memory) {
      return memory.end + kernels::attention_backward_workspace(shape, products.threads());
    });
  }

  void forward(const OpContext& context) const override {
    for (const AttentionPiece& piece : pieces_) {
      const Memory memory(sizes_, piece);
      const Array whole = gather(context, piece, memory);
      for_each_part(piece, [&](const RowPart& part, const Places& at) {
        kernels::attention_forward(context.threads(), shape(context, piece, part),
                                   context.input(0).at(at.packed), whole.at(at.keys), whole.at(at.values),
                                   context.output(0).at(at.output), context.statistics(1) + at.log_sums,
                                   scratch(context, memory.sums));
      });
    }
  }

  void backward(const OpContext& context) const override {
    for (const AttentionPiece& piece : pieces_) {
      const Memory memory(sizes_, piece);
      const Array whole = gather(context, piece, memory);
      const Array sums{scratch(context, memory.sums)}, one{scratch(context, memory.one)};
      const std::size_t each = sizes_.length * width(piece);  // per sequence
      for_each_part(piece, [&](const RowPart& part, const Places& at) {
        const bool is_first = part.whole_row % sizes_.length < sizes_.length / 2;
        const Array to = is_first ? sums.at(at.keys) : one;
        kernels::attention_backward(
            context.threads(), shape(context, piece, part), context.input(0).at(at.packed), whole.at(at.keys),
            whole.at(at.values), context.output(0).at(at.output), context.statistics(1) + at.log_sums,
            context.output_gradient(0).at(at.output), context.input_gradient(0).at(at.packed), to,
            to.at(width(piece) / 2), scratch(context, memory.end));
        if (!is_first) kernels::add(context.threads(), each, sums.at(at.keys), one, sums.at(at.keys));
      });
      context.run().layers.sequence->all_reduce("gradients of keys and values",
                                                {sums.f32(), sizes_.batch * each});
      for (const RowPart& part : rows_[sizes_.sequence.rank])
        kernels::convert_rows(
            context.threads(), part.rows, width(piece), sums.at(part.whole_row * width(piece)), width(piece),
            context.input_gradient(0).at(piece.packed + part.row * piece.packed_width() + piece.keys()),
            piece.packed_width());
    }
  }

 private:
  // Keys and values of a row are adjacent.
  static std::size_t width(const AttentionPiece& piece) {
    return 2 * piece.of.kv_heads.size * piece.head_width;
  }

  // The layout of the workspace: keys and values of all sequences, by rank and then by row; the sums of their
  // gradients; and the gradients from one part of the queries.
  struct Memory {
    std::size_t by_ranks = 0, by_rows, sums, one, end;
    Memory(const AttentionSizes& sizes, const AttentionPiece& piece) {
      const std::size_t values = sizes.batch * sizes.length * width(piece);
      by_rows = round_up(values * size_of(sizes.type), kAlignment);
      sums = 2 * by_rows;
      one = sums + round_up(values * sizeof(float), kAlignment);
      end = one + round_up(sizes.length * width(piece) * sizeof(float), kAlignment);
    }
  };

  template <class Bytes>
  std::size_t workspace(const Bytes& bytes_of) const {
    std::size_t bytes = 0;
    for (const AttentionPiece& piece : pieces_)
      bytes = std::max(bytes, bytes_of(shape(piece, rows_[0][0]), Memory(sizes_, piece)));
    return bytes;
  }

  static void* scratch(const OpContext& context, std::size_t offset) {
    return static_cast<std::byte*>(context.scratch()) + offset;
  }

  // The offsets of a part of the queries in the piece's arrays, and of its sequence in the gathered ones.
  struct Places {
    std::size_t packed, output, log_sums, keys, values;
  };
  template <class Body>
  void for_each_part(const AttentionPiece& piece, const Body& body) const {
    for (const RowPart& part : rows_[sizes_.sequence.rank]) {
      const std::size_t heads = piece.of.heads.size, sequence = part.whole_row / sizes_.length;
      const std::size_t keys = sequence * sizes_.length * width(piece);
      body(part, Places{piece.packed + part.row * piece.packed_width(),
                        piece.output + part.row * heads * piece.head_width, piece.log_sums + part.row * heads,
                        keys, keys + width(piece) / 2});
    }
  }

  // Gathers the keys and values of all sequences.
  Array gather(const OpContext& context, const AttentionPiece& piece, const Memory& memory) const {
    const std::size_t each = width(piece), rows = row_count(rows_[0]);
    const Array by_ranks{scratch(context, memory.by_ranks), sizes_.type},
        by_rows{scratch(context, memory.by_rows), sizes_.type};
    kernels::convert_rows(context.threads(), rows, each, context.input(0).at(piece.packed + piece.keys()),
                          piece.packed_width(), by_ranks.at(sizes_.sequence.rank * rows * each), each);
    context.run().layers.sequence->all_gather("keys and values", by_ranks, rows_.size() * rows * each);
    for (std::size_t rank = 0; rank < rows_.size(); ++rank)
      for (const RowPart& part : rows_[rank])
        kernels::convert(context.threads(), part.rows * each, by_ranks.at((rank * rows + part.row) * each),
                         by_rows.at(part.whole_row * each));
    return by_rows;
  }

  void restrict_to(const AttentionPiece& piece, const RowPart& part, kernels::AttentionShape& shape) const {
    shape.batch = 1;
    shape.k_stride = shape.v_stride = width(piece);
    shape.first_query = part.position;
    shape.queries = part.rows;
  }
  kernels::AttentionShape shape(const OpContext& context, const AttentionPiece& piece,
                                const RowPart& part) const {
    kernels::AttentionShape shape = attention_shape(context, sizes_, piece);
    shape.first_index += part.whole_row / sizes_.length * sizes_.all_heads * sizes_.length * sizes_.length;
    restrict_to(piece, part, shape);
    return shape;
  }
  kernels::AttentionShape shape(const AttentionPiece& piece, const RowPart& part) const {
    kernels::AttentionShape shape = attention_shape(sizes_, piece);
    restrict_to(piece, part, shape);
    return shape;
  }

  AttentionSizes sizes_;
  std::vector<AttentionPiece> pieces_;
  std::vector<std::vector<RowPart>> rows_;  // by rank
};

}  // namespace

std::unique_ptr<Op> make_sequence_attention(std::string name, ValueId packed, ValueId y, ValueId log_sums,
                                            const AttentionSizes& sizes) {
  return std::make_unique<SequenceAttention>(std::move(name), packed, y, log_sums, sizes);
}

}  // namespace sluice::models
