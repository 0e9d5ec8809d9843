#pragma once
#include <dlfcn.h>
#include <sys/mman.h>

#include "core/device.h"
#include "core/error.h"
#include "cuda/fake/control.h"
#include "testing.h"

namespace sluice {

// Tests on the fake driver, or on the one that $SLUICE_CUDA_DRIVER names, such as libcuda.so.1 on a machine
// with a GPU. A driver is the fake where it has the fake's controls, whatever its file is called. All tests
// run on both, but those that say SLUICE_NEEDS_THE_FAKE().
class GpuTest : public testing::Test {
 protected:
  using Schedule = fake_cuda::Schedule;

  // The controls of the fake; null on another driver.
  static fake_cuda::Control* fake() {
    static fake_cuda::Control* const control = [] {
      if (std::getenv("SLUICE_CUDA_DRIVER") == nullptr) {
        const auto program = std::filesystem::read_symlink("/proc/self/exe");
        const auto path = program.parent_path() / ".." / "lib" / "libsluice_fake_cuda.so";
        ::setenv("SLUICE_CUDA_DRIVER", path.c_str(), 1);
      }
      void* const library = ::dlopen(std::getenv("SLUICE_CUDA_DRIVER"), RTLD_NOW | RTLD_LOCAL);
      void* const found = library == nullptr ? nullptr : ::dlsym(library, "sluice_fake_cuda");
      if (found != nullptr) ::setenv("SLUICE_NCCL", std::getenv("SLUICE_CUDA_DRIVER"), 1);
      return found == nullptr ? nullptr : reinterpret_cast<fake_cuda::Control* (*)()>(found)();
    }();
    return control;
  }
  void SetUp() override {
    if (fake() != nullptr) fake()->begin({});
    if (fake() == nullptr) keep_a_context();
  }
  void TearDown() override {
    if (fake() == nullptr) return;
    EXPECT_EQ(fake()->take_misuses(), std::vector<std::string>{});
    EXPECT_EQ(fake()->alive(), std::vector<std::string>{});
  }

 private:
  // Each device that a test opens would else make a context of its own, which takes a GPU longer than most
  // tests.
  static void keep_a_context() {
    [[maybe_unused]] static const Device* const kept = open_device(0).release();
  }
};
#define SLUICE_NEEDS_THE_FAKE() \
  if (fake() == nullptr)        \
  GTEST_SKIP() << "this driver is not the fake, and the test asks for what only the fake does"

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

// Events at the places that the streams have reached.
inline std::vector<Device::SharedEvent> reached(Device& device, std::span<CUstream_st* const> streams) {
  std::vector<Device::SharedEvent> events;
  for (CUstream_st* const stream : streams) {
    events.emplace_back(device.make_event(false));
    device.record(events.back().get(), stream);
  }
  return events;
}

// Host memory that is registered, on pages of its own, as all that the engine registers.
class HostMemory {
 public:
  HostMemory(Device& device, std::size_t bytes)
      : device_(device), bytes_(bytes), data_(static_cast<std::byte*>(pages(bytes))) {
    try {
      device.register_host(data_, bytes);
    } catch (...) {
      ::munmap(data_, bytes_);
      throw;
    }
  }
  ~HostMemory() {
    at_the_end([&] { device_.unregister_host(data_); });
    ::munmap(data_, bytes_);
  }
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;
  std::byte* data() { return data_; }
  std::byte& operator[](std::size_t i) { return data_[i]; }
  std::size_t size() const { return bytes_; }
  std::vector<std::byte> values() const { return {data_, data_ + bytes_}; }

 private:
  static void* pages(std::size_t bytes) {
    void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    return memory;
  }
  Device& device_;
  std::size_t bytes_;
  std::byte* data_;
};

}  // namespace sluice
