#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "allocator/ledger.h"

// Physical memory and the addresses under which it is seen. All sizes here are multiples of a huge page (2
// MiB), but for pools of small extents; all memory is anonymous, populated when it is taken (so that a lack
// of it shows then, not later), advised to be huge pages, not inherited by a forked child, and kept out of
// core dumps.
namespace sluice::allocator {

// Memory that stays where it is: a fixed buffer (staging, activations, resident state). Zero at first.
// Throws Error(kBudget) where the ledger refuses it, or where the system does.
class Region {
 public:
  Region() = default;
  // bytes are rounded up to a huge page. capacity: what resize() may make of it, in addresses without memory;
  // less than bytes: as many. An empty one where both are 0.
  Region(Ledger& ledger, Purpose purpose, std::size_t bytes, std::size_t capacity = 0);
  ~Region();
  Region(Region&& other) noexcept;
  Region& operator=(Region&& other) noexcept;
  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }
  std::span<std::byte> bytes() const { return {data_, size_}; }
  // Gives back what lies beyond, or takes more, which is zero. The rest stays where it is. Throws as the
  // constructor, with nothing changed. REQUIRES: at most the capacity.
  void resize(std::size_t bytes);

 private:
  std::byte* data_ = nullptr;
  std::size_t size_ = 0, capacity_ = 0;
  Purpose purpose_ = Purpose::kBase;
  Charge charge_;
};

class FramePool;
class Reservation;

// An address range on the compute device: reserved once, the same for its whole life, with or without memory
// under it. A touch of the part that has none is served (see TouchServer), or prints the home's name and ends
// the process (see install_touch_reporter). Thread rule: one thread at a time.
class Home {
 public:
  Home();                                     // without a range
  Home(std::string name, std::size_t bytes);  // bytes are rounded up to a huge page
  ~Home();                                    // gives its frames back
  Home(Home&& other) noexcept;
  Home& operator=(Home&& other) noexcept;

  // Homes whose ranges follow each other, so that the whole is one. REQUIRES: the sizes of all but the last
  // are multiples of a huge page, and of the extents that are placed under them.
  struct Part {
    std::string name;
    std::size_t bytes;
  };
  static std::vector<Home> adjoining(const std::vector<Part>& parts);

  std::byte* data() const;
  std::size_t size() const;    // of the range
  std::size_t placed() const;  // bytes from the start that have memory under them
  const std::string& name() const;

 private:
  friend class FormerHome;
  friend class FramePool;
  friend class TouchServer;
  struct State;
  std::unique_ptr<State> state_;
};

// The addresses of a home for those who still refer to them when its owner ends: with ordinary memory under
// them (in no ledger, inherited by forked children), or with none, where a touch is told by the home's name.
// Thread rule: as Home.
class FormerHome {
 public:
  FormerHome();
  explicit FormerHome(Home home);  // without memory. REQUIRES: no pool has memory under it
  ~FormerHome();                   // the addresses are anybody's
  FormerHome(FormerHome&& other) noexcept;
  FormerHome& operator=(FormerHome&& other) noexcept;
  std::byte* data() const;  // nullptr: none

 private:
  friend class FramePool;
  explicit FormerHome(std::unique_ptr<Reservation> range);
  std::unique_ptr<Reservation> range_;
};

inline constexpr std::size_t kSmallestExtent = std::size_t{64} << 10;

// Budgeted physical memory in extents of one size that are placed under homes and taken away again: pages
// move, addresses stay (mremap with MREMAP_DONTUNMAP, so that an address given up is never free for others).
// What a placed extent holds is unspecified: what it held last. Extents that follow each other move in one
// call. Thread rule: one thread at a time; never while an I/O or another thread uses the home.
class FramePool {
 public:
  // Takes extents * extent_bytes, charged to the ledger as kParameter ("free" frames count so too). capacity:
  // how many take_more() may make of them; less than extents: as many. REQUIRES: extent_bytes is a multiple
  // of kSmallestExtent. Only those of kHugePage are huge pages.
  FramePool(Ledger& ledger, std::size_t extent_bytes, std::size_t extents, std::size_t capacity = 0);
  ~FramePool();  // REQUIRES: no home holds an extent of it
  FramePool(const FramePool&) = delete;
  FramePool& operator=(const FramePool&) = delete;

  std::size_t extent_bytes() const;
  std::size_t extents() const;
  std::size_t free_extents() const;
  std::size_t extents_for(std::size_t bytes) const;  // how many a range of that size takes

  // Puts memory under the first `bytes` of the home (rounded up to extents; the home's reservation is big
  // enough for that by construction: reservations are rounded up to 64 MiB beyond their size). The ledger
  // moves those bytes to `purpose`. Returns false, with nothing changed, where too few extents are free.
  // REQUIRES: the home has no memory of its own or of another pool under it.
  bool place(Home& home, std::size_t bytes, Purpose purpose);
  // Takes away what lies beyond the first `bytes` (rounded up to extents); 0 takes all.
  void shrink(Home& home, std::size_t bytes);
  // What others may do with the memory under the home: everything, when it is placed.
  enum class Access { kNone, kRead, kWrite };
  void protect(Home& home, Access access);
  // Moves all memory, with what it holds, from one home to another, which has none, and where it may be
  // written. Others may touch both meanwhile: they find what it holds, or that it is absent. REQUIRES: `to`
  // is as large.
  void move(Home& from, Home& to);
  // What is under the home stays at its address, in ordinary memory that is taken for it; its extents are
  // free then. Throws Error(kBudget) where the system lacks the memory, with nothing changed. REQUIRES:
  // placed by this pool, and readable.
  FormerHome leave(Home& home);
  // Gives memory back to the system and the ledger: free extents, until the pool has only that many, or none
  // is free.
  void give_back(std::size_t extents_left);
  // Takes memory until the pool has that many extents. Throws Error(kBudget) where the ledger or the system
  // refuses it; what was taken until then stays. REQUIRES: at most the capacity.
  void take_more(std::size_t extents);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// What the process holds and what it may hold, read from the system.
std::size_t resident_bytes();       // VmRSS of this process
std::size_t peak_resident_bytes();  // VmHWM
std::size_t
available_memory_bytes();  // what is free for this process: MemAvailable, and the cgroup limits (v1, v2)
bool huge_pages_given(const std::byte* data, std::size_t bytes,
                      double* share);  // share of the range on huge pages; false: unknown

// From then on a touch of an absent home prints the home's name and the remedy on the standard error stream
// and aborts (SIGSEGV handler that passes anything else on to the handler before it). To be called again
// after others may have put a handler of theirs over it (Python's faulthandler, other libraries): then it
// comes first again. Costs one system call. Any thread.
void install_touch_reporter();

// Lets touches of absent homes, and writes to those that may only be read, succeed: the thread that touched
// waits in the signal handler, while a thread of the server's brings the memory in. Needs no permission of
// the kernel's, unlike userfaultfd; a system call on an absent home still gives EFAULT.
class TouchServer {
 public:
  struct Touch {
    std::byte* address;
    bool write;  // also where the processor does not tell
    int thread;  // that waits
  };
  // bring_in is called by one thread. Where it cannot place memory there it changes nothing, and returns why
  // not, or throws: the process then ends as it does without a server, with that text. Empty: it is there. It
  // may not touch absent homes itself.
  using BringIn = std::function<std::string(const Touch& touch)>;
  explicit TouchServer(BringIn bring_in);
  ~TouchServer();  // REQUIRES: nobody is waiting for a touch
  TouchServer(const TouchServer&) = delete;
  TouchServer& operator=(const TouchServer&) = delete;

  void serve(const Home& home);  // from now on, while both live
  std::uint64_t served() const;  // touches so far

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace sluice::allocator
