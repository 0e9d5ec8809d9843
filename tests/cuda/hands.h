#pragma once
#include "allocator/device_memory.h"
#include "core/device.h"
#include "core/dtype.h"
#include "cuda/gpu.h"
#include "engine/layout/layout.h"

namespace sluice::engine::twins {

inline float noise(std::size_t parameter, std::size_t element, std::size_t round) {
  const auto mixed =
      static_cast<std::uint32_t>(element * 2654435761U + parameter * 40503U + round * 57U * 7919U);
  return static_cast<float>((mixed ^ mixed >> 15) % 1021) * 0.001f - 0.51f;
}

// The client's own work on memory that the engine computes on.
class Hands {
 public:
  virtual ~Hands() = default;
  virtual void look(ConstArray values, std::size_t bytes) = 0;  // adds the bytes to what was seen
  // A gradient that is a copy of the values.
  virtual ConstArray copy_of(ConstArray values, std::size_t bytes) = 0;
  virtual ConstArray noise_of(ParameterId parameter, std::size_t n) = 0;  // in f32
  virtual ConstArray nan(std::size_t n) = 0;                              // in f32
  virtual void overwrite(ConstArray values, std::size_t bytes) = 0;       // where they lie
  virtual Array room(std::size_t bytes, Dtype type) = 0;
  virtual std::vector<std::byte> seen() = 0;
};

class HandsOnCpu final : public Hands {
 public:
  void look(ConstArray values, std::size_t bytes) override {
    const auto* const begin = static_cast<const std::byte*>(values.data);
    seen_.insert(seen_.end(), begin, begin + bytes);
  }
  ConstArray copy_of(ConstArray values, std::size_t bytes) override {
    copy_.resize(bytes);
    std::memcpy(copy_.data(), values.data, bytes);
    return {copy_.data(), values.type};
  }
  ConstArray noise_of(ParameterId parameter, std::size_t n) override {
    noise_.resize(n);
    for (std::size_t i = 0; i < n; ++i) noise_[i] = noise(parameter, i, round_);
    ++round_;
    return {noise_.data(), Dtype::kF32};
  }
  ConstArray nan(std::size_t n) override {
    noise_.assign(n, std::numeric_limits<float>::quiet_NaN());
    return {noise_.data(), Dtype::kF32};
  }
  void overwrite(ConstArray values, std::size_t bytes) override {
    std::memset(const_cast<void*>(values.data), 0x3c, std::min<std::size_t>(bytes, 4096));
  }
  Array room(std::size_t bytes, Dtype type) override {
    room_.resize(bytes);
    return {room_.data(), type};
  }
  std::vector<std::byte> seen() override { return seen_; }

 private:
  std::vector<std::byte> seen_, copy_, room_;
  std::vector<float> noise_;
  std::size_t round_ = 0;
};

// It queues all of it on one stream, and waits for nothing.
class HandsOnGpu final : public Hands {
 public:
  HandsOnGpu(Device& device, CUstream_st* stream, std::size_t bytes_seen, std::size_t most_bytes)
      : device_(device),
        stream_(stream),
        memory_(ledger_, device, allocator::Purpose::kWorkspace, 2 * most_bytes),
        host_(device, bytes_seen),
        most_bytes_(most_bytes) {}
  ~HandsOnGpu() override {
    at_the_end([&] { device_.synchronize(stream_); });
  }
  void look(ConstArray values, std::size_t bytes) override {
    device_.copy_out(stream_, host_.data() + seen_, reinterpret_cast<DeviceAddress>(values.data), bytes);
    seen_ += bytes;
  }
  ConstArray copy_of(ConstArray values, std::size_t bytes) override {
    device_.copy(stream_, memory_.address(), reinterpret_cast<DeviceAddress>(values.data), bytes);
    return {reinterpret_cast<const void*>(memory_.address()), values.type};
  }
  ConstArray noise_of(ParameterId parameter, std::size_t n) override {
    noises_.push_back(std::make_unique<HostMemory>(device_, n * sizeof(float)));
    auto* const values = reinterpret_cast<float*>(noises_.back()->data());
    for (std::size_t i = 0; i < n; ++i) values[i] = noise(parameter, i, round_);
    ++round_;
    const DeviceAddress to = memory_.address() + most_bytes_;
    device_.copy_in(stream_, to, noises_.back()->data(), n * sizeof(float));
    return {reinterpret_cast<const void*>(to), Dtype::kF32};
  }
  ConstArray nan(std::size_t n) override {
    const DeviceAddress to = memory_.address() + most_bytes_;
    device_.fill(stream_, to, std::byte{0xff}, n * sizeof(float));
    return {reinterpret_cast<const void*>(to), Dtype::kF32};
  }
  void overwrite(ConstArray values, std::size_t bytes) override {
    device_.fill(stream_, reinterpret_cast<DeviceAddress>(values.data), std::byte{0x3c},
                 std::min<std::size_t>(bytes, 4096));
  }
  Array room(std::size_t /*bytes*/, Dtype type) override {
    return {reinterpret_cast<void*>(memory_.address()), type};
  }
  std::vector<std::byte> seen() override {
    device_.synchronize(stream_);
    return {host_.data(), host_.data() + seen_};
  }

 private:
  Device& device_;
  CUstream_st* stream_;
  allocator::Ledger ledger_;
  allocator::DeviceRegion memory_;
  HostMemory host_;
  std::vector<std::unique_ptr<HostMemory>> noises_;
  std::size_t most_bytes_, seen_ = 0, round_ = 0;
};

}  // namespace sluice::engine::twins
