#pragma once
#include <span>
#include <string>
#include <vector>

#include "allocator/device_memory.h"
#include "allocator/ledger.h"
#include "comm/communicator.h"
#include "core/device.h"

namespace sluice::engine {

// Memory of each rank's GPU that the GPUs of all ranks of one host read where it is: by NVLink, or by PCIe
// where the system lets them. Each rank's is in its own ledger alone. Thread rule: share() first, then any
// thread.
class PeerMemory {
 public:
  PeerMemory() = default;
  // Takes so many bytes, which may be others on other ranks, but not 0. The device outlives it. What others
  // read of it stays where it ends.
  PeerMemory(allocator::Ledger& ledger, Device& device, allocator::Purpose purpose, std::size_t bytes);

  std::byte* data() const { return reinterpret_cast<std::byte*>(memory_.address()); }
  std::size_t size() const { return memory_.size(); }
  // Collective: lets each one's GPU read the memory of all. Returns why one of them cannot, the same on all
  // ranks, or nothing. name: of what is there, for messages.
  std::string share(comm::Communicator& communicator, const std::string& name);
  // Tells a user of that, where the plan was made for GPUs that meet.
  static std::string refusal(const std::string& problem);
  bool is_shared() const { return !of_ranks_.empty(); }
  // Where that rank's begins, as this one's GPU sees it. REQUIRES, for all below: is_shared().
  const std::byte* of(int rank) const { return memory_of(rank).data(); }
  std::span<const std::byte> memory_of(int rank) const { return of_ranks_[static_cast<std::size_t>(rank)]; }
  // What that rank has at the same offset as this pointer of data().
  const std::byte* of(int rank, const std::byte* own) const { return of(rank) + (own - data()); }

 private:
  Device* device_ = nullptr;
  allocator::DeviceRegion memory_;
  std::vector<allocator::OthersDeviceRegion> others_;
  std::vector<std::span<const std::byte>> of_ranks_;
};

}  // namespace sluice::engine
