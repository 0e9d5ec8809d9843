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

// Whether resident holdings of units this small share huge pages. Thousands of small units then take little
// more than their bytes; moving them between tiers would save little.
constexpr bool is_packed(std::size_t unit_bytes) { return unit_bytes <= kHugePage / 4; }
// The bytes that a packed holding takes: where it is exposed, which needs page-aligned addresses of its own,
// and otherwise.
constexpr std::size_t packed_exposed_bytes(std::size_t bytes) {
  return round_up(bytes, allocator::kSmallestExtent);
}
constexpr std::size_t packed_bytes(std::size_t bytes) { return round_up(bytes, kDiskBlock); }

// Contents that are in memory while they are used: the parameters of a unit, or a gradient buffer.
struct HoldingSpec {
  std::string name;
  std::size_t bytes = 0;
  allocator::Purpose purpose = allocator::Purpose::kParameter;
  // Where the contents are while they are not used. On the tier that is computed on, the holding is resident:
  // always present. Otherwise it is in frames while it is used, and in a backing on that tier the rest of the
  // time.
  allocator::Tier tier = kCpuTier;
  // A client reads the contents at their address, but only while it views them. They arrive and are updated
  // under a second address, so that an access at any other time causes a page fault.
  bool exposed = false;
  // False: where not resident, it has no backing, and stays in frames from its first use until discard().
  bool stored = true;
  // Where resident, it shares huge pages with other holdings, and stays resident under every plan.
  bool packed = false;
  // Its address range follows that of the exposed holding defined before it, whose size is a multiple of a
  // huge page.
  bool adjoins = false;
  UnitId unit = 0;  // see BackingSpec
  // The most bytes that Pager::written() will state, for which the backing has room; 0: all bytes.
  std::size_t stored_bytes = 0;
  std::size_t backing_bytes() const { return round_up(stored_bytes > 0 ? stored_bytes : bytes, kDiskBlock); }
};

// The most by which memory grows while all exposed holdings leave with their contents, and the bytes that
// drop_unexposed() gives back.
struct Leaving {
  std::size_t growth = 0, given_back = 0;
};

// The memory of holdings on the device that computes, and their addresses there. A resident holding has its
// memory for good; another one is in frames while it is present. There is an implementation for the CPU and
// one for a GPU; the pager above decides what is present when. Thread rule: one thread.
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

  // Takes all memory: frames of extent_bytes, `extents` of them beside those of resident holdings.
  virtual void start(std::size_t extent_bytes, std::size_t extents) = 0;
  virtual std::byte* data(HoldingId holding) const = 0;     // where the contents are now
  virtual std::byte* address(HoldingId holding) const = 0;  // the client's address, constant

  // Frames.
  virtual std::size_t extents() const = 0;
  virtual std::size_t free_extents() const = 0;
  virtual std::size_t extents_for(HoldingId holding) const = 0;
  virtual bool place(HoldingId holding) = 0;  // false: too few are free
  virtual void take_away(HoldingId holding) = 0;
  // An implementation may assign each holding fixed frames of its own, by the accesses and what is held
  // during each. assigns() tells whether it does.
  virtual void set_schedule(const Schedule& /*accesses*/, const Schedule& /*held*/) {}
  virtual bool assigns() const { return false; }
  // The other holdings that are now in the frames assigned to this one.
  virtual std::vector<HoldingId> in_the_way(HoldingId /*holding*/) const { return {}; }

  // Each view() begins an access of the client, which a conceal() ends. arrange() then moves pages where
  // needed. REQUIRES, for arrange(): the holding is present, and no transfer of it is in flight.
  virtual void view(HoldingId holding, bool writable) = 0;
  virtual void conceal(HoldingId holding, bool writable) = 0;
  // Whether a view of the holding has to wait until its pages can move.
  virtual bool must_move(HoldingId /*holding*/, bool /*writable*/) const { return false; }
  virtual bool is_shown(HoldingId /*holding*/) const { return false; }
  virtual void arrange(HoldingId /*holding*/) {}
  virtual void serve_touches(allocator::TouchServer& /*server*/) const {}
  // Lets a reader of a holding that the client is still writing see what has been written so far.
  virtual void share_what_is_written(HoldingId /*holding*/) {}
  // The holding's GPU memory as a backing. Its transfers complete for the caller as those of HostRecords do.
  virtual Backing& as_backing(HoldingId holding) {
    fail(ErrorCode::kInternal, "'{}' is asked for as a GPU's memory", spec(holding).name);
  }

  // A change of plan. REQUIRES: holdings that are not exposed are not present.
  virtual void set_tier(HoldingId holding, allocator::Tier tier) = 0;
  virtual void take_more(std::size_t extents) = 0;  // until there are `extents`
  virtual void give_back(std::size_t extents) = 0;  // gives back free ones until only so many are left

  // Shutdown, where the CPU computes; see Pager.
  virtual void drop_unexposed() = 0;
  // REQUIRES, with_contents: the holding is present and viewed for writing; the call ends that view.
  virtual allocator::FormerHome leave(HoldingId holding, bool with_contents) = 0;
  virtual Leaving leaving() const = 0;

 protected:
  HoldingId count() const { return static_cast<HoldingId>(specs_.size()); }
  HoldingSpec& spec_of(HoldingId holding) { return specs_[holding]; }
  bool in_region(HoldingId holding) const { return resident(holding) && !spec(holding).exposed; }
  bool in_shared_pages(HoldingId holding) const { return resident(holding) && spec(holding).packed; }
  // The resident, packed, unexposed holdings: the offset of each in the memory of its purpose, and by purpose
  // the bytes of that memory.
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
