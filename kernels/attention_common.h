#pragma once
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <initializer_list>
#include <vector>

#include "core/bytes.h"
#include "kernels/attention.h"
#include "kernels/simd.h"

// Private to the attention kernels. Include it before <hwy/highway.h>, like simd.h.

namespace sluice::kernels {

// Tiles have a fixed size, so that the order of every sum follows from the shape. Lanes of a vector hold
// different queries, in panels of 16, so that maxima and sums over keys have the same bits at any vector
// width.
inline constexpr std::size_t kTile = kQueryGrain;
inline constexpr std::size_t kPanel = 16;
inline constexpr std::size_t kScoreStride = kTile + kPanel;  // of a tile of scores, [keys][queries]

// The row stride of a packed tile: whole panels, and an odd number of cache lines, so that neighbouring rows
// map to different cache sets.
inline std::size_t packed_stride(std::size_t head_width) {
  return (divide_up(head_width, kPanel) | 1) * kPanel;
}

// One tile of queries of a head against one tile of keys.
struct Tile {
  std::size_t first_query, queries, first_key, keys;
  Tile(std::size_t length, std::size_t query, std::size_t key)
      : first_query(query),
        queries(std::min(kTile, length - query)),
        first_key(key),
        keys(std::min(kTile, length - key)) {}
  bool diagonal() const { return first_key == first_query; }
  // The number of keys that panel `p` attends to: on the diagonal the causal mask hides the keys after a
  // query.
  std::size_t keys_of_panel(std::size_t p) const {
    return diagonal() ? std::min(keys, (p + 1) * kPanel) : keys;
  }
};

// Splits one block of memory into f32 buffers aligned to 64 bytes.
class Carver {
 public:
  explicit Carver(void* memory) : memory_(static_cast<float*>(memory)) {}
  float* take(std::size_t elements) {
    float* const taken = memory_ ? memory_ + used_ : nullptr;
    used_ += round_up(elements, kPanel);
    return taken;
  }
  std::size_t bytes() const { return used_ * sizeof(float); }

 private:
  float* memory_;
  std::size_t used_ = 0;
};

// Gives each running task a part of the workspace of its own. Results do not depend on which one.
class Slots {
 public:
  explicit Slots(std::size_t count) : busy_(count) {}
  std::size_t claim() {
    for (std::size_t i = 0;; i = (i + 1) % busy_.size())
      if (!busy_[i].exchange(true, std::memory_order_acquire)) return i;
  }
  void release(std::size_t slot) { busy_[slot].store(false, std::memory_order_release); }

 private:
  std::vector<std::atomic<bool>> busy_;
};

// Runs task(i, memory) for i in [0, count), each with `slot_bytes` of the workspace to itself.
template <class Task>
void for_tasks(Threads& threads, std::size_t count, std::size_t slot_bytes, void* workspace,
               const Task& task) {
  Slots slots(static_cast<std::size_t>(threads.count()));
  threads.parallel_for(count, 1, [&](std::size_t begin, std::size_t) {
    const std::size_t slot = slots.claim();
    task(begin, static_cast<std::byte*>(workspace) + slot * slot_bytes);
    slots.release(slot);
  });
}

// Throws Error(kInvalidArgument) for an impossible shape and for arrays that are not of a float type.
void check_attention(const AttentionShape& shape, std::initializer_list<ConstArray> arrays);

// The number of rows of q per sequence, and the row of a query.
inline std::size_t query_rows(const AttentionShape& s) { return s.queries == 0 ? s.length : s.queries; }
inline std::size_t row_of(const AttentionShape& s, std::size_t b, std::size_t query) {
  return b * query_rows(s) + query - s.first_query;
}

// The index of the dropout word of query i of head h of sequence b and key 0.
inline std::uint64_t dropout_index(const AttentionShape& s, std::size_t b, std::size_t h, std::size_t i) {
  const std::size_t heads = s.all_heads == 0 ? s.heads : s.all_heads;
  return s.first_index + ((b * heads + h) * s.length + i) * s.length;
}

}  // namespace sluice::kernels
