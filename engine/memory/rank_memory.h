#pragma once
#include <string>
#include <vector>

#include "allocator/ledger.h"
#include "allocator/memory.h"
#include "core/descriptor.h"
#include "core/device.h"
#include "core/json.h"
#include "engine/memory/host_records.h"
#include "engine/ranks/ranks.h"

namespace sluice::engine {

// Host memory of each rank that is registered with its GPU, and that all ranks of one host can read: what one
// has there the others need not be sent. It has no name in any file system, so that nothing is left of it.
// Each rank's is in its own ledger alone. Thread rule: share() first, then any thread.
class RankMemory {
 public:
  RankMemory() = default;
  // Takes so many bytes, which may be others on other ranks. may_share: all ranks are on one host. The device
  // outlives it.
  RankMemory(allocator::Ledger& ledger, Device& device, allocator::Purpose purpose, std::size_t bytes,
             bool may_share);

  std::byte* data() const { return memory_.data(); }
  // Collective: lets all ranks read each other's; with_gpus: and each one's GPU copy from there. Where one of
  // them cannot do that with another one's, none does, and the log of rank 0 says why. name: of what is
  // there, for messages.
  void share(Ranks& ranks, const std::string& name, bool with_gpus);
  bool is_shared() const { return !of_ranks_.empty(); }
  // Where that rank's begins. REQUIRES: is_shared().
  const std::byte* of(int rank) const { return of_ranks_[static_cast<std::size_t>(rank)].data; }
  // What that rank has at the same offset as this pointer of data(). REQUIRES: likewise.
  const std::byte* of(int rank, const std::byte* own) const { return of(rank) + (own - data()); }

 private:
  struct OfRank {
    const std::byte* data = nullptr;
    allocator::OthersMemory memory = {};  // that is there, unless it is this rank's own
    Registration registered = {};         // ends before the memory
  };
  OfRank open(const Json& place, bool with_gpu) const;

  Device* device_ = nullptr;
  RegisteredRegion memory_;
  std::size_t bytes_ = 0;
  Descriptor file_;               // of the memory, until it was shared
  std::string problem_;           // why it cannot be
  std::vector<OfRank> of_ranks_;  // by rank
};

}  // namespace sluice::engine
