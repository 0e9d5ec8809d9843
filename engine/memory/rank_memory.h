#pragma once
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "allocator/ledger.h"
#include "core/descriptor.h"
#include "engine/memory/host_records.h"
#include "engine/ranks/ranks.h"

namespace sluice::engine {

// Host memory of each rank that is registered with its GPU, and that all ranks of one host can read: what one
// has copied there the others need not be sent. It has no name in any file system, so that nothing is left of
// it. Thread rule: share() first, then any thread.
class RankMemory {
 public:
  RankMemory() = default;
  // Takes so many bytes, the same on all ranks. may_share: all ranks are on one host.
  RankMemory(allocator::Ledger& ledger, Device& device, allocator::Purpose purpose, std::size_t bytes,
             bool may_share);

  std::byte* data() const { return memory_.data(); }
  // Collective: lets all ranks read each other's. Where one of them cannot open another one's, none reads.
  // name: of what is there, for messages.
  void share(Ranks& ranks, const std::string& name);
  bool is_shared() const { return !mapped_.empty(); }
  // What that rank has at the same offset as this pointer of data(). REQUIRES: is_shared().
  const std::byte* of(int rank, const std::byte* own) const {
    return mapped_[static_cast<std::size_t>(rank)].get() + (own - data());
  }

 private:
  struct Unmap {
    std::size_t bytes = 0;  // 0: it is this rank's own
    void operator()(const std::byte* data) const;
  };
  using Mapped = std::unique_ptr<const std::byte, Unmap>;

  RegisteredRegion memory_;
  std::size_t bytes_ = 0;
  Descriptor file_;             // of the memory, until it was shared
  std::string problem_;         // why it cannot be
  std::vector<Mapped> mapped_;  // by rank
};

}  // namespace sluice::engine
