#pragma once
#include "core/dtype.h"
#include "core/threads.h"
#include "kernels/simd.h"
#include "testing.h"
// kernels/simd.h, which disables targets, must come first.
#include <hwy/highway.h>
#include <hwy/targets.h>

namespace sluice::test {

inline const std::vector<Dtype> kFloatTypes = {Dtype::kF32, Dtype::kBf16, Dtype::kF16};
inline const std::vector<std::size_t> kSizes = {0, 1, 3, 15, 16, 17, 63, 1000, 33001};

// An array of f32, bf16, f16 or u8 between guard bytes. The test fails where something writes beyond either
// end.
class TestArray {
 public:
  TestArray(Dtype type, std::size_t count) : TestArray(type, std::vector<float>(count)) {}
  TestArray(Dtype type, const std::vector<float>& values)
      : type_(type), count_(values.size()), bytes_(kGuard + values.size() * size_of(type) + kGuard, kMark) {
    for (std::size_t i = 0; i < count_; ++i) set(i, values[i]);
  }
  TestArray(const TestArray&) = default;
  ~TestArray() {
    for (std::size_t i = 0; i < kGuard; ++i) {
      EXPECT_EQ(bytes_[i], kMark) << "written before the array";
      EXPECT_EQ(bytes_[bytes_.size() - 1 - i], kMark) << "written after the array";
    }
  }

  operator Array() { return {data(), type_}; }             // NOLINT: tests pass it as an array
  operator ConstArray() const { return {data(), type_}; }  // NOLINT
  float* f32() { return reinterpret_cast<float*>(data()); }
  std::size_t size() const { return count_; }
  Dtype type() const { return type_; }
  double operator[](std::size_t i) const {
    if (type_ == Dtype::kU8) return read<std::uint8_t>(i);
    if (type_ == Dtype::kF32) return read<float>(i);
    return type_ == Dtype::kBf16 ? to_f32(read<Bf16>(i)) : to_f32(read<F16>(i));
  }
  std::vector<unsigned char> bytes() const { return {data(), data() + count_ * size_of(type_)}; }

 private:
  static constexpr std::size_t kGuard = 64;
  static constexpr unsigned char kMark = 0xA5;

  unsigned char* data() { return bytes_.data() + kGuard; }
  const unsigned char* data() const { return bytes_.data() + kGuard; }
  template <class T>
  T read(std::size_t i) const {
    T value;
    std::memcpy(&value, data() + i * sizeof value, sizeof value);
    return value;
  }
  void set(std::size_t i, float value) {
    const std::uint16_t narrow = type_ == Dtype::kBf16 ? to_bf16(value).bits : to_f16(value).bits;
    if (type_ == Dtype::kU8)
      data()[i] = static_cast<unsigned char>(value);
    else if (type_ == Dtype::kF32)
      std::memcpy(data() + i * sizeof value, &value, sizeof value);
    else
      std::memcpy(data() + i * sizeof narrow, &narrow, sizeof narrow);
  }

  Dtype type_;
  std::size_t count_;
  std::vector<unsigned char> bytes_;
};

inline std::vector<float> random_values(std::size_t count, unsigned seed, float deviation = 1) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal(0, deviation);
  std::vector<float> values(count);
  for (float& value : values) value = normal(engine);
  return values;
}

inline std::vector<std::int32_t> random_tokens(std::size_t count, std::int32_t vocabulary, unsigned seed) {
  std::mt19937 engine(seed);
  std::uniform_int_distribution<std::int32_t> uniform(0, vocabulary - 1);
  std::vector<std::int32_t> tokens(count);
  for (auto& token : tokens) token = uniform(engine);
  return tokens;
}

// How far a kernel's result may be from the exact one: half a unit in the last place, and the f32 arithmetic.
// Kernels give the same bits on every CPU, so this holds for all. Results in which the matrix library has a
// part are judged by tests/rounding.h.
inline double tolerance(Dtype type) {
  return type == Dtype::kBf16 ? 0x1.02p-8 : type == Dtype::kF16 ? 0x1.02p-11 : 1e-6;
}

// Requires |actual - expected| <= relative * |expected| + absolute (for f16 plus half of its smallest step).
inline void expect_close(const TestArray& actual, const std::function<double(std::size_t)>& expected,
                         double relative, double absolute, const std::string& what = "") {
  double worst = 0;
  std::size_t where = 0;
  if (actual.type() == Dtype::kF16) absolute += 0x1p-25;
  for (std::size_t i = 0; i < actual.size(); ++i) {
    const double exact = expected(i), error = std::abs(actual[i] - exact);
    const double excess = std::isnan(error) ? std::numeric_limits<double>::infinity()
                                            : error - relative * std::abs(exact) - absolute;
    if (excess > worst) worst = excess, where = i;
  }
  if (worst > 0)
    ADD_FAILURE() << what << ": element " << where << " of " << actual.size() << " is " << actual[where]
                  << ", not " << expected(where);
}

// Makes kernels run on one vector target while it lives. Meanwhile only the test's thread may call kernels.
class OnTarget {
 public:
  explicit OnTarget(std::int64_t target) { use(target); }
  ~OnTarget() { use(0); }

 private:
  static void use(std::int64_t target) {
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
};

inline std::vector<std::int64_t> targets() { return hwy::SupportedAndGeneratedTargets(); }

using Bytes = std::vector<unsigned char>;
inline Bytes operator+(Bytes a, const Bytes& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

// Requires that run(threads), which returns what it wrote, returns the same on every target with 1, 2 and 3
// threads. No other Threads may live then, since oneTBB makes no more workers than the smallest limit allows.
inline void expect_same_bits(const std::function<Bytes(Threads&)>& run) {
  Bytes expected;
  for (const std::int64_t target : targets()) {
    const OnTarget scope(target);
    for (const int count : {1, 2, 3}) {
      Threads threads(count);
      const Bytes result = run(threads);
      if (expected.empty()) expected = result;
      EXPECT_TRUE(result == expected) << hwy::TargetName(target) << " with " << count << " threads";
    }
  }
}

}  // namespace sluice::test
