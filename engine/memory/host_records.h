#pragma once
#include <array>
#include <memory>
#include <utility>
#include <vector>

#include "allocator/memory.h"
#include "engine/memory/backing.h"
#include "engine/memory/device_work.h"

namespace sluice::engine {

// Registers (pins) host memory with a GPU, if there is any, while this object lives.
class Registration {
 public:
  Registration() = default;
  Registration(Device& device, std::byte* memory, std::size_t bytes);

 private:
  struct Unregister {
    Device* device;
    void operator()(std::byte* memory) const;
  };
  std::unique_ptr<std::byte, Unregister> registered_;
};

// Host memory that is registered with a GPU.
class RegisteredRegion {
 public:
  RegisteredRegion() = default;
  RegisteredRegion(allocator::Ledger& ledger, Device& device, allocator::Purpose purpose, std::size_t bytes)
      : RegisteredRegion(allocator::Region(ledger, purpose, bytes), device) {}
  RegisteredRegion(allocator::Region memory, Device& device)
      : memory_(std::move(memory)), registered_(device, memory_.data(), memory_.size()) {}
  std::byte* data() const { return memory_.data(); }

 private:
  allocator::Region memory_;
  Registration registered_;  // ends before the memory
};

// Host memory for what a GPU computes with, while it is not in GPU memory. A transfer is a queued copy, and
// completes for the caller as soon as it is queued: later users of the bytes wait on a stream (DeviceWork).
// All memory of one purpose is taken and registered at once. Thread rule: as DeviceWork.
class HostRecords {
 public:
  HostRecords(allocator::Ledger& ledger, DeviceWork& work) : ledger_(ledger), work_(work) {}
  std::unique_ptr<Backing> make(const BackingSpec& spec);
  void allocate();  // takes the memory of all records made so far

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
