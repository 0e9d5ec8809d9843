#include "kernels/embedding.h"

#include <algorithm>

#include "core/bytes.h"
#include "kernels/simd.h"

#include "kernels/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sluice::kernels::HWY_NAMESPACE {

void add_row_pair(std::size_t width, ConstArray a, ConstArray b, Array sum) {
  for_each_vector(width, [=](auto at) HWY_ATTR { store(hn::Add(load(a, at), load(b, at)), sum, at); });
}

void copy_row(std::size_t width, ConstArray from, float* to) {
  for_each_vector(width, [=](auto at) HWY_ATTR { store(load(from, at), to, at); });
}

void add_row_to(std::size_t width, ConstArray from, float* to) {
  for_each_vector(width, [=](auto at) HWY_ATTR { store(hn::Add(load(to, at), load(from, at)), to, at); });
}

}  // namespace sluice::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sluice::kernels {
HWY_EXPORT(add_row_pair);
HWY_EXPORT(copy_row);
HWY_EXPORT(add_row_to);

namespace {
constexpr std::size_t kColumns = 256;    // columns that a task sums on its stack
constexpr std::size_t kSortedRows = 64;  // sorted rows per task

// A key has a row's token in its upper half, and the row below it. So sorted keys group the rows by token, in
// order.
using Key = std::uint64_t;
std::uint32_t token_of(Key key) { return static_cast<std::uint32_t>(key >> 32); }
std::size_t row_of(Key key) { return static_cast<std::uint32_t>(key); }

std::span<const Key> sort_rows(std::span<const std::int32_t> tokens, void* workspace) {
  auto* const keys = static_cast<Key*>(workspace);
  for (std::size_t row = 0; row < tokens.size(); ++row)
    keys[row] = Key{static_cast<std::uint32_t>(tokens[row])} << 32 | row;
  std::sort(keys, keys + tokens.size());
  return {keys, tokens.size()};
}

// Adds the rows of the token at keys[begin] to columns of dtable. Returns the index after its last key.
std::size_t add_token(std::span<const Key> keys, std::size_t begin, std::size_t width, std::size_t column,
                      ConstArray dy, float* dtable) {
  const std::size_t columns = std::min(kColumns, width - column);
  const std::uint32_t token = token_of(keys[begin]);
  alignas(64) float sum[kColumns];
  HWY_DYNAMIC_DISPATCH(copy_row)(columns, dy.at(row_of(keys[begin]) * width + column), sum);
  std::size_t i = begin + 1;
  for (; i < keys.size() && token_of(keys[i]) == token; ++i)
    HWY_DYNAMIC_DISPATCH(add_row_to)(columns, dy.at(row_of(keys[i]) * width + column), sum);
  HWY_DYNAMIC_DISPATCH(add_row_to)(columns, ConstArray{sum, Dtype::kF32}, dtable + token * width + column);
  return i;
}
}  // namespace

void embedding_forward(Threads& threads, std::span<const std::int32_t> tokens, std::size_t length,
                       std::size_t width, ConstArray table, ConstArray positions, std::size_t first_position,
                       Array y) {
  require_float({table, y});
  ensure(table.type == y.type && (positions.data == nullptr || positions.type == y.type),
         "embedding_forward takes arrays of one type");
  const std::size_t grain = std::max<std::size_t>(kLoopGrain / std::max<std::size_t>(width, 1), 1);
  threads.parallel_for(tokens.size(), grain, [&](std::size_t begin, std::size_t end) {
    for (std::size_t row = begin; row < end; ++row) {
      const ConstArray from = table.at(static_cast<std::size_t>(tokens[row]) * width);
      const Array to = y.at(row * width);
      if (positions.data == nullptr)
        std::memcpy(to.data, from.data, width * size_of(y.type));
      else
        HWY_DYNAMIC_DISPATCH(add_row_pair)
      (width, from, positions.at((first_position + row % length) * width), to);
    }
  });
}

std::size_t embedding_backward_workspace(std::size_t rows) { return rows * sizeof(Key); }

void embedding_backward(Threads& threads, std::span<const std::int32_t> tokens, std::size_t width,
                        ConstArray dy, float* dtable, void* workspace) {
  require_float({dy});
  const std::span<const Key> keys = sort_rows(tokens, workspace);
  const std::size_t stripes = divide_up(width, kColumns), blocks = divide_up(keys.size(), kSortedRows);
  threads.parallel_for(blocks * stripes, 1, [&](std::size_t task, std::size_t) {
    const std::size_t column = task % stripes * kColumns, begin = task / stripes * kSortedRows;
    const std::size_t end = std::min(begin + kSortedRows, keys.size());
    std::size_t i = begin;
    // A token that begins in the previous block is handled by that block's task.
    while (i < end && i > 0 && token_of(keys[i]) == token_of(keys[i - 1])) ++i;
    while (i < end) i = add_token(keys, i, width, column, dy, dtable);
  });
}

void position_backward(Threads& threads, std::size_t batch, std::size_t length, std::size_t capacity,
                       std::size_t width, ConstArray dy, float* dpositions, bool accumulate) {
  require_float({dy});
  const std::size_t stripes = divide_up(width, kColumns);
  threads.parallel_for((batch == 0 ? 0 : length) * stripes, 8, [&](std::size_t begin, std::size_t end) {
    for (std::size_t task = begin; task < end; ++task) {
      const std::size_t t = task / stripes, column = task % stripes * kColumns;
      const std::size_t columns = std::min(kColumns, width - column);
      alignas(64) float sum[kColumns];
      HWY_DYNAMIC_DISPATCH(copy_row)(columns, dy.at(t * width + column), sum);
      for (std::size_t b = 1; b < batch; ++b)
        HWY_DYNAMIC_DISPATCH(add_row_to)(columns, dy.at((b * length + t) * width + column), sum);
      float* const out = dpositions + t * width + column;
      if (accumulate)
        HWY_DYNAMIC_DISPATCH(add_row_to)(columns, ConstArray{sum, Dtype::kF32}, out);
      else
        std::copy_n(sum, columns, out);
    }
  });
  if (!accumulate)
    std::fill(dpositions + (batch == 0 ? 0 : length) * width, dpositions + capacity * width, 0.0f);
}

}  // namespace sluice::kernels
#endif  // HWY_ONCE
