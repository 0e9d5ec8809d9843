#pragma once
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <string>

#include "allocator/ledger.h"
#include "comm/communicator.h"
#include "core/serial_queue.h"
#include "engine/layout/shards.h"
#include "engine/memory/device_work.h"
#include "engine/memory/peer_memory.h"
#include "engine/memory/pieces.h"

namespace sluice::engine {

// For who reads shards of an engine that is destroyed.
std::exception_ptr shards_are_gone();

// This rank's shards of parameters in host memory, which its GPU brings over its own link into a few places
// of its memory (Pieces). From there the GPUs of all ranks of one host copy them. A rank borrows the place of
// a part of a shard, and gives it back when its GPU has copied that. Thread rule: start() and share() come
// first; then any thread.
class PassedShards {
 public:
  static constexpr std::size_t kMostBytes = std::size_t{32} << 20;  // of a place
  // The places of a rank: as many as the shards of a few of the largest units take. So ranks that are ahead
  // of others by a unit, and look ahead, have brought what these need.
  struct Need {
    std::size_t places = 0;
    std::size_t bytes = 0;  // of each, on all ranks alike
  };
  // For that unit, whose shards of all ranks are known.
  static Need need_of(const Layout& layout, const Shards& all, UnitId unit, int rank, int ranks);

  // Where a rank has its own shard of a unit.
  using Source = std::function<std::span<const std::byte>(UnitId unit)>;
  PassedShards(const Need& need, int ranks, Source source);
  ~PassedShards() = default;  // REQUIRES: end() was called, where something was lent
  PassedShards(const PassedShards&) = delete;
  PassedShards& operator=(const PassedShards&) = delete;

  // Takes the places. The GPU knows the memory of the shards already. Both arguments outlive it.
  void start(allocator::Ledger& ledger, DeviceWork& gpu);
  // Collective. Throws Error(kIo) where GPUs do not read each other's memory.
  void share(comm::Communicator& communicator, const std::string& name);

  // Lends the place of so many bytes of this rank's shard; `offset` is a multiple of kMostBytes, and they are
  // as many, or the rest. REQUIRES: the shard is that version, and stays so until the place is lent.
  void lend(UnitId unit, std::uint64_t version, std::size_t offset, std::size_t bytes, Pieces::Use use);

  // What another rank that borrows is told: where the place begins in this rank's memory, and by which number
  // it is given back.
  struct Loan {
    std::uint64_t offset = 0, number = 0;
  };
  void lend_to_other(UnitId unit, std::uint64_t version, std::size_t offset, comm::Answer answer);
  void give_back(std::uint64_t number);
  // Lends nothing more: whoever waits for a place gets an error. Waits until all is given back, as it is by
  // ranks that go on; has_failed: whether some do not.
  void end(const std::function<bool()>& has_failed);
  // What that rank has lent, as this one's GPU sees it. REQUIRES: share() was called.
  const std::byte* of(int rank, const Loan& loan) const { return places_.of(rank) + loan.offset; }

 private:
  bool note(Loan& loan, const Done& used);
  void bring(const Pieces::Key& key, std::byte* into, Done done);

  const Need need_;
  const Source source_;
  DeviceWork* gpu_ = nullptr;
  PeerMemory places_;

  std::mutex mutex_;  // guards what follows
  std::condition_variable returned_;
  std::map<std::uint64_t, Done> loans_;  // by number: what ends it
  std::uint64_t next_loan_ = 0;
  bool ends_ = false;

  // These end before what they use: the places wait until the queue has brought what was asked for.
  std::optional<SerialQueue> bringing_;
  Pieces pieces_;
};

}  // namespace sluice::engine
