#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "models/families/config.h"
#include "models/graph/context.h"

namespace sluice::models {

// The keys and values of one text in all blocks, so that its next token costs one row instead of the whole
// text. Thread rule: one thread at a time.
class TextCache {
 public:
  // Returns the bytes for texts of up to `capacity` tokens.
  static std::size_t bytes(const ModelConfig& config, Dtype dtype, std::size_t capacity);
  // REQUIRES: `memory` has bytes() bytes, and outlives this.
  TextCache(const ModelConfig& config, Dtype dtype, std::size_t capacity, std::span<std::byte> memory);

  // Whether the text is the stored one with one more token.
  bool is_continued_by(std::span<const std::int32_t> text) const;
  std::size_t stored() const { return text_.size(); }
  bool has_room_for(std::span<const std::int32_t> text) const { return text.size() <= capacity_; }

  // Invalidates the cache before a pass that overwrites it, until store().
  void begin() { text_.clear(); }
  // Returns an empty cache for units without attention.
  UnitCache unit(std::size_t unit, std::size_t rows) const;
  void store(std::span<const std::int32_t> text) { text_.assign(text.begin(), text.end()); }

 private:
  std::size_t layers_, array_bytes_, capacity_;
  std::span<std::byte> memory_;
  std::vector<std::int32_t> text_;
};

}  // namespace sluice::models
