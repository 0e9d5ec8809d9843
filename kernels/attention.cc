#include "kernels/attention.h"

#include <limits>

#include "core/error.h"
#include "kernels/attention_common.h"

// foreach_target.h must come first.
#include <hwy/highway.h>

#include "kernels/attention_products-inl.h"

#ifndef SLUICE_ATTENTION_FORWARD_MEMORY_
#define SLUICE_ATTENTION_FORWARD_MEMORY_
namespace sluice::kernels {
namespace {

struct ForwardCall {
  const AttentionShape& shape;
  ConstArray q, k, v;
  Array out;
  float* log_sum;
};

// The buffers of one task.
struct ForwardMemory {
  float *rows, *queries, *keys, *values, *scores, *sums, *maxima, *totals, *factor_rows = nullptr,
                                                                           *factors = nullptr;
  std::size_t bytes;

  ForwardMemory(const AttentionShape& s, void* memory) {
    Carver carver(memory);
    const std::size_t stride = packed_stride(s.head_width);
    rows = carver.take(kTile * stride);     // [queries][width]: the queries, and at the end the outputs
    queries = carver.take(kTile * stride);  // panels of [width][16 queries]
    keys = carver.take(kTile * stride);
    values = carver.take(kTile * stride);
    scores = carver.take(kTile * kPanel);  // [keys][16 queries]
    sums = carver.take(kTile * stride);    // panels of [width][16 queries]
    maxima = carver.take(kTile);
    totals = carver.take(kTile);
    if (s.dropout > 0) {
      factor_rows = carver.take(kTile * kTile);  // [queries][keys]
      factors = carver.take(kTile * kTile);      // [keys][queries]
    }
    bytes = carver.bytes();
  }
};

}  // namespace
}  // namespace sluice::kernels
#endif

HWY_BEFORE_NAMESPACE();
namespace sluice::kernels::HWY_NAMESPACE {

// Applies the causal mask: hides key j from the queries before it.
HWY_INLINE void hide_later_keys(std::size_t keys, std::size_t p, float* scores) {
  for (std::size_t j = p * kPanel; j < keys; ++j)
    for (std::size_t i = 0; i < j - p * kPanel; ++i)
      scores[j * kPanel + i] = -std::numeric_limits<float>::infinity();
}

// Turns scores into probabilities times e^(total - maximum), and updates each query's running maximum and
// total. `rescale` gets the factor for the previous sums (online softmax).
HWY_INLINE void exponentiate(std::size_t keys, float* HWY_RESTRICT scores, float* HWY_RESTRICT maximum,
                             float* HWY_RESTRICT total, float* HWY_RESTRICT rescale) {
  const F32 d;
  for_row([&](std::size_t lane) HWY_ATTR {
    const auto before = hn::LoadU(d, maximum + lane);
    auto now = before;
    for (std::size_t j = 0; j < keys; ++j) now = hn::Max(now, hn::LoadU(d, scores + j * kPanel + lane));
    auto sum = hn::Zero(d);
    for (std::size_t j = 0; j < keys; ++j) {
      const auto value = exp_to_normal(hn::Sub(hn::LoadU(d, scores + j * kPanel + lane), now));
      sum = hn::Add(sum, value);
      hn::StoreU(value, d, scores + j * kPanel + lane);
    }
    const auto factor = exp_to_normal(hn::Sub(before, now));
    hn::StoreU(now, d, maximum + lane);
    hn::StoreU(mul_add(hn::LoadU(d, total + lane), factor, sum), d, total + lane);
    hn::StoreU(factor, d, rescale + lane);
  });
}

HWY_INLINE void multiply_rows_by(std::size_t rows, const float* HWY_RESTRICT factors,
                                 float* HWY_RESTRICT values) {
  const F32 d;
  for_row([&](std::size_t lane) HWY_ATTR {
    const auto factor = hn::LoadU(d, factors + lane);
    for (std::size_t r = 0; r < rows; ++r)
      hn::StoreU(hn::Mul(hn::LoadU(d, values + r * kPanel + lane), factor), d, values + r * kPanel + lane);
  });
}

// `factors` has rows of kTile queries.
HWY_INLINE void multiply_by_dropout(std::size_t keys, const float* HWY_RESTRICT factors,
                                    float* HWY_RESTRICT scores) {
  const F32 d;
  for (std::size_t j = 0; j < keys; ++j)
    for_row([&](std::size_t lane) HWY_ATTR {
      const auto factor = hn::LoadU(d, factors + j * kTile + lane);
      hn::StoreU(hn::Mul(hn::LoadU(d, scores + j * kPanel + lane), factor), d, scores + j * kPanel + lane);
    });
}

HWY_INLINE void forward_panel(const AttentionShape& s, const Tile& tile, std::size_t p,
                              const ForwardMemory& m) {
  const std::size_t stride = packed_stride(s.head_width), keys = tile.keys_of_panel(p);
  float* const sums = m.sums + p * kPanel * stride;
  multiply_panel<Stored::kByRows>(keys, s.head_width, {m.keys, stride},
                                  {m.queries + p * kPanel * stride, kPanel}, m.scores, kPanel, false);
  if (tile.diagonal()) hide_later_keys(keys, p, m.scores);
  HWY_ALIGN float rescale[kPanel];
  exponentiate(keys, m.scores, m.maxima + p * kPanel, m.totals + p * kPanel, rescale);
  if (s.dropout > 0) multiply_by_dropout(keys, m.factors + p * kPanel, m.scores);
  const bool first = tile.first_key == 0;
  if (!first) multiply_rows_by(s.head_width, rescale, sums);
  multiply_panel<Stored::kByDepth>(s.head_width, keys, {m.values, stride}, {m.scores, kPanel}, sums, kPanel,
                                   !first);
}

HWY_INLINE void finish_forward(const ForwardCall& call, std::size_t b, std::size_t h, std::size_t first,
                               std::size_t queries, const ForwardMemory& m) {
  const AttentionShape& s = call.shape;
  const F32 d;
  const std::size_t stride = packed_stride(s.head_width);
  HWY_ALIGN float log_sums[kTile];
  for (std::size_t i = 0; i < round_up(queries, kPanel); i += kLanes) {
    const auto total = hn::LoadU(d, m.totals + i);
    hn::StoreU(hn::Add(hn::LoadU(d, m.maxima + i), log(total)), d, log_sums + i);
    hn::StoreU(hn::Div(set(1.0f), total), d, m.totals + i);
  }
  for (std::size_t p = 0; p * kPanel < queries; ++p) {
    float* const sums = m.sums + p * kPanel * stride;
    multiply_rows_by(s.head_width, m.totals + p * kPanel, sums);
    transpose(sums, round_up(s.head_width, 4), kPanel, kPanel, m.rows + p * kPanel * stride, stride);
  }
  const std::size_t width = s.heads * s.head_width;
  unpack_tile(m.rows, queries, s.head_width, 1.0f,
              call.out.at(row_of(s, b, first) * width + h * s.head_width), width);
  std::copy_n(log_sums, queries, call.log_sum + (b * s.heads + h) * query_rows(s) + first - s.first_query);
}

// Computes one tile of queries of head h in sequence b, against all keys up to their own.
void forward_task(const ForwardCall& call, std::size_t b, std::size_t h, std::size_t first, void* memory) {
  const AttentionShape& s = call.shape;
  const ForwardMemory m(s, memory);
  const std::size_t width = s.head_width, kv_head = h / (s.heads / s.kv_heads);
  const std::size_t queries = std::min(kTile, s.length - first);
  pack_queries(s, {s.length, first, 0}, call.q.at(row_of(s, b, first) * s.q_stride + h * width), s.q_stride,
               s.scale, m.rows, m.queries);
  std::fill_n(m.maxima, kTile, -std::numeric_limits<float>::infinity());
  std::fill_n(m.totals, kTile, 0.0f);
  for (std::size_t key = 0; key <= first; key += kTile) {
    const Tile tile(s.length, first, key);
    pack_keys_and_values(s, tile, b, kv_head, call.k, call.v, m.keys, m.values);
    if (s.dropout > 0) dropout_tile(s, tile, b, h, m.factor_rows, m.factors);
    for (std::size_t p = 0; p * kPanel < queries; ++p) forward_panel(s, tile, p, m);
  }
  finish_forward(call, b, h, first, queries, m);
}

}  // namespace sluice::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sluice::kernels {

HWY_EXPORT(forward_task);

void check_attention(const AttentionShape& s, std::initializer_list<ConstArray> arrays) {
  if (s.heads == 0 || s.kv_heads == 0 || s.heads % s.kv_heads != 0 || s.head_width == 0)
    fail(ErrorCode::kInvalidArgument,
         "attention with {} query heads of width {} and {} key/value heads is not possible: the number of "
         "query heads must be a multiple of that of key/value heads, and no number may be 0",
         s.heads, s.head_width, s.kv_heads);
  if (!(s.dropout >= 0 && s.dropout < 1))
    fail(ErrorCode::kInvalidArgument, "a dropout of {} is not possible: it must be at least 0 and below 1",
         s.dropout);
  ensure(s.first_query % kTile == 0 && s.queries % kTile == 0 && s.first_query + s.queries <= s.length,
         "{} queries from {} on of {} are no whole tiles", s.queries, s.first_query, s.length);
  for (const ConstArray& array : arrays)
    if (!is_float(array.type))
      fail(ErrorCode::kInvalidArgument, "attention takes arrays of f32, bf16 or f16, not of {}",
           name_of(array.type));
}

std::size_t attention_forward_workspace(const AttentionShape& shape, int threads) {
  return ForwardMemory(shape, nullptr).bytes * static_cast<std::size_t>(threads);
}

void attention_forward(Threads& threads, const AttentionShape& shape, ConstArray q, ConstArray k,
                       ConstArray v, Array out, float* log_sum, void* workspace) {
  check_attention(shape, {q, k, v, out});
  const ForwardCall call{shape, q, k, v, out, log_sum};
  const std::size_t tiles = divide_up(query_rows(shape), kTile);
  const auto task = HWY_DYNAMIC_DISPATCH(forward_task);
  for_tasks(threads, shape.batch * shape.heads * tiles, ForwardMemory(shape, nullptr).bytes, workspace,
            [&](std::size_t i, void* memory) {
              const std::size_t tile = tiles - 1 - i % tiles;  // tiles with the most keys first
              task(call, i / tiles / shape.heads, i / tiles % shape.heads, shape.first_query + tile * kTile,
                   memory);
            });
}

}  // namespace sluice::kernels
#endif
