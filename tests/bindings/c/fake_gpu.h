#pragma once
#include <dlfcn.h>

#include "tests/bindings/c/support.h"
#include "tests/cuda/fake/control.h"

namespace sluice_c_test {

namespace fake_cuda = sluice::fake_cuda;

// Tests on the fake driver, which they find as a user's program finds the real one.
class FakeGpuTest : public ::testing::Test {
 protected:
  static void* library() {
    static void* const loaded = [] {
      void* const found = ::dlopen(path().c_str(), RTLD_NOW | RTLD_LOCAL);
      if (found == nullptr) throw std::runtime_error(::dlerror());
      return found;
    }();
    return loaded;
  }
  static std::string path() {
    const auto program = std::filesystem::read_symlink("/proc/self/exe");
    return (program.parent_path() / ".." / "lib" / "libsluice_fake_cuda.so").string();
  }
  static fake_cuda::Control& fake() {
    static fake_cuda::Control* const control =
        reinterpret_cast<fake_cuda::Control* (*)()>(::dlsym(library(), "sluice_fake_cuda"))();
    return *control;
  }
  static bool has_kernels() {
    return std::filesystem::exists(std::filesystem::path(path()).parent_path() / "libsluice_kernels.fatbin");
  }
  void SetUp() override {
    ::setenv("SLUICE_CUDA_DRIVER", path().c_str(), 1);
    fake().begin({});
  }
  void TearDown() override {
    EXPECT_EQ(fake().take_misuses(), std::vector<std::string>{});
    EXPECT_EQ(fake().alive(), std::vector<std::string>{});
    ::unsetenv("SLUICE_CUDA_DRIVER");
  }
  Folder folder_;
};

// Tests of engines there, which need the GPU's kernels.
class FakeGpuEngineTest : public FakeGpuTest {
 protected:
  void SetUp() override {
    if (!has_kernels()) GTEST_SKIP() << "the GPU's kernels are not built, since nvcc is not installed";
    FakeGpuTest::SetUp();
  }
  void TearDown() override {
    if (has_kernels()) FakeGpuTest::TearDown();
  }
};

}  // namespace sluice_c_test
