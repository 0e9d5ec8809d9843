#include <utility>

#include "core/error.h"
#include "kernels/attention.h"
#include "kernels/attention_common.h"

// foreach_target.h must come first.
#include <hwy/highway.h>

#include "kernels/attention_products-inl.h"

#ifndef SLUICE_ATTENTION_BACKWARD_MEMORY_
#define SLUICE_ATTENTION_BACKWARD_MEMORY_
namespace sluice::kernels {
namespace {

struct BackwardCall {
  const AttentionShape& shape;
  ConstArray q, k, v, out;
  const float* log_sum;
  ConstArray dout;
  Array dq, dk, dv;
};

// The buffers of one task. Panels are [width][16 queries]; tiles of scores are [keys][queries].
struct BackwardMemory {
  float *q, *q_panels, *dout, *dout_panels, *keys, *values, *dq_panels, *dk, *dv, *probabilities, *dscores,
      *log_sums, *deltas;
  float *factor_rows = nullptr, *factors = nullptr;
  std::size_t bytes;

  BackwardMemory(const AttentionShape& s, void* memory) {
    Carver carver(memory);
    const std::size_t stride = packed_stride(s.head_width);
    for (float** tile : {&q, &q_panels, &dout, &dout_panels, &keys, &values, &dq_panels})
      *tile = carver.take(kTile * stride);
    for (float** sums : {&dk, &dv}) *sums = carver.take(s.length * stride);
    for (float** scores : {&probabilities, &dscores}) *scores = carver.take(kTile * kScoreStride);
    for (float** row : {&log_sums, &deltas}) *row = carver.take(kTile);
    if (s.dropout > 0)
      for (float** tile : {&factor_rows, &factors}) *tile = carver.take(kTile * kTile);
    bytes = carver.bytes();
  }
};

}  // namespace
}  // namespace sluice::kernels
#endif

HWY_BEFORE_NAMESPACE();
namespace sluice::kernels::HWY_NAMESPACE {

// Returns the dot product of two packed rows: 16 sums over every 16th element, then halved four times.
HWY_INLINE float dot_of_rows(const float* HWY_RESTRICT a, const float* HWY_RESTRICT b, std::size_t width) {
  const F32 d;
  HWY_ALIGN float lanes[kPanel];
  for_row([&](std::size_t lane) HWY_ATTR {
    auto sum = hn::Zero(d);
    for (std::size_t c = 0; c < width; c += kPanel)
      sum = mul_add(hn::LoadU(d, a + c + lane), hn::LoadU(d, b + c + lane), sum);
    hn::StoreU(sum, d, lanes + lane);
  });
  for (std::size_t half = kPanel / 2; half > 0; half /= 2)
    for (std::size_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

// Handles one row of scores, that of key j. Replaces the scores by probabilities (after dropout), and the
// gradients of the probabilities by those of the scores. The causal mask hides the key from queries before
// `hidden`.
template <bool kDropout>
HWY_INLINE void differentiate_row(const float* HWY_RESTRICT log_sums, const float* HWY_RESTRICT deltas,
                                  const float* HWY_RESTRICT factors, std::size_t hidden,
                                  float* HWY_RESTRICT scores, float* HWY_RESTRICT dscores) {
  const F32 d;
  for_row([&](std::size_t lane) HWY_ATTR {
    auto probability = exp_to_normal(hn::Sub(hn::LoadU(d, scores + lane), hn::LoadU(d, log_sums + lane)));
    if (hidden > lane) {
      const auto queries = hn::Iota(d, static_cast<float>(lane));
      probability = hn::IfThenZeroElse(hn::Lt(queries, set(static_cast<float>(hidden))), probability);
    }
    auto dprobability = hn::LoadU(d, dscores + lane);
    auto dropped = probability;
    if constexpr (kDropout) {
      const auto factor = hn::LoadU(d, factors + lane);
      dropped = hn::Mul(probability, factor);
      dprobability = hn::Mul(dprobability, factor);
    }
    hn::StoreU(dropped, d, scores + lane);
    hn::StoreU(hn::Mul(probability, hn::Sub(dprobability, hn::LoadU(d, deltas + lane))), d, dscores + lane);
  });
}

// Computes probabilities and dscores of 16 queries and the tile's keys, and adds their contribution to dq.
HWY_INLINE void backward_panel(const AttentionShape& s, const Tile& tile, std::size_t p,
                               const BackwardMemory& m) {
  const std::size_t width = s.head_width, stride = packed_stride(width), column = p * kPanel;
  const std::size_t keys = tile.keys_of_panel(p);
  float* const scores = m.probabilities + column;
  float* const dscores = m.dscores + column;
  multiply_panel<Stored::kByRows>(keys, width, {m.keys, stride}, {m.q_panels + column * stride, kPanel},
                                  scores, kScoreStride, false);
  multiply_panel<Stored::kByRows>(keys, width, {m.values, stride}, {m.dout_panels + column * stride, kPanel},
                                  dscores, kScoreStride, false);
  for (std::size_t j = 0; j < keys; ++j) {
    const std::size_t hidden = tile.diagonal() && j > column ? j - column : 0;
    const auto differentiate = s.dropout > 0 ? differentiate_row<true> : differentiate_row<false>;
    differentiate(m.log_sums + column, m.deltas + column,
                  s.dropout > 0 ? m.factors + j * kTile + column : nullptr, hidden, scores + j * kScoreStride,
                  dscores + j * kScoreStride);
  }
  multiply_panel<Stored::kByDepth>(width, keys, {m.keys, stride}, {dscores, kScoreStride},
                                   m.dq_panels + column * stride, kPanel, tile.first_key > 0);
}

// sums[keys][width] += scores[keys][queries] * rows[queries][width].
HWY_INLINE void add_over_queries(const Tile& tile, const float* scores, const float* rows, std::size_t width,
                                 float* sums) {
  const std::size_t stride = packed_stride(width);
  const std::size_t key_step = tile.diagonal() ? kPanel : kTile;
  for (std::size_t key = 0; key < tile.keys; key += key_step) {
    const std::size_t first = tile.diagonal() ? key : 0;  // the first query that attends to one of these keys
    const std::size_t keys = std::min(key_step, tile.keys - key);
    for (std::size_t c = 0; c < width; c += kPanel)
      multiply_panel<Stored::kByRows>(
          keys, tile.queries - first, {scores + key * kScoreStride + first, kScoreStride},
          {rows + first * stride + c, stride}, sums + key * stride + c, stride, true);
  }
}

// Packs the rows of one tile of queries, and the data of these queries that all tiles of keys need.
HWY_INLINE void load_queries(const BackwardCall& call, std::size_t b, std::size_t h, const Tile& tile,
                             const BackwardMemory& m) {
  const AttentionShape& s = call.shape;
  const std::size_t width = s.head_width, stride = packed_stride(width), out_stride = s.heads * width;
  const std::size_t row = row_of(s, b, tile.first_query), out_at = row * out_stride + h * width;
  pack_queries(s, tile, call.q.at(row * s.q_stride + h * width), s.q_stride, s.scale, m.q, m.q_panels);
  pack_queries(s, tile, call.dout.at(out_at), out_stride, 1.0f, m.dout, m.dout_panels);
  pack_tile(call.out.at(out_at), out_stride, tile.queries, width, 1.0f, m.keys);
  std::fill_n(m.log_sums, kTile, 0.0f);
  std::copy_n(call.log_sum + (b * s.heads + h) * query_rows(s) + tile.first_query - s.first_query,
              tile.queries, m.log_sums);
  for (std::size_t i = 0; i < kTile; ++i)
    m.deltas[i] = i < tile.queries ? dot_of_rows(m.dout + i * stride, m.keys + i * stride, width) : 0.0f;
}

HWY_INLINE void backward_tile(const BackwardCall& call, std::size_t b, std::size_t h, const Tile& tile,
                              const BackwardMemory& m) {
  const AttentionShape& s = call.shape;
  const std::size_t width = s.head_width, sums_at = tile.first_key * packed_stride(width);
  pack_keys_and_values(s, tile, b, h / (s.heads / s.kv_heads), call.k, call.v, m.keys, m.values);
  if (s.dropout > 0) dropout_tile(s, tile, b, h, m.factor_rows, m.factors);
  for (std::size_t p = 0; p * kPanel < tile.queries; ++p) backward_panel(s, tile, p, m);
  add_over_queries(tile, m.probabilities, m.dout, width, m.dv + sums_at);
  add_over_queries(tile, m.dscores, m.q, width, m.dk + sums_at);
}

// Computes one key/value head of one sequence, with the query heads that use it: scores are computed once for
// dq, dk and dv. dk and dv are summed over heads, then tiles of queries, then queries; dq is summed over
// keys.
void backward_task(const BackwardCall& call, std::size_t b, std::size_t kv_head, void* memory) {
  const AttentionShape& s = call.shape;
  const BackwardMemory m(s, memory);
  const std::size_t width = s.head_width, stride = packed_stride(width), group = s.heads / s.kv_heads;
  for (float* sums : {m.dk, m.dv}) std::fill_n(sums, s.length * stride, 0.0f);
  if (s.dropout > 0) std::fill_n(m.factor_rows, kTile * kTile, 0.0f);
  for (std::size_t h = kv_head * group; h < (kv_head + 1) * group; ++h)
    for (std::size_t first = s.first_query; first < s.first_query + query_rows(s); first += kTile) {
      const std::size_t queries = std::min(kTile, s.length - first);
      load_queries(call, b, h, {s.length, first, 0}, m);
      for (std::size_t key = 0; key <= first; key += kTile)
        backward_tile(call, b, h, {s.length, first, key}, m);
      for (std::size_t p = 0; p * kPanel < queries; ++p)
        transpose(m.dq_panels + p * kPanel * stride, round_up(width, 4), kPanel, kPanel,
                  m.q + p * kPanel * stride, stride);
      unpack_tile(m.q, queries, width, s.scale, call.dq.at(row_of(s, b, first) * s.q_stride + h * width),
                  s.q_stride);
    }
  unpack_tile(m.dk, s.length, width, 1.0f, call.dk.at(b * s.length * s.k_stride + kv_head * width),
              s.k_stride);
  unpack_tile(m.dv, s.length, width, 1.0f, call.dv.at(b * s.length * s.v_stride + kv_head * width),
              s.v_stride);
}

}  // namespace sluice::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sluice::kernels {

HWY_EXPORT(backward_task);

std::size_t attention_backward_workspace(const AttentionShape& shape, int threads) {
  return BackwardMemory(shape, nullptr).bytes * static_cast<std::size_t>(threads);
}

void attention_backward(Threads& threads, const AttentionShape& shape, ConstArray q, ConstArray k,
                        ConstArray v, ConstArray out, const float* log_sum, ConstArray dout, Array dq,
                        Array dk, Array dv, void* workspace) {
  check_attention(shape, {q, k, v, out, dout, dq, dk, dv});
  if (shape.length == 0) return;
  const BackwardCall call{shape, q, k, v, out, log_sum, dout, dq, dk, dv};
  const auto task = HWY_DYNAMIC_DISPATCH(backward_task);
  for_tasks(threads, shape.batch * shape.kv_heads, BackwardMemory(shape, nullptr).bytes, workspace,
            [&](std::size_t i, void* memory) { task(call, i / shape.kv_heads, i % shape.kv_heads, memory); });
}

}  // namespace sluice::kernels
#endif
