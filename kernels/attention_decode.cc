#include <limits>
#include <vector>

#include "core/error.h"
#include "kernels/attention.h"
#include "kernels/attention_common.h"

// foreach_target.h must come first.
#include <hwy/highway.h>

#include "kernels/attention_products-inl.h"

#ifndef SLUICE_ATTENTION_DECODE_CALL_
#define SLUICE_ATTENTION_DECODE_CALL_
namespace sluice::kernels {
namespace {

struct DecodeCall {
  const AttentionShape& shape;
  std::size_t capacity;
  ConstArray q, k, v;
  Array out;
};

// The packed queries, sums and running softmax of the query heads of one key/value head.
struct DecodeState {
  std::vector<float> queries, sums, tile, products, scores, maxima, totals;
};

}  // namespace
}  // namespace sluice::kernels
#endif

HWY_BEFORE_NAMESPACE();
namespace sluice::kernels::HWY_NAMESPACE {

// Computes scores[j] of one packed query and a tile of packed keys. Each is 16 sums over every 16th element,
// added in order. `products` has room for [keys][16] and, after it, its transpose.
HWY_INLINE void score_keys(const float* HWY_RESTRICT query, const float* HWY_RESTRICT keys, std::size_t count,
                           std::size_t width, float* HWY_RESTRICT products, float* HWY_RESTRICT scores) {
  const std::size_t stride = packed_stride(width);
  const F32 d;
  for (std::size_t j = 0; j < count; ++j)
    for_row([&](std::size_t lane) HWY_ATTR {
      auto sum = hn::Zero(d);
      for (std::size_t c = 0; c < width; c += kPanel)
        sum = mul_add(hn::LoadU(d, query + c + lane), hn::LoadU(d, keys + j * stride + c + lane), sum);
      hn::StoreU(sum, d, products + j * kPanel + lane);
    });
  float* const columns = products + kTile * kPanel;
  transpose(products, kTile, kPanel, kPanel, columns, kTile);
  for (std::size_t j = 0; j < kTile; j += kLanes) {
    auto sum = hn::LoadU(d, columns + j);
    for (std::size_t i = 1; i < kPanel; ++i) sum = hn::Add(sum, hn::LoadU(d, columns + i * kTile + j));
    hn::StoreU(sum, d, scores + j);
  }
}

// Turns scores into probabilities. Returns the factor for the previous sums.
HWY_INLINE float soften(std::size_t count, float* scores, float* maximum, float* total) {
  const F32 d;
  const float before = *maximum;
  for (std::size_t j = 0; j < count; ++j) *maximum = scores[j] > *maximum ? scores[j] : *maximum;
  std::fill(scores + count, scores + kTile, -std::numeric_limits<float>::infinity());
  for (std::size_t j = 0; j < kTile; j += kLanes)
    hn::StoreU(exp_to_normal(hn::Sub(hn::LoadU(d, scores + j), set(*maximum))), d, scores + j);
  float sum = 0;
  for (std::size_t j = 0; j < count; ++j) sum += scores[j];
  const float factor = hn::GetLane(exp_to_normal(set(before - *maximum)));
  *total = *total * factor + sum;
  return factor;
}

// Adds a tile of `count` keys from key `first` on, for all query heads of the group.
HWY_INLINE void decode_tile(const DecodeCall& call, std::size_t b, std::size_t kv_head, std::size_t first,
                            DecodeState& state) {
  const AttentionShape& s = call.shape;
  const std::size_t width = s.head_width, stride = packed_stride(width), group = s.heads / s.kv_heads;
  const std::size_t row = b * call.capacity + first, count = std::min(kTile, s.length - first);
  pack_tile(call.k.at(row * s.k_stride + kv_head * width), s.k_stride, count, width, 1.0f, state.tile.data());
  for (std::size_t g = 0; g < group; ++g)
    score_keys(state.queries.data() + g * stride, state.tile.data(), count, width, state.products.data(),
               state.scores.data() + g * kTile);
  pack_tile(call.v.at(row * s.v_stride + kv_head * width), s.v_stride, count, width, 1.0f, state.tile.data());
  for (std::size_t g = 0; g < group; ++g) {
    float* const scores = state.scores.data() + g * kTile;
    float* const sums = state.sums.data() + g * stride;
    const float factor = soften(count, scores, &state.maxima[g], &state.totals[g]);
    for (std::size_t c = 0; c < width; c += kLanes)
      hn::StoreU(hn::Mul(hn::LoadU(F32(), sums + c), set(factor)), F32(), sums + c);
    for (std::size_t c = 0; c < width; c += kPanel)
      multiply_panel<Stored::kByRows>(1, count, {scores, kTile}, {state.tile.data() + c, stride}, sums + c,
                                      stride, true);
  }
}

// Computes one key/value head of one sequence, with the query heads that use it.
void decode_task(const DecodeCall& call, std::size_t b, std::size_t kv_head) {
  const AttentionShape& s = call.shape;
  const std::size_t width = s.head_width, stride = packed_stride(width), group = s.heads / s.kv_heads;
  DecodeState state;
  state.queries.resize(group * stride);
  state.sums.resize(group * stride);
  state.tile.resize(kTile * stride);
  state.products.resize(2 * kTile * kPanel);
  state.scores.resize(group * kTile);
  state.maxima.assign(group, -std::numeric_limits<float>::infinity());
  state.totals.resize(group);
  pack_tile(call.q.at(b * s.q_stride + kv_head * group * width), width, group, width, s.scale,
            state.queries.data());
  for (std::size_t first = 0; first < s.length; first += kTile) decode_tile(call, b, kv_head, first, state);
  for (std::size_t g = 0; g < group; ++g)
    unpack_tile(state.sums.data() + g * stride, 1, width, 1.0f / state.totals[g],
                call.out.at((b * s.heads + kv_head * group + g) * width), width);
}

}  // namespace sluice::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sluice::kernels {

HWY_EXPORT(decode_task);

void attention_decode(Threads& threads, const AttentionShape& shape, std::size_t length_capacity,
                      ConstArray q, ConstArray k, ConstArray v, Array out) {
  check_attention(shape, {q, k, v, out});
  if (shape.length == 0 || shape.length > length_capacity || shape.dropout > 0)
    fail(ErrorCode::kInvalidArgument,
         "attention of one query needs 1 to {} cached keys and no dropout; it was asked for {} keys and a "
         "dropout of {}",
         length_capacity, shape.length, shape.dropout);
  const DecodeCall call{shape, length_capacity, q, k, v, out};
  const auto task = HWY_DYNAMIC_DISPATCH(decode_task);
  threads.parallel_for(shape.batch * shape.kv_heads, 1, [&](std::size_t i, std::size_t) {
    task(call, i / shape.kv_heads, i % shape.kv_heads);
  });
}

}  // namespace sluice::kernels
#endif
