#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "allocator/ledger.h"
#include "allocator/memory.h"
#include "core/bytes.h"
#include "engine/store/backing.h"
#include "engine/store/next_uses.h"
#include "engine/store/waits.h"

namespace sluice::engine {

// What is resident of a unit of these bytes shares huge pages with others of its kind, so that thousands of
// small units take little more than their bytes. They are not worth moving.
constexpr bool is_packed(std::size_t unit_bytes) { return unit_bytes <= kHugePage / 4; }
// What a holding takes there: an exposed one, whose address is its own, and another.
constexpr std::size_t packed_exposed_bytes(std::size_t bytes) {
  return round_up(bytes, allocator::kSmallestExtent);
}
constexpr std::size_t packed_bytes(std::size_t bytes) { return round_up(bytes, kDiskBlock); }

// Something that is in memory when it is needed: a unit's parameters, or its gradient.
struct HoldingSpec {
  std::string name;
  std::size_t bytes = 0;
  allocator::Purpose purpose = allocator::Purpose::kParameter;
  // Where its contents are while it is not needed. kComputeTier: it is resident, which is always present;
  // else it is under frames while it is needed, and in a backing on that tier otherwise.
  allocator::Tier tier = kComputeTier;
  // A client reads it at its address. It is there only while the client views it: it arrives, and is updated,
  // under another address, so that what is touched at other times is noticed.
  bool exposed = false;
  // Not resident, false: it has no backing, and stays under frames from its first use until discard().
  bool stored = true;
  // Where it is resident it shares huge pages with others, and remains resident under another plan.
  bool packed = false;
  // The address of this exposed one follows that of the exposed one that was defined before it, whose size is
  // a multiple of a huge page.
  bool adjoins = false;
};

// Virtual memory that knows the future. Holdings that are not resident share the frames: each is brought in
// ahead of its next use in the schedule, and the one whose next use is furthest makes room. Contents that
// changed are written when room for the next accesses has to be made: what is given up before never is, and
// what is used at once is not kept waiting by its own write. Thread rule: one thread.
class Pager {
 public:
  enum class Use : std::uint8_t {
    kRead,    // contents as they are
    kModify,  // contents as they are, and the caller will change them: waits for writes under way
  };

  Pager(allocator::Ledger& ledger, Backings& backings, Waits& waits);  // all outlive it
  ~Pager();
  Pager(const Pager&) = delete;
  Pager& operator=(const Pager&) = delete;

  // REQUIRES: before start(), and before Backings::allocate().
  HoldingId define(const HoldingSpec& spec);
  // What `holding` has after its last access of a cycle is used when `next` is accessed in the next one.
  void follow(HoldingId holding, HoldingId next) { uses_.follow(holding, next); }
  // Takes the memory. REQUIRES: after Backings::allocate().
  void start(std::size_t extent_bytes, std::size_t extents);
  // The cycle of accesses, each the holdings it needs. prefetch(n) fetches for the n accesses after the
  // position what can be had without waiting and without taking from nearer ones, and begins to write what is
  // in the way of those, and of two more.
  void set_schedule(std::vector<std::vector<HoldingId>> accesses);
  void set_position(std::size_t position);
  void prefetch(std::size_t accesses);
  void prefetch_one(HoldingId holding);  // outside of a schedule; only into free frames

  // Present and held until release(). A holding without contents has unspecified bytes. Waits.
  std::byte* acquire(HoldingId holding, Use use);
  // The same without waiting: false where it is not present yet (its fetch has begun where that is possible).
  bool try_acquire(HoldingId holding, Use use);
  void release(HoldingId holding);

  // The first `bytes` are its contents from now on (they may have shrunk), and will not change before the
  // next acquire for kModify: they may be written from now on. REQUIRES: no transfer of it is under way.
  void written(HoldingId holding, std::size_t bytes);
  // Somebody reads its contents from its backing, or where they lie, and no access of the schedule needs
  // them: until unpark() or discard() nothing is fetched. They are used when the one that it follows is.
  void park(HoldingId holding);
  void unpark(HoldingId holding);
  // From now on an exposed holding lies at its address, to be read, or written too, until conceal() was
  // called as often. Waits for transfers. REQUIRES: held.
  void view(HoldingId holding, bool writable);
  void conceal(HoldingId holding, bool writable);
  // What it holds is out of date: it does not stay at its address for a transfer either. REQUIRES: not
  // viewed.
  void hide(HoldingId holding);
  // Touches of exposed holdings are the server's from now on.
  void serve_touches(allocator::TouchServer& server) const;
  // Its contents are not needed any more. REQUIRES: not held.
  void discard(HoldingId holding);
  // What its backing has is out of date and will be overwritten whole: the next acquire does not fetch it.
  // REQUIRES: not held.
  void forget(HoldingId holding);

  // Another plan. What is to be no longer resident has a backing before, and frames for what is to be; the
  // others' go to the frames at once, and stay there until others need these. One that is not exposed has no
  // contents then. REQUIRES: nothing is held or under way.
  // false: it has one, or needs none. Before Backings::allocate()
  bool define_backing(HoldingId holding, allocator::Tier tier);
  void forget_backing(HoldingId holding);  // which could not be allocated
  void set_tier(HoldingId holding, allocator::Tier tier);
  void set_extents(std::size_t extents);  // with those of what is resident; writes what is in the way

  // The end. Those that are not exposed give their memory back at once, with what they hold.
  void drop_unexposed();
  // An exposed one leaves for good; what is under its address is ordinary memory with its contents then, or
  // nothing. Frames that those which are left do not need are given back. REQUIRES: not held; for contents
  // that it has any. Without, no error but a defect's.
  allocator::FormerHome leave(HoldingId holding, bool with_contents);
  // The most by which memory grows while all exposed ones leave with their contents, and what
  // drop_unexposed() gives back.
  struct Leaving {
    std::size_t growth = 0, given_back = 0;
  };
  Leaving leaving() const;

  std::size_t bytes(HoldingId holding) const;  // its size
  bool resident(HoldingId holding) const;
  bool present(HoldingId holding) const;  // readable now without I/O
  bool held(HoldingId holding) const;
  std::byte* data(HoldingId holding) const;     // where it lies now
  std::byte* address(HoldingId holding) const;  // where a client sees it, for the pager's whole life
  Backing& backing(HoldingId holding) const;    // REQUIRES: not resident

  // Called when nothing more can be evicted and no transfer is under way: lets the owner finish what holds
  // frames. Returns false where nothing can be done.
  void on_stall(std::function<bool()> handler) { on_stall_ = std::move(handler); }
  // Notices transfers that have ended; throws their errors.
  void poll();
  void wait_all();

 private:
  struct Holding;
  // What may leave, in the order in which it does: the one whose next use is furthest first.
  struct Leaver {
    NextUses::Time time;
    HoldingId id;
    bool unwritten;
    bool operator==(const Leaver&) const = default;
    bool operator<(const Leaver& other) const {
      return std::tuple(other.time, id) < std::tuple(time, other.id);
    }
  };
  using Leavers = std::set<Leaver>;
  allocator::FramePool& pool_of(const Holding& holding) const;
  void take_packed();
  void give_back_left();
  void list(Holding& holding);
  void set_parked(Holding& holding, bool parked);
  Leavers& leavers(bool unwritten) { return unwritten ? unwritten_ : written_; }
  void make_homes();
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
  std::size_t frames_for_any() const;

  allocator::Ledger& ledger_;
  Backings& backings_;
  Waits& waits_;
  std::vector<std::unique_ptr<Holding>> holdings_;
  std::unique_ptr<allocator::FramePool> pool_, small_pool_;  // of huge pages; for what is packed and exposed
  std::vector<allocator::Region> packed_;                    // what is packed and not exposed, by purpose
  NextUses uses_;
  Leavers written_, unwritten_;
  std::set<HoldingId> moving_;  // those of which a transfer is under way
  std::function<bool()> on_stall_;
};

}  // namespace sluice::engine
