#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "allocator/ledger.h"
#include "core/threads.h"
#include "engine/tier.h"
#include "offload/records.h"

namespace sluice::engine {

// Where contents are while they are not in the memory that is computed on: a record on disk. Offsets and
// sizes are those that a record allows (offload::RecordStore), and so are errors and the thread rule:
// transfers of the same bytes do not overlap in time, `done` is called once, on any thread.
class Backing {
 public:
  virtual ~Backing() = default;
  virtual void fetch(std::uint64_t offset, std::span<std::byte> into, offload::Done done) = 0;
  virtual void store(std::uint64_t offset, std::span<const std::byte> from, offload::Done done) = 0;

  // For a caller whose threads would wait meanwhile: they look after checksums. What was fetched so is
  // nobody's to use before check() has looked at it, which throws where it is not what was stored.
  virtual void fetch_unchecked(std::uint64_t offset, std::span<std::byte> into, offload::Done done) = 0;
  virtual void check(std::uint64_t offset, std::span<const std::byte> found, Threads& threads) = 0;
  virtual void store(std::uint64_t offset, std::span<const std::byte> from, Threads& threads,
                     offload::Done done) = 0;
};

struct BackingSpec {
  allocator::Tier tier = allocator::Tier::kDisk;  // never kComputeTier
  std::string name;                               // for messages
  std::uint64_t bytes = 0;                        // a multiple of kDiskBlock
  allocator::Purpose purpose = allocator::Purpose::kParameter;
  std::size_t block_bytes = offload::RecordStore::kBlock;
};

// Makes them: a tier more is a case more of make(). Thread rule: one thread, while nothing is transferred.
class Backings {
 public:
  virtual ~Backings() = default;
  virtual std::unique_ptr<Backing> make(const BackingSpec& spec) = 0;
  // Takes the space of all that were made and have none yet. Error(kBudget) where there is too little; those
  // are of no use then.
  virtual void allocate() = 0;
};

// Those of an engine. disk: null where the plan puts nothing there; else it outlives them.
std::unique_ptr<Backings> make_backings(offload::RecordStore* disk);

}  // namespace sluice::engine
