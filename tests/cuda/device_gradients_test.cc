#include "engine/gradients/device_gradients.h"

#include <algorithm>
#include <limits>
#include <set>
#include <string>

#include "core/bytes.h"
#include "cuda/kernel_test.h"

// Whether the gradients of a unit of many small parameters are finite, as a GPU finds out.
namespace sluice::engine {
namespace device_gradients_test {

constexpr ParameterId kCount = 12;
constexpr std::size_t kElements = 1500;  // two blocks of the grid, of which the second is not full
constexpr std::size_t kEach = 8192;      // bytes from one gradient to the next

UnitSpec unit_of(const char* name, std::size_t parameters) {
  UnitSpec unit{name, {}};
  for (std::size_t i = 0; i < parameters; ++i)
    unit.parameters.push_back({name + std::to_string(i), {kElements}});
  return unit;
}

using DeviceGradientsTest = KernelTest;

struct OnGpu {
  explicit OnGpu(Device& of) : device(of) {
    work.add({on_gpu(), kHugePage}, kEach);
    work.add({host.data(), kHugePage}, kEach);
    gradients.start(ledger);
  }
  ~OnGpu() { work.finish(); }
  OnGpu(const OnGpu&) = delete;
  OnGpu& operator=(const OnGpu&) = delete;
  std::byte* on_gpu() const { return reinterpret_cast<std::byte*>(memory.address()); }

  void add(ParameterId parameter, float value) {
    std::byte* const at = on_gpu() + parameter * kEach;
    std::byte* const from = host.data() + parameter * kEach;
    work.wait({from, kEach}, DeviceWork::Use::kWrite);
    std::fill_n(reinterpret_cast<float*>(from), kElements, 1.0f);
    reinterpret_cast<float*>(from)[kElements - 1] = value;
    work.copy_in(at, {from, kEach});
    gradients.add(parameter, {at, Dtype::kF32}, {at, Dtype::kF32}, false, 1);
  }
  // Whether a gradient is not finite of all parameters of the unit but these.
  bool finds(const std::set<ParameterId>& without = {}) {
    const std::uint32_t* const found = gradients.check(
        1, [&](ParameterId p) { return !without.contains(p); }, true);
    work.wait(DeviceGradients::memory_of(found), DeviceWork::Use::kRead);
    return *found != 0;
  }

  Device& device;
  allocator::Ledger ledger;
  const Layout layout{{unit_of("before.", 1), unit_of("unit.", kCount), unit_of("after.", 1)}};
  DeviceWork work{device};
  const MappedMemory memory{device, 1};
  HostMemory host{device, kHugePage};
  DeviceGradients gradients{layout, work};
};

TEST_F(DeviceGradientsTest, OneLaunchChecksWhatFollowsEachOther) {
  SLUICE_NEEDS_THE_FAKE();
  OnGpu unit(*device_);
  for (ParameterId p = 0; p < kCount + 2; ++p) unit.add(p, 1);
  const auto launches = [&](const std::set<ParameterId>& without) {
    const std::uint64_t before = fake()->counts().calls["cuLaunchKernel"];
    EXPECT_FALSE(unit.finds(without));
    return fake()->counts().calls["cuLaunchKernel"] - before;
  };
  EXPECT_EQ(launches({}), 1U);
  EXPECT_EQ(launches({1, 2, kCount}), 1U);
  EXPECT_EQ(launches({5}), 2U);
  EXPECT_EQ(launches({4, 5, 8}), 3U);
}

TEST_F(DeviceGradientsTest, EachParameterIsCheckedThatHasAGradientAndNoOther) {
  OnGpu unit(*device_);
  for (ParameterId p = 0; p < kCount + 2; ++p) unit.add(p, 1);
  for (ParameterId p = 0; p < kCount + 2; ++p) {
    SCOPED_TRACE(p);
    const bool is_of_unit = p > 0 && p <= kCount;
    unit.add(p, std::numeric_limits<float>::infinity());
    EXPECT_EQ(unit.finds(), is_of_unit);
    EXPECT_FALSE(unit.finds({p}));
    EXPECT_EQ(unit.finds({p - 1, p + 1}), is_of_unit);
    unit.add(p, 1);
  }
  std::set<ParameterId> all;
  for (ParameterId p = 1; p <= kCount; ++p) all.insert(p);
  unit.add(3, std::numeric_limits<float>::infinity());
  EXPECT_FALSE(unit.finds(all));
}

}  // namespace device_gradients_test
}  // namespace sluice::engine
