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

// Demand paging with a known future. Holdings that are not resident share the frames. Each is fetched ahead
// of its next use in the schedule; the one whose next use is furthest away is evicted (on a GPU: the one in
// the frames that are wanted). A dirty holding is written back only when the next accesses need its frames:
// contents that are discarded before are never written, and contents that are used at once do not wait for
// their own write. Thread rule: one thread.
class Pager {
 public:
  enum class Use : std::uint8_t {
    kRead,    // the caller only reads the contents
    kModify,  // the caller will change the contents; waits for a write-back that is in flight
  };

  // gpu: null where the CPU computes; else the memory is the GPU's, and transfers are those of its backings.
  // All arguments outlive it.
  Pager(allocator::Ledger& ledger, Backings& backings, Waits& waits, DeviceWork* gpu = nullptr);
  ~Pager();
  Pager(const Pager&) = delete;
  Pager& operator=(const Pager&) = delete;

  // REQUIRES: before start(), and before Backings::allocate().
  HoldingId define(const HoldingSpec& spec);
  // After its last access in a cycle, `holding` counts as used next when the next cycle accesses `next`.
  void follow(HoldingId holding, HoldingId next) { uses_.follow(holding, next); }
  // Takes all memory. REQUIRES: after Backings::allocate().
  void start(std::size_t extent_bytes, std::size_t extents);
  // Sets the cycle of accesses, each with the holdings that it needs. prefetch(n) begins fetches for the n
  // accesses after the position, as far as these need no waiting and evict nothing that is used sooner, and
  // begins write-backs of what occupies frames that these accesses and two more will need. held: by access,
  // the holdings that are held meanwhile since an earlier access, as far as known; a GPU's frames are
  // assigned by it.
  void set_schedule(std::vector<std::vector<HoldingId>> accesses,
                    const std::vector<std::vector<HoldingId>>& held = {});
  void set_position(std::size_t position);
  void prefetch(std::size_t accesses);
  // For a read outside of the schedule; evicts nothing that is used sooner.
  void prefetch_one(HoldingId holding);

  // Makes the holding present, and pins it until release(). Waits. A holding without contents has unspecified
  // bytes.
  std::byte* acquire(HoldingId holding, Use use);
  // Does the same without waiting. Returns false where the holding is not present yet; its fetch has then
  // begun if frames could be had.
  bool try_acquire(HoldingId holding, Use use);
  void release(HoldingId holding);

  // States that the first `bytes` bytes are the contents and do not change before the next acquire for
  // kModify, so that the pager may write them back. REQUIRES: no transfer of the holding is in flight.
  void written(HoldingId holding, std::size_t bytes);
  // Parks the holding: an update will read its contents, from memory or the backing, and no access of the
  // schedule needs them. Until unpark() or discard() it is not fetched, and it counts as used when the
  // holding that it follows is used.
  void park(HoldingId holding);
  void unpark(HoldingId holding);
  // Makes an exposed holding accessible at its address, for reading, or also for writing, until conceal() was
  // called as often. Waits for transfers. On a GPU it is always accessible: work that the client queues
  // between the two calls runs after the transfers that it needs, and before those that would disturb it.
  // REQUIRES: the holding is held.
  void view(HoldingId holding, bool writable);
  void conceal(HoldingId holding, bool writable);
  // Ends the access to a holding whose contents are out of date, even where a transfer still keeps it at its
  // address. REQUIRES: it is not viewed.
  void hide(HoldingId holding);
  // From now on the server serves page faults of exposed holdings.
  void serve_touches(allocator::TouchServer& server) const { homes_->serve_touches(server); }
  // States that the backing has newer contents than memory, or will have them by unpark(). Until then the
  // holding is not fetched. REQUIRES: it is not held.
  void outdate(HoldingId holding);
  // For contents that a GPU computes with and the CPU is about to change. entrust(), for a holding that is
  // not resident: moves the contents to the backing, where the CPU finds them by Backing::for_cpu(); the
  // holding is not fetched until unpark() or discard(). REQUIRES: it is not held. gpu_memory(), for one that
  // is resident or held: its GPU memory as a backing, whose transfers complete for the caller as HostRecords'
  // do.
  void entrust(HoldingId holding);
  Backing& gpu_memory(HoldingId holding) { return homes_->as_backing(holding); }
  // Sets a handler that is called from time to time while the pager waits for a transfer.
  void meanwhile(std::function<void()> handler) { meanwhile_ = std::move(handler); }
  // Drops the contents and frees the frames. REQUIRES: it is not held.
  void discard(HoldingId holding);
  // Drops the contents but keeps the frames, for a caller that will overwrite all. REQUIRES: it is not held.
  void forget(HoldingId holding);

  // A change of plan. Order: a holding that ceases to be resident gets a backing, then frames are taken, then
  // holdings become resident. The memory of a holding that ceases to be resident joins the pool as frames, in
  // which the contents stay until another holding needs them; an unexposed holding loses its contents.
  // REQUIRES: nothing is held, and no transfer is in flight. define_backing() returns false where a backing
  // exists or none is needed. REQUIRES: before Backings::allocate().
  bool define_backing(HoldingId holding, allocator::Tier tier);
  void forget_backing(HoldingId holding);  // drops a backing that could not be allocated
  void set_tier(HoldingId holding, allocator::Tier tier);
  // `extents` includes the frames of resident holdings. Evicts, with write-back where needed, to free surplus
  // frames.
  void set_extents(std::size_t extents);

  // Shutdown. drop_unexposed() drops the contents of unexposed holdings and gives back their memory.
  void drop_unexposed();
  // An exposed holding leaves for good. Its address range is then ordinary memory with its contents, or has
  // no memory. Frames that the remaining holdings do not need are given back. REQUIRES: it is not held;
  // with_contents: it has contents. Without contents the call throws only where there is a defect.
  allocator::FormerHome leave(HoldingId holding, bool with_contents);
  Leaving leaving() const { return homes_->leaving(); }

  std::size_t bytes(HoldingId holding) const { return homes_->spec(holding).bytes; }
  std::size_t backing_bytes(HoldingId holding) const { return homes_->spec(holding).backing_bytes(); }
  bool resident(HoldingId holding) const { return homes_->resident(holding); }
  bool stored(HoldingId holding) const { return homes_->spec(holding).stored; }  // whether it has a backing
  bool present(HoldingId holding) const;                                         // readable now without I/O
  bool held(HoldingId holding) const;
  std::byte* data(HoldingId holding) const { return homes_->data(holding); }
  // The client's address of the contents, constant for the pager's whole life.
  std::byte* address(HoldingId holding) const { return homes_->address(holding); }
  Backing& backing(HoldingId holding) const;  // REQUIRES: not resident

  // The handler is called when only pins keep a wanted holding from its frames: it completes something that
  // holds frames, or returns false.
  void on_stall(std::function<bool()> handler) { on_stall_ = std::move(handler); }
  // Notices transfers that have completed; throws their errors.
  void poll();
  void wait_all();

 private:
  struct Holding;
  // Whether a holding can get the frames assigned to it. kClear: they are free; kStays: their holding leaves
  // later, or is used sooner and not evicted without force; kHeld: their holding is pinned.
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
  std::set<HoldingId> moving_;  // holdings with a transfer in flight
  std::function<bool()> on_stall_;
  std::function<void()> meanwhile_;
};

}  // namespace sluice::engine
