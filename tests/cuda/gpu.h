#pragma once
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "core/device.h"
#include "core/error.h"
#include "cuda/fake/control.h"

namespace sluice {

// Tests on the fake driver, or on the one that $SLUICE_CUDA_DRIVER names, such as libcuda.so.1 on a machine
// with a GPU. What only the fake can do is skipped there.
class GpuTest : public testing::Test {
 protected:
  using Schedule = fake_cuda::Schedule;

  static fake_cuda::Control* fake() {
    static fake_cuda::Control* const control = [] {
      const auto program = std::filesystem::read_symlink("/proc/self/exe");
      const std::string path = (program.parent_path() / ".." / "lib" / "libsluice_fake_cuda.so").string();
      const char* const named = std::getenv("SLUICE_CUDA_DRIVER");
      if (named != nullptr && named != path) return static_cast<fake_cuda::Control*>(nullptr);
      void* const library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
      void* const found = library == nullptr ? nullptr : ::dlsym(library, "sluice_fake_cuda");
      if (found == nullptr) throw std::runtime_error(::dlerror());
      ::setenv("SLUICE_CUDA_DRIVER", path.c_str(), 1);
      return reinterpret_cast<fake_cuda::Control* (*)()>(found)();
    }();
    return control;
  }
  void SetUp() override {
    if (fake() != nullptr) fake()->begin({});
  }
  void TearDown() override {
    if (fake() == nullptr) return;
    EXPECT_EQ(fake()->take_misuses(), std::vector<std::string>{});
    EXPECT_EQ(fake()->alive(), std::vector<std::string>{});
  }
};
#define SLUICE_NEEDS_THE_FAKE() \
  if (fake() == nullptr)        \
  GTEST_SKIP() << "this is a real GPU, and the test asks for what only the fake driver does"

// Ends something. Where that fails, as after a fault of a GPU, the test fails, and the others go on.
template <class End>
void at_the_end(End end) {
  try {
    end();
  } catch (const Error& error) {
    ADD_FAILURE() << error.what();
  }
}

// Addresses with an extent under each piece, for as long as this object lives.
class MappedMemory {
 public:
  MappedMemory(Device& device, int extents) : device_(device), piece_(device.info().extent_bytes) {
    bytes_ = piece_ * static_cast<std::size_t>(extents);
    address_ = device.reserve_addresses(bytes_);
    try {
      while (extents_.size() < static_cast<std::size_t>(extents)) add();
    } catch (...) {
      end();
      throw;
    }
  }
  ~MappedMemory() {
    at_the_end([&] { end(); });
  }
  MappedMemory(const MappedMemory&) = delete;
  MappedMemory& operator=(const MappedMemory&) = delete;
  DeviceAddress address() const { return address_; }
  std::size_t bytes() const { return bytes_; }
  Device::Extent extent(std::size_t i) const { return extents_[i]; }

 private:
  void add() {
    const Device::Extent extent = device_.create_extent(piece_);
    try {
      device_.map(address_ + extents_.size() * piece_, piece_, extent);
    } catch (...) {
      device_.release_extent(extent);
      throw;
    }
    extents_.push_back(extent);
  }
  void end() {
    for (std::size_t i = 0; i < extents_.size(); ++i) {
      device_.unmap(address_ + i * piece_, piece_);
      device_.release_extent(extents_[i]);
    }
    device_.free_addresses(address_, bytes_);
  }
  Device& device_;
  std::size_t piece_, bytes_;
  DeviceAddress address_;
  std::vector<Device::Extent> extents_;
};

// Host memory that is registered.
class HostMemory {
 public:
  HostMemory(Device& device, std::size_t bytes) : device_(device), values_(bytes) {
    device.register_host(values_.data(), bytes);
  }
  ~HostMemory() {
    at_the_end([&] { device_.unregister_host(values_.data()); });
  }
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;
  std::byte* data() { return values_.data(); }
  std::byte& operator[](std::size_t i) { return values_[i]; }
  std::size_t size() const { return values_.size(); }
  const std::vector<std::byte>& values() const { return values_; }

 private:
  Device& device_;
  std::vector<std::byte> values_;
};

}  // namespace sluice
