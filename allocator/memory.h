#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "allocator/ledger.h"

// Physical memory, and the virtual addresses at which it is mapped. All sizes are multiples of a huge page (2
// MiB), except in pools of smaller extents. All memory is anonymous, populated when it is allocated (so that
// a lack of it shows at once), advised to be huge pages, not inherited by a forked child, and not in core
// dumps.
namespace sluice::allocator {

// A buffer at a fixed address (staging, activations, resident state), initially zero. Throws Error(kBudget)
// where the ledger or the system refuses the memory.
class Region {
 public:
  Region() = default;
  // bytes are rounded up to a huge page. The region reserves addresses for `capacity` bytes, if that is more,
  // so that resize() can grow it. It is empty where both are 0.
  Region(Ledger& ledger, Purpose purpose, std::size_t bytes, std::size_t capacity = 0);
  std::byte* data() const { return range_.get(); }
  std::size_t size() const { return range_ == nullptr ? 0 : size_; }
  std::span<std::byte> bytes() const { return {data(), size()}; }
  // Returns the memory beyond `bytes` to the system, or adds zeroed memory. Addresses and contents of the
  // rest do not change. Throws as the constructor, with nothing changed. REQUIRES: bytes is at most the
  // capacity.
  void resize(std::size_t bytes);

 private:
  struct GiveBack {
    std::size_t capacity;
    Charge charge;  // discharged after the memory was returned to the system
    void operator()(std::byte* data) const;
  };
  std::unique_ptr<std::byte, GiveBack> range_;
  std::size_t size_ = 0;
  Purpose purpose_ = Purpose::kBase;
};

class FramePool;
class Reservation;

// A reserved address range on the compute device, the same for its whole life, with or without memory mapped
// at it. An access without memory (a page fault) is served by a TouchServer, or prints the home's name and
// ends the process (install_touch_reporter). Thread rule: one thread at a time.
class Home {
 public:
  Home();                                     // without a range
  Home(std::string name, std::size_t bytes);  // bytes are rounded up to a huge page
  ~Home();                                    // returns its frames to their pool
  Home(Home&& other) noexcept;
  Home& operator=(Home&& other) noexcept;

  // Makes homes with adjoining ranges, which together are one range. REQUIRES: the sizes of all but the last
  // are multiples of a huge page, and of the extents that are placed at them.
  struct Part {
    std::string name;
    std::size_t bytes;
  };
  static std::vector<Home> adjoining(const std::vector<Part>& parts);

  std::byte* data() const;
  std::size_t size() const;    // of the range, in bytes
  std::size_t placed() const;  // bytes from the start that have memory
  const std::string& name() const;

 private:
  friend class FormerHome;
  friend class FramePool;
  friend class TouchServer;
  struct State;
  std::unique_ptr<State> state_;
};

// A home's addresses, kept after its owner has been destroyed for pointers that still refer to them. They
// have ordinary memory (in no ledger, inherited by forked children) or none; then an access ends the process
// with the home's name. Thread rule: one thread at a time.
class FormerHome {
 public:
  FormerHome();
  explicit FormerHome(Home home);  // keeps only the addresses. REQUIRES: no pool has memory at the home
  ~FormerHome();                   // returns memory and addresses to the system
  FormerHome(FormerHome&& other) noexcept;
  FormerHome& operator=(FormerHome&& other) noexcept;
  std::byte* data() const;  // nullptr where it has no addresses

 private:
  friend class FramePool;
  explicit FormerHome(std::unique_ptr<Reservation> range);
  std::unique_ptr<Reservation> range_;
};

inline constexpr std::size_t kSmallestExtent = std::size_t{64} << 10;

// Budgeted physical memory in extents of one size that are placed at homes and taken away again. Pages move
// between addresses by mremap() with MREMAP_DONTUNMAP, so that the addresses stay reserved. The contents of a
// placed extent are unspecified. Consecutive extents move in one call. Thread rule: one thread at a time, and
// never while I/O or another thread uses the home.
class FramePool {
 public:
  // Allocates `extents` extents and charges them as kParameter, like all free frames. Addresses are reserved
  // for `capacity` extents, if that is more, for take_more(). Only extents of at least kHugePage are on huge
  // pages. REQUIRES: extent_bytes is a multiple of kSmallestExtent.
  FramePool(Ledger& ledger, std::size_t extent_bytes, std::size_t extents, std::size_t capacity = 0);
  ~FramePool();  // REQUIRES: no home holds one of its extents
  FramePool(const FramePool&) = delete;
  FramePool& operator=(const FramePool&) = delete;

  std::size_t extent_bytes() const;
  std::size_t extents() const;
  std::size_t free_extents() const;
  std::size_t extents_for(std::size_t bytes) const;  // the number of extents that hold this many bytes

  // Places extents at the first `bytes` of the home, rounded up to extents. (They fit, because a reservation
  // is 64 MiB larger than its home.) The ledger moves those bytes to `purpose`. Returns false, with nothing
  // changed, where too few extents are free. REQUIRES: the home has no memory.
  bool place(Home& home, std::size_t bytes, Purpose purpose);
  // Takes away the memory beyond the first `bytes`, rounded up to extents; 0 takes away all.
  void shrink(Home& home, std::size_t bytes);
  // Sets the page protection of the home's memory, which place() leaves readable and writable.
  enum class Access { kNone, kRead, kWrite };
  void protect(Home& home, Access access);
  // Moves all memory with its contents to another home, where it becomes writable. Other threads may access
  // both homes during the move: they find the contents, or a page fault. REQUIRES: `to` has no memory and the
  // same size.
  void move(Home& from, Home& to);
  // Copies the home's contents to ordinary memory at the same addresses, and frees its extents. Throws
  // Error(kBudget), with nothing changed, where the system lacks the memory. REQUIRES: the home has extents
  // of this pool, which are readable.
  FormerHome leave(Home& home);
  // Returns free extents to system and ledger until the pool has only `extents_left`, or none is free.
  void give_back(std::size_t extents_left);
  // Allocates memory until the pool has `extents`. Throws Error(kBudget) where the ledger or the system
  // refuses it; extents allocated by then stay. REQUIRES: extents is at most the capacity.
  void take_more(std::size_t extents);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Shared memory that another rank has allocated, in a file without a name, mapped and populated here. This
// process does not charge it to its ledger; forked children and core dumps do not have it. Thread rule: any
// thread.
class OthersMemory {
 public:
  OthersMemory() = default;
  // Maps the file's first bytes. Throws Error(kIo) where the system refuses.
  OthersMemory(int file, std::size_t bytes, bool writable);
  std::byte* data() const { return data_.get(); }

 private:
  struct Unmap {
    std::size_t bytes;
    void operator()(std::byte* data) const;
  };
  std::unique_ptr<std::byte, Unmap> data_;
};

// Memory of this process as the system reports it. OthersMemory is not counted. Once some of that has been
// unmapped, a later peak may be reported too low by its size, since the system has only one peak for
// everything.
std::size_t resident_bytes();          // VmRSS of this process, without OthersMemory
std::size_t peak_resident_bytes();     // VmHWM, without OthersMemory
std::size_t available_memory_bytes();  // MemAvailable, or less where a control group (v1, v2) limits it
// Sets *share to the fraction of the range that is on huge pages. Returns false where the system does not
// tell.
bool huge_pages_given(const std::byte* data, std::size_t bytes, double* share);

// Installs a SIGSEGV handler: an access to an absent home prints the home's name and the remedy on standard
// error and aborts; any other fault goes to the handler that was installed before. Call it again after
// another library (Python's faulthandler) may have installed a handler, so that this one comes first. Costs
// one system call. Thread rule: any thread.
void install_touch_reporter();

// Serves page faults on absent homes, and writes to read-only homes: the faulting thread waits in the signal
// handler while the server's thread brings the memory in. Unlike userfaultfd it needs no permission of the
// kernel. A system call on an absent home still fails with EFAULT.
class TouchServer {
 public:
  struct Touch {
    std::byte* address;
    bool write;  // also true where the processor does not distinguish reads and writes
    int thread;  // id of the faulting thread, which waits
  };
  // Makes the faulting address accessible and returns "". Where it cannot, it changes nothing and returns the
  // reason, or throws; the process then ends with that text, as without a server. One thread calls it, which
  // must not access absent homes itself.
  using BringIn = std::function<std::string(const Touch& touch)>;
  explicit TouchServer(BringIn bring_in);
  ~TouchServer();  // REQUIRES: no thread waits in a fault
  TouchServer(const TouchServer&) = delete;
  TouchServer& operator=(const TouchServer&) = delete;

  void serve(const Home& home);  // serves faults on this home while both objects live
  std::uint64_t served() const;  // the number of faults served so far

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace sluice::allocator
