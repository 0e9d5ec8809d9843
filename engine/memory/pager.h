#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <vector>

#include "allocator/ledger.h"
#include "allocator/memory.h"
#include "core/transfers.h"
#include "engine/memory/backing.h"
#include "engine/memory/device_work.h"
#include "engine/memory/homes.h"
#include "engine/memory/leavers.h"
#include "engine/memory/next_uses.h"
#include "engine/memory/waits.h"

namespace sluice::engine {

// Virtual memory that knows the future. Holdings that are not resident share the frames: each is brought in
// ahead of its next use in the schedule, and the one whose next use is furthest away makes room; on a GPU
// what is in those frames that are its own. Changed contents are written only when the next accesses need
// room: contents that are given up before are never written, and contents that are used at once do not wait
// for their own write. Thread rule: one thread.
class Pager {
 public:
  enum class Use : std::uint8_t {
    kRead,    // the caller only reads the contents
    kModify,  // the caller will change the contents; waits for a write that is under way
  };

  // gpu: null where the CPU computes; else the memory is the GPU's, and transfers are as its backings say.
  // All arguments outlive it.
  Pager(allocator::Ledger& ledger, Backings& backings, Waits& waits, DeviceWork* gpu = nullptr);
  ~Pager();
  Pager(const Pager&) = delete;
  Pager& operator=(const Pager&) = delete;

  // REQUIRES: before start(), and before Backings::allocate().
  HoldingId define(const HoldingSpec& spec);
  // What `holding` has after its last access in a cycle is used when the next cycle accesses `next`.
  void follow(HoldingId holding, HoldingId next) { uses_.follow(holding, next); }
  // Takes all memory. REQUIRES: after Backings::allocate().
  void start(std::size_t extent_bytes, std::size_t extents);
  // Sets the cycle of accesses, each with the holdings that it needs. prefetch(n) begins to fetch for the n
  // accesses after the position what needs no waiting and takes no frame from an earlier access, and begins
  // to write what is in the way of these accesses and of two more. held: by access, what is held meanwhile,
  // from an earlier access on, as far as that is known; a GPU's frames are assigned by it.
  void set_schedule(std::vector<std::vector<HoldingId>> accesses,
                    const std::vector<std::vector<HoldingId>>& held = {});
  void set_position(std::size_t position);
  void prefetch(std::size_t accesses);
  // For reads outside of the schedule; takes no frames of what is used sooner.
  void prefetch_one(HoldingId holding);

  // Makes the holding present, and holds it until release(). Waits. Without contents its bytes are
  // unspecified.
  std::byte* acquire(HoldingId holding, Use use);
  // Does the same without waiting. Returns false where the holding is not present yet; its fetch has then
  // begun if there is room.
  bool try_acquire(HoldingId holding, Use use);
  void release(HoldingId holding);

  // States that the first `bytes` bytes are now the contents, and do not change before the next acquire for
  // kModify, so that they may be written. REQUIRES: no transfer of the holding is under way.
  void written(HoldingId holding, std::size_t bytes);
  // Parks the holding: an update will read its contents, in memory or from the backing, and no access of the
  // schedule needs them. Until unpark() or discard() it is not fetched, and it counts as used when the
  // holding that it follows is used.
  void park(HoldingId holding);
  void unpark(HoldingId holding);
  // Puts an exposed holding under its address, for reading, or for writing too, until conceal() was called as
  // often. Waits for transfers. A GPU's is always there: what its client has queued between the two calls
  // comes after what it needs, and before what would disturb it. REQUIRES: it is held.
  void view(HoldingId holding, bool writable);
  void conceal(HoldingId holding, bool writable);
  // Takes the holding, whose contents are out of date, from its address even while a transfer would keep it
  // there. REQUIRES: it is not viewed.
  void hide(HoldingId holding);
  // Lets the server serve touches of exposed holdings from now on.
  void serve_touches(allocator::TouchServer& server) const { homes_->serve_touches(server); }
  // States that the backing has newer contents than the memory, or will have them when unpark() is called.
  // Until then it is not fetched. REQUIRES: it is not held.
  void outdate(HoldingId holding);
  // Where a GPU computes, and the CPU is about to change the contents. entrust() is for what is not resident:
  // the backing has the contents from now on, where the CPU finds them by Backing::for_cpu(), and until
  // unpark() or discard() it is not fetched. REQUIRES: it is not held. gpu_memory() is for what is resident,
  // or held: the GPU's memory as a backing. Its transfers end for the caller as HostRecords' do.
  void entrust(HoldingId holding);
  Backing& gpu_memory(HoldingId holding) { return homes_->as_backing(holding); }
  // Is called from time to time while the pager waits for a transfer.
  void meanwhile(std::function<void()> handler) { meanwhile_ = std::move(handler); }
  // Gives up the contents. REQUIRES: it is not held.
  void discard(HoldingId holding);
  // Gives up the contents, but keeps the frames, for a caller that will overwrite all. REQUIRES: it is not
  // held.
  void forget(HoldingId holding);

  // Another plan. What will no longer be resident gets a backing first, and frames are taken before what will
  // be resident. The memory of what is no longer resident becomes frames of the pool, in which the contents
  // stay until another holding needs them; one that is not exposed loses its contents. REQUIRES: nothing is
  // held, and no transfer is under way. define_backing() returns false where there is a backing, or none is
  // needed. REQUIRES: before Backings::allocate().
  bool define_backing(HoldingId holding, allocator::Tier tier);
  void forget_backing(HoldingId holding);  // drops a backing that could not be allocated
  void set_tier(HoldingId holding, allocator::Tier tier);
  // The number includes those of resident holdings; writes what is in the way.
  void set_extents(std::size_t extents);

  // The end. drop_unexposed() gives back the memory of holdings that are not exposed, and drops their
  // contents.
  void drop_unexposed();
  // An exposed holding leaves for good. Ordinary memory with its contents is then under its address, or
  // nothing. Frames that the remaining holdings do not need are given back. REQUIRES: it is not held;
  // with_contents: it has contents. Without contents nothing but a defect throws.
  allocator::FormerHome leave(HoldingId holding, bool with_contents);
  Leaving leaving() const { return homes_->leaving(); }

  std::size_t bytes(HoldingId holding) const { return homes_->spec(holding).bytes; }
  std::size_t backing_bytes(HoldingId holding) const { return homes_->spec(holding).backing_bytes(); }
  bool resident(HoldingId holding) const { return homes_->resident(holding); }
  bool stored(HoldingId holding) const { return homes_->spec(holding).stored; }  // whether it has a backing
  bool present(HoldingId holding) const;                                         // readable now without I/O
  bool held(HoldingId holding) const;
  std::byte* data(HoldingId holding) const { return homes_->data(holding); }
  // Where a client sees the contents, for the pager's whole life.
  std::byte* address(HoldingId holding) const { return homes_->address(holding); }
  Backing& backing(HoldingId holding) const;  // REQUIRES: not resident

  // Called when nothing can be evicted and no transfer is under way: completes something that holds frames,
  // or returns false.
  void on_stall(std::function<bool()> handler) { on_stall_ = std::move(handler); }
  // Notices transfers that have ended; throws their errors.
  void poll();
  void wait_all();

 private:
  struct Holding;
  // A holding is to get the frames that are its own. kClear: they are free; kStays: what is there leaves
  // later, or is used sooner, and is not forced away; kHeld: it is held.
  enum class Way : std::uint8_t { kClear, kStays, kHeld };
  Way clear_way(const Holding& wanted, bool forced);
  bool update_gives_way(const Holding& wanted);
  void write_in_the_way(const std::set<HoldingId>& wanted, NextUses::Time nearest);
  void list(Holding& holding);
  void set_parked(Holding& holding, bool parked);
  bool make_room(const Holding& wanted, bool forced);
  void write_behind(std::size_t accesses);
  void write_out(std::size_t extents, NextUses::Time nearest, bool forced);
  std::size_t leaving_extents(std::size_t wanted, NextUses::Time nearest) const;
  Holding* furthest(bool unwritten);
  void evict(Holding& victim);
  void begin_transfer(Holding& holding, bool write);
  void fetch_ahead(std::size_t accesses);
  bool begin_fetch(Holding& holding, bool forced);
  bool ready(const Holding& holding, Use use) const;
  void settle(Holding& holding);
  void wait_for_one();
  void arrange(Holding& holding);

  Backings& backings_;
  Waits& waits_;
  std::unique_ptr<Homes> homes_;
  std::vector<std::unique_ptr<Holding>> holdings_;
  NextUses uses_;
  Leavers leavers_;
  std::set<HoldingId> moving_;  // holdings of which a transfer is under way
  std::function<bool()> on_stall_;
  std::function<void()> meanwhile_;
};

}  // namespace sluice::engine
