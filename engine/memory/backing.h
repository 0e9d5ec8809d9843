#pragma once
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "allocator/ledger.h"
#include "core/threads.h"
#include "engine/layout/layout.h"
#include "engine/layout/tier.h"
#include "offload/records.h"

namespace sluice::engine {

// Holds the contents of a holding while they are not in the memory that is computed on: a record on disk, the
// shards of all ranks, or, for a GPU, host memory. Offsets, sizes, errors and thread rule are those of
// offload::RecordStore: transfers of the same bytes must not overlap in time, and `done` is called once, on
// any thread.
class Backing {
 public:
  virtual ~Backing() = default;
  virtual void fetch(std::uint64_t offset, std::span<std::byte> into, Done done) = 0;
  virtual void store(std::uint64_t offset, std::span<const std::byte> from, Done done) = 0;
  // Transfers have sizes that are multiples of the grain, in bytes, unless they reach to the end.
  virtual std::size_t grain() const { return offload::RecordStore::kBlock; }

  // For updates, whose threads are otherwise idle: these compute the checksums. On disk, such reads are less
  // urgent than those of fetch(). The caller may use what fetch_unchecked() brought only after check(), which
  // throws where the checksum differs from that of what was stored.
  virtual void fetch_unchecked(std::uint64_t offset, std::span<std::byte> into, Done done) = 0;
  virtual void check(std::uint64_t offset, std::span<const std::byte> found, Threads& threads) = 0;
  virtual void store(std::uint64_t offset, std::span<const std::byte> from, Threads& threads, Done done) = 0;

  // Gives the CPU access to the contents that a GPU computes with, since fetch() brings them to the GPU's
  // memory: by their address in host memory, or by another backing of the same bytes. Both are null where the
  // CPU computes.
  struct ForCpu {
    std::byte* data = nullptr;
    Backing* backing = nullptr;
  };
  virtual ForCpu for_cpu() { return {}; }
};

// A backing whose bytes the caller does not see, since they are in GPU memory; what needs verifying is
// verified during the transfer.
class CheckedBacking : public Backing {
 public:
  using Backing::store;
  void fetch_unchecked(std::uint64_t offset, std::span<std::byte> into, Done done) final {
    fetch(offset, into, std::move(done));
  }
  void check(std::uint64_t /*offset*/, std::span<const std::byte> /*found*/, Threads& /*threads*/) final {}
  void store(std::uint64_t offset, std::span<const std::byte> from, Threads& /*threads*/, Done done) final {
    store(offset, from, std::move(done));
  }
};

// Runs queue(), which queues a transfer on a GPU's stream, and calls `done` at once, with the error of
// queue() if it threw. The caller orders later uses of the bytes by streams (DeviceWork).
template <class Queue>
void end_queued(const Done& done, const Queue& queue) {
  std::exception_ptr error;
  try {
    queue();
  } catch (...) {
    error = std::current_exception();
  }
  done(error);
}

struct BackingSpec {
  allocator::Tier tier = allocator::Tier::kDisk;  // never the tier that is computed on
  std::string name;                               // appears in messages
  std::uint64_t bytes = 0;                        // a multiple of kDiskBlock
  allocator::Purpose purpose = allocator::Purpose::kParameter;
  std::size_t block_bytes = offload::RecordStore::kBlock;
  UnitId unit = 0;       // for parameters on the tier kRanks
  bool for_cpu = false;  // only the CPU uses it, even where a GPU computes with the rest
};

class DeviceDisk;
class DeviceShards;
class HostRecords;
class ParameterShards;

// Makes backings; a new tier is a new case of make(). Thread rule: one thread, while nothing is transferred.
class Backings {
 public:
  virtual ~Backings() = default;
  virtual std::unique_ptr<Backing> make(const BackingSpec& spec) = 0;
  // Reserves the space of all backings that have none yet. Throws Error(kBudget) where too little is left;
  // these backings must then be destroyed.
  virtual void allocate() = 0;
};

std::unique_ptr<Backing> make_disk_record(offload::RecordStore& disk, const BackingSpec& spec);

// The backings of an engine. All arguments outlive them. disk: null where the plan puts nothing on disk;
// shards: null where it partitions no parameters; host: null where the CPU computes; gpu_disk, gpu_shards:
// replace `disk` and `shards` on a GPU, where the plan puts something there.
std::unique_ptr<Backings> make_backings(offload::RecordStore* disk, ParameterShards* shards = nullptr,
                                        HostRecords* host = nullptr, DeviceDisk* gpu_disk = nullptr,
                                        DeviceShards* gpu_shards = nullptr);

}  // namespace sluice::engine
