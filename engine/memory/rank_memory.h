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

// Registered host memory of each rank that all ranks of one host can read, so that its contents need not be
// sent. It is an anonymous memory file, of which nothing remains in any file system. Each rank charges only
// its own to its ledger. Thread rule: share() first, then any thread.
class RankMemory {
 public:
  RankMemory() = default;
  // Takes `bytes` of memory, which may differ between ranks. may_share: all ranks are on one host. The device
  // outlives it.
  RankMemory(allocator::Ledger& ledger, Device& device, allocator::Purpose purpose, std::size_t bytes,
             bool may_share);

  std::byte* data() const { return memory_.data(); }
  // Collective: maps the memory of all ranks on each; with_gpus: each rank's GPU can copy from it, too. If
  // this fails on one rank, no rank shares, and the log of rank 0 says why. name: of the contents, for
  // messages.
  void share(Ranks& ranks, const std::string& name, bool with_gpus);
  bool is_shared() const { return !of_ranks_.empty(); }
  // The start of a rank's memory. REQUIRES: is_shared().
  const std::byte* of(int rank) const { return of_ranks_[static_cast<std::size_t>(rank)].data; }
  // A rank's memory at the same offset as this pointer into data(). REQUIRES: is_shared().
  const std::byte* of(int rank, const std::byte* own) const { return of(rank) + (own - data()); }

 private:
  struct OfRank {
    const std::byte* data = nullptr;
    allocator::OthersMemory memory = {};  // the mapping, unless it is this rank's own
    Registration registered = {};         // ends before the memory
  };
  OfRank open(const Json& place, bool with_gpu) const;

  Device* device_ = nullptr;
  RegisteredRegion memory_;
  std::size_t bytes_ = 0;
  Descriptor file_;               // the memory file, until share()
  std::string problem_;           // why the memory cannot be shared
  std::vector<OfRank> of_ranks_;  // by rank
};

}  // namespace sluice::engine
