#pragma once
#include "core/dtype.h"
#include "testing.h"

namespace sluice::comm {

// Values that each rank can compute for all ranks, whose sum depends on the order of additions.
inline float value_of(std::uint64_t seed, int rank, std::size_t i) {
  std::uint64_t x = seed * 0x9e3779b97f4a7c15 + static_cast<std::uint64_t>(rank) * 0xd1342543de82ef95 + i;
  x = (x ^ (x >> 31)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 29)) * 0x94d049bb133111eb;
  constexpr float kScales[] = {1.0f / 4096, 1.0f / 64, 1, 64};
  return static_cast<float>(static_cast<int>(x >> 40 & 2047) - 1024) * kScales[x >> 60 & 3];
}

inline void set(Array array, std::size_t i, float value) {
  if (array.type == Dtype::kF32) array.f32()[i] = value;
  if (array.type == Dtype::kBf16) array.bf16()[i] = to_bf16(value);
  if (array.type == Dtype::kF16) array.f16()[i] = to_f16(value);
}
inline float get(ConstArray array, std::size_t i) {
  if (array.type == Dtype::kF32) return array.f32()[i];
  return array.type == Dtype::kBf16 ? to_f32(array.bf16()[i]) : to_f32(array.f16()[i]);
}

class Values {
 public:
  Values(Dtype type, std::size_t count) : type_(type), bytes_(count * size_of(type) + 1), count_(count) {}
  Values(Dtype type, std::size_t count, std::uint64_t seed, int rank) : Values(type, count) {
    for (std::size_t i = 0; i < count; ++i) set(array(), i, value_of(seed, rank, i));
  }
  Array array() { return {bytes_.data(), type_}; }
  std::size_t count() const { return count_; }
  bool operator==(const Values&) const = default;

 private:
  Dtype type_;
  std::vector<std::byte> bytes_;
  std::size_t count_;
};

inline std::vector<std::size_t> borders_of(std::uint64_t seed, std::size_t count, int ranks) {
  std::mt19937_64 random(seed);
  std::vector<std::size_t> borders{0, count};
  for (int i = 1; i < ranks; ++i) borders.push_back(random() % 3 == 0 ? count : random() % (count + 1));
  std::sort(borders.begin(), borders.end());
  return borders;
}

}  // namespace sluice::comm
