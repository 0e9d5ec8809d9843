#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "core/dtype.h"
#include "core/threads.h"

namespace sluice::comm {

// The types of elements that ranks add and gather: those of Dtype, and two of 8 bytes.
enum class Element : std::uint8_t { kI64 = 64, kF64 = 65 };
constexpr Element element_of(Dtype type) { return static_cast<Element>(type); }
std::size_t size_of(Element element);
std::string_view name_of(Element element);  // "f32", "i64"

// Adds arrays of all ranks in the written order.
class Adder {
 public:
  // Computes into = ((arrays[0] + arrays[1]) + arrays[2]) + ..., of n elements each: in f32 for f32, bf16 and
  // f16, rounded once; in f64 for f64; and exactly for i64, which wraps around. `into` may be one of them.
  void add(std::span<const std::byte* const> arrays, std::size_t n, Element element, std::byte* into);

 private:
  void add_block(std::span<const std::byte* const> arrays, std::size_t begin, std::size_t n, Dtype type,
                 std::byte* into);
  static constexpr std::size_t kBlock = 4096;  // elements, so that the sum so far stays in the caches

  Threads threads_{1};
  std::vector<float> sum_ = std::vector<float>(kBlock);
};

}  // namespace sluice::comm
