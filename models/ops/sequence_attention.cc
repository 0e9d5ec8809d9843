#include <algorithm>

#include "kernels/elementwise.h"
#include "models/ops/attention.h"
#include "models/ops/piece_sums.h"

namespace sluice::models {
namespace {

OpSpec sequence_attention_spec(std::string name, ValueId packed, ValueId y, ValueId log_sums,
                               const AttentionSizes& sizes) {
  OpSpec spec = attention_spec(std::move(name), packed, y, log_sums, sizes);
  if (sizes.sequence.ranks == 1) return spec;
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
    for (std::size_t piece = 0; piece < sizes.sequence.pieces; ++piece)
      rows_.push_back(row_parts(sizes.sequence.of_piece(piece), sizes.batch, sizes.length));
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
      const auto compute = [&](const RowPart& part, const Places& at) {
        kernels::attention_forward(context.threads(), shape(context, piece, part),
                                   context.input(0).at(at.packed), whole.at(at.keys), whole.at(at.values),
                                   context.output(0).at(at.output), context.statistics(1) + at.log_sums,
                                   scratch(context, memory.sums));
      };
      for (std::size_t own = 0; own < sizes_.sequence.own_pieces(); ++own) for_each_part(piece, own, compute);
    }
  }

  void backward(const OpContext& context) const override {
    for (const AttentionPiece& piece : pieces_) {
      const Memory memory(sizes_, piece);
      const Array whole = gather(context, piece, memory);
      const Array sums = sums_of(sizes_, piece)
                             .add(context, scratch(context, memory.sums), "gradients of keys and values",
                                  [&](std::size_t own, Array into) {
                                    add_keys_and_values(context, piece, own, whole, into);
                                  });
      for (std::size_t own = 0; own < sizes_.sequence.own_pieces(); ++own)
        for_each_part(piece, own, [&](const RowPart& part, const Places& at) {
          kernels::convert_rows(context.threads(), part.rows, width(piece),
                                sums.at(part.whole_row * width(piece)), width(piece),
                                context.input_gradient(0).at(at.packed + piece.keys()), piece.packed_width());
        });
    }
  }

 private:
  // Computes the gradients of queries, and those of all keys and values, from a piece of the queries.
  void add_keys_and_values(const OpContext& context, const AttentionPiece& piece, std::size_t own,
                           const Array& whole, Array sums) const {
    const Memory memory(sizes_, piece);
    const Array one{scratch(context, memory.one)};
    const std::size_t each = sizes_.length * width(piece);  // per sequence
    for_each_part(piece, own, [&](const RowPart& part, const Places& at) {
      const bool is_first = part.whole_row % sizes_.length < sizes_.length / 2;
      const Array to = is_first ? sums.at(at.keys) : one;
      kernels::attention_backward(
          context.threads(), shape(context, piece, part), context.input(0).at(at.packed), whole.at(at.keys),
          whole.at(at.values), context.output(0).at(at.output), context.statistics(1) + at.log_sums,
          context.output_gradient(0).at(at.output), context.input_gradient(0).at(at.packed), to,
          to.at(width(piece) / 2), scratch(context, memory.end));
      if (!is_first) kernels::add(context.threads(), each, sums.at(at.keys), one, sums.at(at.keys));
    });
  }

  // Keys and values of a row are adjacent.
  static std::size_t width(const AttentionPiece& piece) {
    return 2 * piece.of.kv_heads.size * piece.head_width;
  }
  static PieceSums sums_of(const AttentionSizes& sizes, const AttentionPiece& piece) {
    return {sizes.sequence, sizes.batch * sizes.length * width(piece)};
  }

  // The layout of the workspace: keys and values of all sequences, by piece and then by row; the sums of
  // their gradients; and the gradients from one part of the queries.
  struct Memory {
    std::size_t by_pieces = 0, by_rows, sums, one, end;
    Memory(const AttentionSizes& sizes, const AttentionPiece& piece) {
      const std::size_t values = sizes.batch * sizes.length * width(piece);
      by_rows = round_up(values * size_of(sizes.type), kAlignment);
      sums = 2 * by_rows;
      one = sums + sums_of(sizes, piece).bytes();
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

  // The offsets of a part of the queries in the arrays, and of its sequence in the gathered ones.
  struct Places {
    std::size_t packed, output, log_sums, keys, values;
  };
  // Calls body for the parts of the rank's piece `own` of the sequences. Those of earlier pieces, of all
  // heads, are before them.
  template <class Body>
  void for_each_part(const AttentionPiece& piece, std::size_t own, const Body& body) const {
    const std::vector<RowPart>& parts = rows_[sizes_.sequence.first_piece() + own];
    const std::size_t before = own * row_count(parts), heads = piece.of.heads.size;
    const std::size_t log_sums = before * sizes_.heads(), output = log_sums * piece.head_width;
    for (const RowPart& part : parts) {
      const std::size_t keys = part.whole_row / sizes_.length * sizes_.length * width(piece);
      body(part, Places{before * packed_width() + piece.packed + part.row * piece.packed_width(),
                        output + piece.output + part.row * heads * piece.head_width,
                        log_sums + piece.log_sums + part.row * heads, keys, keys + width(piece) / 2});
    }
  }
  std::size_t packed_width() const {  // of all heads
    std::size_t width = 0;
    for (const AttentionPiece& piece : pieces_) width += piece.packed_width();
    return width;
  }

  // Gathers the keys and values of all sequences.
  Array gather(const OpContext& context, const AttentionPiece& piece, const Memory& memory) const {
    const std::size_t each = width(piece), rows = row_count(rows_[0]), first = sizes_.sequence.first_piece();
    const Array by_pieces{scratch(context, memory.by_pieces), sizes_.type},
        by_rows{scratch(context, memory.by_rows), sizes_.type};
    for (std::size_t own = 0; own < sizes_.sequence.own_pieces(); ++own)
      kernels::convert_rows(context.threads(), rows, each,
                            context.input(0).at(own * rows * packed_width() + piece.packed + piece.keys()),
                            piece.packed_width(), by_pieces.at((first + own) * rows * each), each);
    if (sizes_.sequence.ranks > 1)
      context.run().layers.sequence->all_gather("keys and values", by_pieces, rows_.size() * rows * each);
    for (std::size_t i = 0; i < rows_.size(); ++i)
      for (const RowPart& part : rows_[i])
        kernels::convert(context.threads(), part.rows * each, by_pieces.at((i * rows + part.row) * each),
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
  std::vector<std::vector<RowPart>> rows_;  // by piece of the sequences
};

}  // namespace

std::unique_ptr<Op> make_sequence_attention(std::string name, ValueId packed, ValueId y, ValueId log_sums,
                                            const AttentionSizes& sizes) {
  return std::make_unique<SequenceAttention>(std::move(name), packed, y, log_sums, sizes);
}

}  // namespace sluice::models
