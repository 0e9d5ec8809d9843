#pragma once
#include "core/dtype.h"
#include "cuda/gpu.h"

namespace sluice {

// Tests of kernels, where these are built.
class KernelTest : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    const auto program = std::filesystem::read_symlink("/proc/self/exe");
    if (!std::filesystem::exists(program.parent_path() / ".." / "lib" / "libsluice_kernels.fatbin"))
      GTEST_SKIP() << "the GPU's kernels are not built, since CUDA's compiler nvcc is not installed";
    device_ = open_device(0);
  }
  void TearDown() override {
    device_.reset();
    GpuTest::TearDown();
  }
  std::unique_ptr<Device> device_;
};

// Element i of an array of floats becomes the value.
inline void put(std::vector<std::byte>& to, std::size_t i, Dtype type, float value) {
  if (type == Dtype::kF32) std::memcpy(to.data() + 4 * i, &value, 4);
  const Bf16 bf16 = to_bf16(value);
  const F16 f16 = to_f16(value);
  if (type == Dtype::kBf16) std::memcpy(to.data() + 2 * i, &bf16, 2);
  if (type == Dtype::kF16) std::memcpy(to.data() + 2 * i, &f16, 2);
}

}  // namespace sluice
