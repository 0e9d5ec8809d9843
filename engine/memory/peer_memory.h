#pragma once
#include <span>
#include <string>
#include <vector>

#include "allocator/device_memory.h"
#include "allocator/ledger.h"
#include "comm/communicator.h"
#include "core/device.h"

namespace sluice::engine {

// GPU memory of each rank that the GPUs of all ranks of one host read directly, by NVLink, or by PCIe where
// the system allows it. Each rank charges only its own to its ledger. Thread rule: share() first, then any
// thread.
class PeerMemory {
 public:
  PeerMemory() = default;
  // Takes `bytes` of memory, more than 0, which may differ between ranks. The device outlives it. A mapping
  // of it by another rank keeps the memory after this object ends. may_share: whether share() will be called.
  PeerMemory(allocator::Ledger& ledger, Device& device, allocator::Purpose purpose, std::size_t bytes,
             bool may_share = true);

  std::byte* data() const { return reinterpret_cast<std::byte*>(memory_.address()); }
  std::size_t size() const { return memory_.size(); }
  // Collective: maps the memory of all ranks for each rank's GPU. Returns why this failed on some rank, the
  // same text on all ranks, or an empty string. name: of the contents, for messages.
  std::string share(comm::Communicator& communicator, const std::string& name);
  // The message for a user whose plan was made for GPUs that read each other's memory.
  static std::string refusal(const std::string& problem);
  bool is_shared() const { return !of_ranks_.empty(); }
  // The start of a rank's memory, as an address of this rank's GPU. REQUIRES, for all below: is_shared().
  const std::byte* of(int rank) const { return memory_of(rank).data(); }
  std::span<const std::byte> memory_of(int rank) const { return of_ranks_[static_cast<std::size_t>(rank)]; }
  // A rank's memory at the same offset as this pointer into data().
  const std::byte* of(int rank, const std::byte* own) const { return of(rank) + (own - data()); }

 private:
  Device* device_ = nullptr;
  allocator::DeviceRegion memory_;
  std::vector<allocator::OthersDeviceRegion> others_;
  std::vector<std::span<const std::byte>> of_ranks_;
};

}  // namespace sluice::engine
