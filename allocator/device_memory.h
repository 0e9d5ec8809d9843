#pragma once
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "allocator/ledger.h"
#include "core/device.h"

// Memory of a GPU, and the addresses under which the GPU sees it: the counterpart of memory.h. All of it is
// on the tier kDevice of a ledger. Sizes are multiples of a piece that the GPU states (2 MiB mostly).
//
// Since the GPU works while the caller goes on, memory is used by what is queued on streams. Who takes memory
// away names the streams that have used it; who gets it next waits for them on its own stream, not on the
// caller. Thread rule: one thread at a time for all that belongs to one device.
namespace sluice::allocator {

// A buffer at a fixed address. Its contents are unspecified. Throws Error(kBudget) where the ledger or the
// device refuses the memory. REQUIRES: when it ends, all work that uses it is done.
class DeviceRegion {
 public:
  DeviceRegion() = default;
  // shared: whether other processes of the host may use it.
  DeviceRegion(Ledger& ledger, Device& device, Purpose purpose, std::size_t bytes, bool shared = false);
  DeviceAddress address() const;  // 0 where it is empty
  std::size_t size() const;
  // What another process uses it by. Throws Error(kIo) where it is empty or not shared.
  Descriptor exported() const;

 private:
  struct State;
  struct End {
    void operator()(State* state) const;
  };
  std::unique_ptr<State, End> state_;
};

// A shared region of another process, or of this one, at addresses of this device. It is in the ledger of its
// owner alone, and stays where that one ends. REQUIRES: when it ends, all work that uses it here is done.
class OthersDeviceRegion {
 public:
  OthersDeviceRegion() = default;
  // exported: of a region of so many bytes, which the caller may then close. Throws Error(kIo) where the two
  // GPUs do not reach each other. The device outlives it.
  OthersDeviceRegion(Device& device, const Descriptor& exported, std::size_t bytes);
  DeviceAddress address() const;  // 0 where it is empty

 private:
  struct State;
  struct End {
    void operator()(State* state) const;
  };
  std::unique_ptr<State, End> state_;
};

class DeviceFramePool;

// An address range of the device: reserved once, the same for its whole life, with or without memory under
// it. Its end takes its memory away.
class DeviceHome {
 public:
  DeviceHome();
  DeviceHome(DeviceFramePool& pool, std::string name, std::size_t bytes);
  ~DeviceHome();
  DeviceHome(DeviceHome&& other) noexcept;
  DeviceHome& operator=(DeviceHome&& other) noexcept;

  DeviceAddress address() const;
  std::size_t size() const;    // of the range
  std::size_t placed() const;  // bytes from the start that have memory under them

 private:
  friend class DeviceFramePool;
  struct State;
  std::unique_ptr<State> state_;
};

// Budgeted memory in extents of one size that are placed under homes and taken away again. Calls that map may
// hold up the whole GPU, and one that unmaps must wait for all work on those addresses. So an extent stays
// mapped under a home that it was taken from, while other homes use it under their own addresses: what a home
// shows without memory of its own is then unspecified. A home gets those extents that it was assigned, else
// those that are mapped there, where they are free, and else others, which it has missed least often so far.
class DeviceFramePool {
 public:
  // Takes the memory, charged to the ledger as kParameter, as free frames are. extent_bytes is rounded up to
  // what the device maps. The device and the ledger outlive the pool, and the pool outlives its homes.
  DeviceFramePool(Ledger& ledger, Device& device, std::size_t extent_bytes, std::size_t extents);
  ~DeviceFramePool();
  DeviceFramePool(const DeviceFramePool&) = delete;
  DeviceFramePool& operator=(const DeviceFramePool&) = delete;

  std::size_t extents() const;
  std::size_t free_extents() const;
  std::size_t extents_for(std::size_t bytes) const;  // the number of extents that so many bytes take

  // Puts memory under the first `bytes` of the home, rounded up to extents. Its contents are unspecified.
  // What is queued on `user` from now on may use it; other streams may where an event of that stream lets
  // them. Returns false, with nothing changed, where too few extents are free. The caller waits only
  // where an extent must be mapped: the driver may wait for the GPU then, and this waits for work with an
  // address that another extent was mapped to. REQUIRES: no memory is under the home, and `user` does not end
  // before it is taken away.
  bool place(DeviceHome& home, std::size_t bytes, Purpose purpose, CUstream_st* user);
  // Takes all memory away. Who gets it next waits for `last`: events after all work that uses it, and after
  // the place at which it was placed, since the stream waits there for those who had it before.
  void take_away(DeviceHome& home, std::vector<Device::SharedEvent> last);

  // Assigns extents to a home: it gets these from now on, where they are free when it is placed. Those that
  // are mapped there already stay at their places. Where it must be placed with others, these are assigned to
  // it instead. REQUIRES: the numbers are below extents(), none is there twice, and so many are placed under
  // it.
  void assign(DeviceHome& home, std::vector<std::size_t> numbers);
  // The addresses of the homes that have extents which were assigned to this one, or, where none were, are
  // mapped under it; each once.
  std::vector<DeviceAddress> in_the_way(const DeviceHome& home) const;

  std::uint64_t maps() const;  // how many extents were mapped so far
  // Is called before extents are unmapped, once for a home that gets others or ends, and waits for whatever
  // else must not go on meanwhile: kernels, of which nobody can tell from outside which addresses they use.
  void before_unmapping(std::function<void()> wait);

 private:
  friend class DeviceHome;
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace sluice::allocator
