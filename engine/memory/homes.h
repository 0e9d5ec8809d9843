#pragma once
#include <array>
#include <cstddef>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "allocator/ledger.h"
#include "allocator/memory.h"
#include "core/bytes.h"
#include "core/error.h"
#include "engine/memory/backing.h"
#include "engine/memory/device_work.h"
#include "engine/memory/next_uses.h"

namespace sluice::engine {

// Resident holdings of such small units share huge pages, so that thousands of small units take little more
// than their bytes. They are too small to be worth moving.
constexpr bool is_packed(std::size_t unit_bytes) { return unit_bytes <= kHugePage / 4; }
// What a packed holding takes, where it is exposed (so that its address is its own), and otherwise.
constexpr std::size_t packed_exposed_bytes(std::size_t bytes) {
  return round_up(bytes, allocator::kSmallestExtent);
}
constexpr std::size_t packed_bytes(std::size_t bytes) { return round_up(bytes, kDiskBlock); }

// Contents that are in memory when they are needed: the parameters of a unit, or a gradient buffer.
struct HoldingSpec {
  std::string name;
  std::size_t bytes = 0;
  allocator::Purpose purpose = allocator::Purpose::kParameter;
  // Where the contents are while they are not needed. On the tier that is computed on the holding is
  // resident: its contents are always present. Otherwise they are under frames while they are needed, and in
  // a backing on that tier the rest of the time.
  allocator::Tier tier = kCpuTier;
  // A client reads the contents at their address, where they are only while the client views them. They
  // arrive, and are updated, under another address, so that a touch at another time is noticed.
  bool exposed = false;
  // False: where not resident, it has no backing, and is under frames from its first use until discard().
  bool stored = true;
  // Where resident, it shares huge pages with other holdings, and stays resident under every plan.
  bool packed = false;
  // Its address follows that of the exposed holding defined before, which has a multiple of a huge page.
  bool adjoins = false;
  UnitId unit = 0;  // see BackingSpec
  // The most that Pager::written() states, for which the backing has room; 0: all bytes.
  std::size_t stored_bytes = 0;
  std::size_t backing_bytes() const { return round_up(stored_bytes > 0 ? stored_bytes : bytes, kDiskBlock); }
};

// The most by which memory grows while all exposed holdings leave with their contents, and what
// drop_unexposed() gives back.
struct Leaving {
  std::size_t growth = 0, given_back = 0;
};

// The memory of holdings on the device that computes, and the addresses at which they are seen there:
// resident ones have memory for good, the others are under frames while they are present. There is one for
// the CPU and one for a GPU; the pager above decides what is present when. Thread rule: one thread.
class Homes {
 public:
  using Schedule = std::vector<std::vector<HoldingId>>;  // holdings by access

  explicit Homes(allocator::Tier tier) : tier_(tier) {}
  virtual ~Homes() = default;
  Homes(const Homes&) = delete;
  Homes& operator=(const Homes&) = delete;

  allocator::Tier tier() const { return tier_; }  // the one that is computed on
  HoldingId define(const HoldingSpec& spec) {
    specs_.push_back(spec);
    return static_cast<HoldingId>(specs_.size() - 1);
  }
  const HoldingSpec& spec(HoldingId holding) const { return specs_[holding]; }
  bool resident(HoldingId holding) const { return spec(holding).tier == tier_; }

  // Takes all memory, in frames of so many bytes, for as many frames beside those of resident holdings.
  virtual void start(std::size_t extent_bytes, std::size_t extents) = 0;
  virtual std::byte* data(HoldingId holding) const = 0;     // where the contents are now
  virtual std::byte* address(HoldingId holding) const = 0;  // where a client sees them, for good

  // Frames.
  virtual std::size_t extents() const = 0;
  virtual std::size_t free_extents() const = 0;
  virtual std::size_t extents_for(HoldingId holding) const = 0;
  virtual bool place(HoldingId holding) = 0;  // false: too few are free
  virtual void take_away(HoldingId holding) = 0;
  // An implementation may give each holding frames of its own, by the holdings that each access uses, and
  // those that are held meanwhile. assigns() tells whether it does.
  virtual void set_schedule(const Schedule& /*accesses*/, const Schedule& /*held*/) {}
  virtual bool assigns() const { return false; }
  // The other holdings that lie now in the frames which are this holding's own.
  virtual std::vector<HoldingId> in_the_way(HoldingId /*holding*/) const { return {}; }

  // How a client sees a holding. view() and conceal() come in pairs. Pages may then have to move, which they
  // do in arrange(): REQUIRES: it is present, and no transfer of it is under way.
  virtual void view(HoldingId holding, bool writable) = 0;
  virtual void conceal(HoldingId holding, bool writable) = 0;
  // Whether a view of the holding waits for its pages to move.
  virtual bool must_move(HoldingId /*holding*/, bool /*writable*/) const { return false; }
  virtual bool is_shown(HoldingId /*holding*/) const { return false; }
  virtual void arrange(HoldingId /*holding*/) {}
  virtual void serve_touches(allocator::TouchServer& /*server*/) const {}
  // Who reads what the client is still writing gets what it has written so far.
  virtual void share_what_is_written(HoldingId /*holding*/) {}
  // A GPU's memory as a backing, whose transfers end for the caller as HostRecords' do.
  virtual Backing& as_backing(HoldingId holding) {
    fail(ErrorCode::kInternal, "'{}' is asked for as a GPU's memory", spec(holding).name);
  }

  // Another plan. REQUIRES: what is not exposed is not present.
  virtual void set_tier(HoldingId holding, allocator::Tier tier) = 0;
  virtual void take_more(std::size_t extents) = 0;  // until there are so many
  virtual void give_back(std::size_t extents) = 0;  // free ones, until no more are left than so many

  // The end, where the CPU computes; see Pager.
  virtual void drop_unexposed() = 0;
  // with_contents: it is present, viewed for writing, and that view ends.
  virtual allocator::FormerHome leave(HoldingId holding, bool with_contents) = 0;
  virtual Leaving leaving() const = 0;

 protected:
  HoldingId count() const { return static_cast<HoldingId>(specs_.size()); }
  HoldingSpec& spec_of(HoldingId holding) { return specs_[holding]; }
  bool in_region(HoldingId holding) const { return resident(holding) && !spec(holding).exposed; }
  bool in_shared_pages(HoldingId holding) const { return resident(holding) && spec(holding).packed; }
  // What is resident, packed and not exposed: where each lies in the memory of its purpose, and how many
  // bytes that takes.
  struct Packed {
    HoldingId holding;
    std::size_t purpose, offset;
  };
  std::vector<Packed> packed(std::array<std::size_t, allocator::kPurposes>& bytes) const;

 private:
  const allocator::Tier tier_;
  std::deque<HoldingSpec> specs_;
};

std::unique_ptr<Homes> make_cpu_homes(allocator::Ledger& ledger);
std::unique_ptr<Homes> make_gpu_homes(allocator::Ledger& ledger, DeviceWork& gpu);

}  // namespace sluice::engine
