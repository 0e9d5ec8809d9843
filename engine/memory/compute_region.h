#pragma once
#include <cstddef>

#include "allocator/device_memory.h"
#include "allocator/ledger.h"
#include "allocator/memory.h"
#include "engine/memory/device_work.h"

namespace sluice::engine {

// A buffer on the tier that is computed on: host memory, or a GPU's memory, which the CPU cannot address.
class ComputeRegion {
 public:
  ComputeRegion() = default;
  // gpu: null where the CPU computes. The other arguments are those of allocator::Region and DeviceRegion.
  ComputeRegion(allocator::Ledger& ledger, DeviceWork* gpu, allocator::Purpose purpose, std::size_t bytes,
                std::size_t capacity = 0) {
    if (gpu == nullptr)
      host_ = allocator::Region(ledger, purpose, bytes, capacity);
    else
      device_ = allocator::DeviceRegion(ledger, gpu->device(), purpose, bytes);
  }
  std::byte* data() const {
    return device_.size() > 0 ? reinterpret_cast<std::byte*>(device_.address()) : host_.data();
  }
  std::size_t size() const { return host_.size() + device_.size(); }
  void resize(std::size_t bytes) { host_.resize(bytes); }  // REQUIRES: the CPU computes

 private:
  allocator::Region host_;  // one of the two is empty
  allocator::DeviceRegion device_;
};

}  // namespace sluice::engine
