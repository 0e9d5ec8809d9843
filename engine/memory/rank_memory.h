#pragma once
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "allocator/ledger.h"
#include "engine/memory/host_records.h"
#include "engine/ranks/ranks.h"

namespace sluice::engine {

// Host memory of each rank that is registered with its GPU, and that all ranks of one host read: what one has
// copied there the others need not be sent. It has no name in any file system, so that nothing is left of it.
// Thread rule: any thread.
class RankMemory {
 public:
  RankMemory() = default;
  // Takes so many bytes, the same on all ranks, which all come here. Where ranks are on several hosts, or one
  // of them cannot open another one's memory, each has its own alone.
  RankMemory(allocator::Ledger& ledger, Device& device, allocator::Purpose purpose, std::size_t bytes,
             Ranks& ranks, const std::string& name);

  std::byte* data() const { return memory_.data(); }
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
  static std::vector<Mapped> shared(std::span<std::byte> own, Ranks& ranks, const std::string& name);

  RegisteredRegion memory_;
  std::vector<Mapped> mapped_;  // by rank
};

}  // namespace sluice::engine
