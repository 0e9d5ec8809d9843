#pragma once
#include <array>
#include <memory>
#include <vector>

#include "allocator/memory.h"
#include "engine/memory/backing.h"
#include "engine/memory/device_work.h"

namespace sluice::engine {

// Host memory that is registered with a GPU.
class RegisteredRegion {
 public:
  RegisteredRegion() = default;
  RegisteredRegion(allocator::Ledger& ledger, Device& device, allocator::Purpose purpose, std::size_t bytes)
      : RegisteredRegion(allocator::Region(ledger, purpose, bytes), device) {}
  RegisteredRegion(allocator::Region memory, Device& device);
  std::byte* data() const { return memory_.data(); }

 private:
  struct Unregister {
    Device* device;
    void operator()(std::byte* memory) const;
  };
  allocator::Region memory_;
  std::unique_ptr<std::byte, Unregister> registered_;  // ends before the memory
};

// What a GPU computes with, while it is in the host's memory. A transfer is a copy that is queued, and has
// ended for the caller as soon as it is: who uses the bytes waits on a stream (DeviceWork). All memory of one
// purpose is taken and registered at once. Thread rule: as DeviceWork.
class HostRecords {
 public:
  HostRecords(allocator::Ledger& ledger, DeviceWork& work) : ledger_(ledger), work_(work) {}
  std::unique_ptr<Backing> make(const BackingSpec& spec);
  void allocate();  // takes the memory of all that was made

 private:
  class Record;
  struct Place {
    allocator::Purpose purpose;
    std::size_t offset, bytes, block_bytes;
  };
  allocator::Ledger& ledger_;
  DeviceWork& work_;
  std::vector<Place> places_;
  std::array<std::size_t, allocator::kPurposes> bytes_ = {};
  std::array<RegisteredRegion, allocator::kPurposes> memory_;
};

}  // namespace sluice::engine
