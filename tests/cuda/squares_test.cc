#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "allocator/device_memory.h"
#include "core/bytes.h"
#include "cuda/kernel_test.h"
#include "kernels/device_reduce.h"
#include "kernels/reduce.h"
#include "thrown.h"

// Sums of squares on a GPU have the bits of those on the CPU.
namespace sluice::kernels {
namespace {

// Values over many powers of ten, so that sums in another order have other bits.
std::vector<std::byte> make_values(std::size_t count, Dtype type, std::uint64_t seed) {
  std::mt19937_64 words(seed);
  std::normal_distribution<float> normal;
  std::vector<std::byte> bytes(count * size_of(type));
  for (std::size_t i = 0; i < count; ++i) {
    const float value = i % 61 == 0 ? 0x1p-140f : normal(words) * std::pow(10.0f, normal(words));
    put(bytes, i, type, value);
  }
  return bytes;
}

class SquaresTest : public KernelTest {
 protected:
  // The sum that the GPU computes of the bytes, which begin `shift` bytes beyond a multiple of 256.
  SquareSum on_gpu(const std::vector<std::byte>& bytes, Dtype type, std::size_t first, std::size_t shift) {
    const std::size_t n = bytes.size() / size_of(type), sums = DeviceSquares::sum_bytes(n);
    const std::size_t sums_at = round_up(shift + bytes.size(), sizeof(double));
    const std::size_t end = sums_at + sums;
    allocator::Ledger ledger;
    allocator::DeviceRegion memory(ledger, *device_, allocator::Purpose::kGradient, end + sizeof(double));
    HostMemory host(*device_, end + sizeof(double));
    const Device::Stream stream = device_->make_stream(false);
    DeviceSquares squares(*device_);
    std::copy(bytes.begin(), bytes.end(), host.data() + shift);
    std::fill(host.data() + sums_at, host.data() + host.size(), kUntouched);
    device_->copy_in(stream.get(), memory.address(), host.data(), host.size());
    squares.queue(stream.get(), n, {reinterpret_cast<void*>(memory.address() + shift), type},
                  memory.address() + sums_at);
    device_->copy_out(stream.get(), host.data(), memory.address(), host.size());
    device_->synchronize(stream.get());
    for (std::size_t i = end; i < host.size(); ++i) EXPECT_EQ(host[i], kUntouched) << "beyond the last sum";
    std::vector<double> blocks(sums / sizeof(double));
    std::memcpy(blocks.data(), host.data() + sums_at, sums);
    return square_sum(first, blocks);
  }
  void expect_same_bits(const std::vector<std::byte>& bytes, Dtype type, std::size_t first,
                        std::size_t shift) {
    const std::size_t n = bytes.size() / size_of(type);
    const SquareSum expected = sum_of_squares(threads_, first, n, {bytes.data(), type});
    const SquareSum found = on_gpu(bytes, type, first, shift);
    EXPECT_EQ(found.finite, expected.finite);
    EXPECT_EQ(found.sum.first(), expected.sum.first());
    EXPECT_EQ(found.sum.end(), expected.sum.end());
    EXPECT_EQ(found.sum.nodes(), expected.sum.nodes()) << n << " of " << name_of(type) << " from " << first;
  }
  static constexpr std::byte kUntouched{0xa5};
  Threads threads_{2};
};

TEST_F(SquaresTest, EachTypeHasTheBitsOfTheCpu) {
  for (const Dtype type : {Dtype::kF32, Dtype::kBf16, Dtype::kF16})
    for (const std::size_t n : {1, 15, 16, 17, 1023, 1024, 1025, 2048, 16383, 16384, 16385, 70001})
      for (const std::size_t first : {0, 5 * 1024})
        expect_same_bits(make_values(n, type, n + first), type, first, first == 0 ? 0 : 4);
}

TEST_F(SquaresTest, EverySeedOfTheFakesOrderHasThem) {
  SLUICE_NEEDS_THE_FAKE();
  const auto bytes = make_values(9001, Dtype::kF32, 1);
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    device_.reset();
    fake()->begin({.schedule = Schedule::kRandom, .seed = seed});
    device_ = open_device(0);
    expect_same_bits(bytes, Dtype::kF32, 3072, 0);
  }
}

TEST_F(SquaresTest, OneElementThatIsNotFiniteIsFound) {
  constexpr std::size_t kCount = 5000;
  for (const float special : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                              std::numeric_limits<float>::quiet_NaN()})
    for (const std::size_t at : {std::size_t{0}, std::size_t{1024}, std::size_t{3333}, kCount - 1}) {
      auto bytes = make_values(kCount, Dtype::kF32, at);
      std::memcpy(bytes.data() + 4 * at, &special, sizeof special);
      EXPECT_FALSE(on_gpu(bytes, Dtype::kF32, 0, 0).finite) << special << " at " << at;
    }
}

// The greatest f32 values have squares that are finite in f64.
TEST_F(SquaresTest, TheGreatestValuesAreFinite) {
  std::vector<std::byte> bytes(4 * 3000);
  const float greatest = std::numeric_limits<float>::max();
  for (std::size_t i = 0; i < 3000; ++i) std::memcpy(bytes.data() + 4 * i, &greatest, sizeof greatest);
  expect_same_bits(bytes, Dtype::kF32, 0, 0);
  EXPECT_TRUE(on_gpu(bytes, Dtype::kF32, 0, 0).finite);
}

TEST_F(SquaresTest, EachDriverCallThatFailsIsAnErrorAndLeavesNothing) {
  SLUICE_NEEDS_THE_FAKE();
  const auto bytes = make_values(3000, Dtype::kBf16, 1);
  const auto scenario = [&] {
    device_ = open_device(0);
    on_gpu(bytes, Dtype::kBf16, 0, 0);
    device_.reset();
  };
  device_.reset();
  fake()->begin({});
  scenario();
  int failures = 0;
  const auto counts = fake()->counts();
  for (const char* function : {"cuModuleLoadData", "cuModuleGetFunction", "cuLaunchKernel"})
    for (std::uint64_t n = 0; n < counts.calls.at(function); ++n, ++failures) {
      fake()->begin({});
      fake()->fail(function, n, 719);
      expect_error(ErrorCode::kIo, {function}, scenario);
      device_.reset();
      EXPECT_EQ(fake()->alive(), std::vector<std::string>{}) << function << " " << n;
      EXPECT_EQ(fake()->take_misuses(), std::vector<std::string>{}) << function << " " << n;
    }
  EXPECT_GE(failures, 3);
}

TEST_F(SquaresTest, NothingIsQueuedForNoElements) {
  DeviceSquares(*device_).queue(nullptr, 0, {nullptr, Dtype::kF32}, 0);
  EXPECT_EQ(DeviceSquares::sum_bytes(0), 0u);
}

TEST_F(SquaresTest, WhatIsNotAlignedOrNoFloatIsRefused) {
  DeviceSquares squares(*device_);
  const auto at = [](std::uintptr_t address) { return reinterpret_cast<const void*>(address); };
  expect_error(ErrorCode::kInternal, {"f32", "no multiple of 4"}, [&] {
    squares.queue(nullptr, 1, {at(258), Dtype::kF32}, 256);
  });
  expect_error(ErrorCode::kInternal, {"no multiple of 8"}, [&] {
    squares.queue(nullptr, 1, {at(256), Dtype::kF32}, 260);
  });
  expect_error(ErrorCode::kInternal, {"f32, bf16 or f16", "u8"}, [&] {
    squares.queue(nullptr, 1, {at(256), Dtype::kU8}, 256);
  });
}

}  // namespace
}  // namespace sluice::kernels
