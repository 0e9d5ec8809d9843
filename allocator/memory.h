#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "allocator/ledger.h"

// Physical memory, and the addresses under which it is seen. All sizes are multiples of a huge page (2 MiB),
// except in pools of smaller extents. All memory is anonymous, populated when it is taken (so that a lack of
// it shows at once), advised to be huge pages, not inherited by a child, and kept out of core dumps.
namespace sluice::allocator {

// A buffer at a fixed address (staging, activations, resident state), zero at first. Throws Error(kBudget)
// where the ledger or the system refuses the memory.
class Region {
 public:
  Region() = default;
  // bytes are rounded up to a huge page. The region reserves addresses for `capacity` bytes, or for `bytes`
  // where that is more, so that resize() can take memory later. It is empty where both are 0.
  Region(Ledger& ledger, Purpose purpose, std::size_t bytes, std::size_t capacity = 0);
  std::byte* data() const { return range_.get(); }
  std::size_t size() const { return range_ == nullptr ? 0 : size_; }
  std::span<std::byte> bytes() const { return {data(), size()}; }
  // Gives back the memory beyond `bytes`, or takes more, which is zero. Addresses and contents of the rest do
  // not change. Throws as the constructor, with nothing changed. REQUIRES: bytes is at most the capacity.
  void resize(std::size_t bytes);

 private:
  struct GiveBack {
    std::size_t capacity;
    Charge charge;  // is discharged after the memory was given back
    void operator()(std::byte* data) const;
  };
  std::unique_ptr<std::byte, GiveBack> range_;
  std::size_t size_ = 0;
  Purpose purpose_ = Purpose::kBase;
};

class FramePool;
class Reservation;

// An address range on the compute device: reserved once, the same for its whole life, with or without memory
// under it. A touch of addresses without memory is served (TouchServer), or prints the home's name and ends
// the process (install_touch_reporter). Thread rule: one thread at a time.
class Home {
 public:
  Home();                                     // without a range
  Home(std::string name, std::size_t bytes);  // bytes are rounded up to a huge page
  ~Home();                                    // gives its frames back
  Home(Home&& other) noexcept;
  Home& operator=(Home&& other) noexcept;

  // Makes homes whose ranges follow each other, so that together they are one range. REQUIRES: the sizes of
  // all but the last are multiples of a huge page, and of the extents that are placed under them.
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

// A home's addresses, kept for those who still refer to them after its owner has ended. Under them is
// ordinary memory (in no ledger, inherited by forked children), or none; then a touch ends the process with
// the home's name. Thread rule: one thread at a time.
class FormerHome {
 public:
  FormerHome();
  explicit FormerHome(Home home);  // keeps addresses alone. REQUIRES: no pool has memory under the home
  ~FormerHome();                   // gives memory and addresses back
  FormerHome(FormerHome&& other) noexcept;
  FormerHome& operator=(FormerHome&& other) noexcept;
  std::byte* data() const;  // nullptr where it has no addresses

 private:
  friend class FramePool;
  explicit FormerHome(std::unique_ptr<Reservation> range);
  std::unique_ptr<Reservation> range_;
};

inline constexpr std::size_t kSmallestExtent = std::size_t{64} << 10;

// Budgeted physical memory in extents of one size that are placed under homes and taken away again: pages
// move, addresses stay (mremap with MREMAP_DONTUNMAP, so that nobody else can get an address that is given
// up). The contents of a placed extent are unspecified. Extents that follow each other move in one call.
// Thread rule: one thread at a time, and never while I/O or another thread uses the home.
class FramePool {
 public:
  // Takes `extents` extents, charged to the ledger as kParameter, as free frames are. Addresses are reserved
  // for `capacity` extents, or `extents` if that is more, for take_more(). Only extents of kHugePage or more
  // are huge pages. REQUIRES: extent_bytes is a multiple of kSmallestExtent.
  FramePool(Ledger& ledger, std::size_t extent_bytes, std::size_t extents, std::size_t capacity = 0);
  ~FramePool();  // REQUIRES: no home holds one of its extents
  FramePool(const FramePool&) = delete;
  FramePool& operator=(const FramePool&) = delete;

  std::size_t extent_bytes() const;
  std::size_t extents() const;
  std::size_t free_extents() const;
  std::size_t extents_for(std::size_t bytes) const;  // the number of extents that so many bytes take

  // Puts memory under the first `bytes` of the home, rounded up to extents. (They fit, because a reservation
  // is 64 MiB larger than its home.) The ledger moves those bytes to `purpose`. Returns false, with nothing
  // changed, where too few extents are free. REQUIRES: no memory is under the home.
  bool place(Home& home, std::size_t bytes, Purpose purpose);
  // Takes away the memory beyond the first `bytes`, rounded up to extents; 0 takes all.
  void shrink(Home& home, std::size_t bytes);
  // Sets how the memory under the home may be accessed. At first it may be read and written.
  enum class Access { kNone, kRead, kWrite };
  void protect(Home& home, Access access);
  // Moves all memory with its contents from one home to another, where it may then be written. Other threads
  // may touch both homes meanwhile: they find the contents, or find them absent. REQUIRES: no memory is under
  // `to`, and it is as large.
  void move(Home& from, Home& to);
  // Copies the contents of the home to ordinary memory at the same addresses, and frees its extents. Throws
  // Error(kBudget) where the system lacks the memory, with nothing changed. REQUIRES: this pool's extents are
  // under the home, and may be read.
  FormerHome leave(Home& home);
  // Gives free extents back to system and ledger, until the pool has only `extents_left`, or none is free.
  void give_back(std::size_t extents_left);
  // Takes memory until the pool has `extents`. Throws Error(kBudget) where the ledger or the system refuses
  // it; the extents taken by then stay. REQUIRES: extents is at most the capacity.
  void take_more(std::size_t extents);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Memory that another rank has taken, in a file without a name, and that this process sees, too, all of it
// present. It is in no ledger here, in no child, and in no core dump. Thread rule: any thread.
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

// What this process holds and may hold, as the system says. OthersMemory is its owner's alone. After some of
// it has ended, a later peak may be told too small by as much, since the system knows only the peak of all.
std::size_t resident_bytes();          // VmRSS of this process, but for that
std::size_t peak_resident_bytes();     // VmHWM, but for that
std::size_t available_memory_bytes();  // MemAvailable, or less where a control group (v1, v2) allows less
// Sets *share to the share of the range on huge pages. Returns false where the system does not tell.
bool huge_pages_given(const std::byte* data, std::size_t bytes, double* share);

// Installs a SIGSEGV handler: from then on a touch of an absent home prints the home's name and the remedy on
// the standard error stream and aborts; any other fault goes to the handler that was there before. It is
// called again after others may have installed a handler (Python's faulthandler, other libraries), and then
// comes first again. Costs one system call. Thread rule: any thread.
void install_touch_reporter();

// Lets touches of absent homes, and writes to homes that may only be read, succeed: the thread that touched
// waits in the signal handler while a thread of the server's brings the memory in. Needs no permission of the
// kernel, as userfaultfd would. A system call on an absent home still gives EFAULT.
class TouchServer {
 public:
  struct Touch {
    std::byte* address;
    bool write;  // true also where the processor does not tell reads from writes
    int thread;  // the id of the thread that waits
  };
  // Brings in the memory at the touched address and returns "". Where it cannot, it changes nothing and
  // returns why, or throws; the process then ends with that text, as it does without a server. It is called
  // by one thread, and may not touch absent homes itself.
  using BringIn = std::function<std::string(const Touch& touch)>;
  explicit TouchServer(BringIn bring_in);
  ~TouchServer();  // REQUIRES: no thread waits for a touch
  TouchServer(const TouchServer&) = delete;
  TouchServer& operator=(const TouchServer&) = delete;

  void serve(const Home& home);  // serves the home's touches from now on, while both live
  std::uint64_t served() const;  // the number of touches served so far

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace sluice::allocator
