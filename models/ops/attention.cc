#include "models/ops/attention.h"

#include <cmath>
#include <cstring>

#include "core/error.h"
#include "kernels/attention.h"
#include "models/graph/context.h"

namespace sluice::models {
namespace {

OpSpec attention_spec(std::string name, ValueId packed, ValueId y, ValueId log_sums,
                      const AttentionSizes& sizes) {
  // Each head has two products over half of length x length, and five backward.
  const double product = static_cast<double>(sizes.batch * sizes.heads * sizes.length) *
                         static_cast<double>(sizes.length * sizes.head_width);
  return {.name = std::move(name),
          .inputs = {packed},
          .outputs = {y, log_sums},
          .saved = {packed, y, log_sums},
          .forward_flops = 2 * product,
          .backward_flops = 5 * product};
}

class Attention : public Op {
 public:
  Attention(std::string name, ValueId packed, ValueId y, ValueId log_sums, const AttentionSizes& sizes)
      : Op(attention_spec(std::move(name), packed, y, log_sums, sizes)), sizes_(sizes) {}

  std::size_t forward_workspace(kernels::ProductSurvey& products) const override {
    return kernels::attention_forward_workspace(shape(), products.threads());
  }
  std::size_t backward_workspace(kernels::ProductSurvey& products) const override {
    return kernels::attention_backward_workspace(shape(), products.threads());
  }

  void forward(const OpContext& context) const override {
    const Array packed = context.input(0);
    if (context.run().cache.keys != nullptr) store(context.run(), packed);
    if (context.run().cache.keys != nullptr && sizes_.length == 1) return decode(context);
    kernels::attention_forward(context.threads(), shape(context), packed, packed.at(keys()),
                               packed.at(values()), context.output(0), context.statistics(1),
                               context.scratch());
  }

  void backward(const OpContext& context) const override {
    const Array packed = context.input(0), gradient = context.input_gradient(0);
    kernels::attention_backward(context.threads(), shape(context), packed, packed.at(keys()),
                                packed.at(values()), context.output(0), context.statistics(1),
                                context.output_gradient(0), gradient, gradient.at(keys()),
                                gradient.at(values()), context.scratch());
  }

 private:
  std::size_t keys() const { return sizes_.heads * sizes_.head_width; }
  std::size_t values() const { return (sizes_.heads + sizes_.kv_heads) * sizes_.head_width; }

  std::size_t cached_width() const { return sizes_.kv_heads * sizes_.head_width; }

  void store(const Execution& run, Array packed) const {
    const UnitCache& cache = run.cache;
    ensure(
        sizes_.batch == 1 && run.first_position + cache.rows <= cache.capacity && cache.rows <= sizes_.length,
        "{} rows from {} on are to be kept of one text where {} are possible", cache.rows, run.first_position,
        cache.capacity);
    const std::size_t bytes = cached_width() * size_of(sizes_.type);
    for (std::size_t row = 0; row < cache.rows; ++row) {
      const std::size_t at = row * sizes_.packed_width(), to = (run.first_position + row) * bytes;
      std::memcpy(cache.keys + to, packed.at(at + keys()).data, bytes);
      std::memcpy(cache.values + to, packed.at(at + values()).data, bytes);
    }
  }

  void decode(const OpContext& context) const {
    const UnitCache& cache = context.run().cache;
    kernels::AttentionShape one = shape(context);
    one.length = context.run().first_position + 1;
    one.k_stride = one.v_stride = cached_width();
    kernels::attention_decode(context.threads(), one, cache.capacity, context.input(0),
                              {cache.keys, sizes_.type}, {cache.values, sizes_.type}, context.output(0));
  }

  kernels::AttentionShape shape() const {
    kernels::AttentionShape shape;
    shape.batch = sizes_.batch;
    shape.length = sizes_.length;
    shape.heads = sizes_.heads;
    shape.kv_heads = sizes_.kv_heads;
    shape.head_width = sizes_.head_width;
    shape.q_stride = shape.k_stride = shape.v_stride = sizes_.packed_width();
    shape.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(sizes_.head_width)));
    shape.dropout = sizes_.dropout;
    return shape;
  }

  kernels::AttentionShape shape(const OpContext& context) const {
    const Execution& run = context.run();
    kernels::AttentionShape shape = this->shape();
    if (!run.training) shape.dropout = 0;
    const RandomWords words = context.random_words();
    shape.seed = words.seed;
    shape.stream = words.stream;
    shape.first_index = run.first_sample * sizes_.heads * sizes_.length * sizes_.length;
    return shape;
  }

  AttentionSizes sizes_;
};

}  // namespace

Value attention_log_sums(std::string name, const AttentionSizes& sizes) {
  return {std::move(name), sizes.batch * sizes.heads * sizes.length, Dtype::kF32, false};
}

std::unique_ptr<Op> make_attention(std::string name, ValueId packed, ValueId y, ValueId log_sums,
                                   const AttentionSizes& sizes) {
  return std::make_unique<Attention>(std::move(name), packed, y, log_sums, sizes);
}

}  // namespace sluice::models
