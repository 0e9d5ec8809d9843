#include "models/model/text_cache.h"

#include <algorithm>

#include "core/error.h"

namespace sluice::models {
namespace {

std::size_t bytes_of_array(const ModelConfig& config, Dtype dtype, std::size_t capacity) {
  return round_up(capacity * config.kv_heads * config.head_width * size_of(dtype), kAlignment);
}

}  // namespace

std::size_t TextCache::bytes(const ModelConfig& config, Dtype dtype, std::size_t capacity) {
  return 2 * config.layers * bytes_of_array(config, dtype, capacity);
}

TextCache::TextCache(const ModelConfig& config, Dtype dtype, std::size_t capacity,
                     std::span<std::byte> memory)
    : layers_(config.layers),
      array_bytes_(bytes_of_array(config, dtype, capacity)),
      capacity_(capacity),
      memory_(memory) {
  ensure(memory.size() >= bytes(config, dtype, capacity), "{} bytes are given for the keys and values of {}",
         memory.size(), bytes(config, dtype, capacity));
  text_.reserve(capacity);
}

bool TextCache::is_continued_by(std::span<const std::int32_t> text) const {
  return !text_.empty() && has_room_for(text) && text.size() == text_.size() + 1 &&
         std::ranges::equal(text_, text.first(text_.size()));
}

// Unit 0 is the embedding, and the unit after the blocks is the head.
UnitCache TextCache::unit(std::size_t unit, std::size_t rows) const {
  if (unit == 0 || unit > layers_) return {};
  std::byte* const keys = memory_.data() + 2 * (unit - 1) * array_bytes_;
  return {keys, keys + array_bytes_, capacity_, rows};
}

}  // namespace sluice::models
