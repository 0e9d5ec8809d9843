#pragma once
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "allocator/ledger.h"
#include "core/device.h"

// Memory of a GPU and the GPU addresses at which it is mapped: the counterpart of memory.h. All of it is
// charged to the tier kDevice. Sizes are multiples of DeviceInfo::extent_bytes (2 MiB mostly).
//
// A GPU works asynchronously, so memory is in use until the work queued on streams is done. The caller that
// takes memory away passes events after that work; the next user's stream waits for them, and the caller does
// not. Thread rule: one thread at a time for all objects of one device.
namespace sluice::allocator {

// A GPU buffer at a fixed address, with unspecified contents. Throws Error(kBudget) where the ledger or the
// device refuses the memory. REQUIRES: all work that uses it is done before it is destroyed.
class DeviceRegion {
 public:
  DeviceRegion() = default;
  // shared: whether other processes of the host may use it.
  DeviceRegion(Ledger& ledger, Device& device, Purpose purpose, std::size_t bytes, bool shared = false);
  DeviceAddress address() const;  // 0 where it is empty
  std::size_t size() const;
  // Returns a descriptor by which another process opens it. Throws Error(kIo) where it is empty or not
  // shared.
  Descriptor exported() const;

 private:
  struct State;
  struct End {
    void operator()(State* state) const;
  };
  std::unique_ptr<State, End> state_;
};

// A shared region of another process, or of this one, mapped at addresses of this device. Only its owner's
// ledger has it. It stays valid after the owner has ended. REQUIRES: all work that uses it here is done
// before it is destroyed.
class OthersDeviceRegion {
 public:
  OthersDeviceRegion() = default;
  // exported: a descriptor of a region of `bytes` bytes, which the caller may close afterwards. Throws
  // Error(kIo) where the two GPUs have no peer access. The device outlives this object.
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

// A reserved address range of the device, the same for its whole life, with or without memory mapped at it.
// Destroying it returns its extents to the pool.
class DeviceHome {
 public:
  DeviceHome();
  DeviceHome(DeviceFramePool& pool, std::string name, std::size_t bytes);
  ~DeviceHome();
  DeviceHome(DeviceHome&& other) noexcept;
  DeviceHome& operator=(DeviceHome&& other) noexcept;

  DeviceAddress address() const;
  std::size_t size() const;    // of the range, in bytes
  std::size_t placed() const;  // bytes from the start that have memory

 private:
  friend class DeviceFramePool;
  struct State;
  std::unique_ptr<State> state_;
};

// Budgeted GPU memory in extents of one size, which are placed at homes and taken away again.
//
// Mapping may stall the whole GPU, and unmapping must wait for all work on those addresses. So an extent that
// was taken from a home stays mapped there while other homes use it at their own addresses; the contents of a
// home without memory are then unspecified. A home gets the extents assigned to it, or without any those
// mapped there, where they are free. In place of others it gets free ones, first those that it has wanted in
// vain least often.
class DeviceFramePool {
 public:
  // Allocates the memory and charges it as kParameter, like all free frames. extent_bytes is rounded up to
  // the device's granularity. The device and the ledger outlive the pool, and the pool outlives its homes.
  DeviceFramePool(Ledger& ledger, Device& device, std::size_t extent_bytes, std::size_t extents);
  ~DeviceFramePool();
  DeviceFramePool(const DeviceFramePool&) = delete;
  DeviceFramePool& operator=(const DeviceFramePool&) = delete;

  std::size_t extents() const;
  std::size_t free_extents() const;
  std::size_t extents_for(std::size_t bytes) const;  // the number of extents that hold this many bytes

  // Places extents at the first `bytes` of the home, rounded up to extents, with unspecified contents. Work
  // queued on `user` from now on may use them; other streams must first wait for an event of `user`. Returns
  // false, with nothing changed, where too few extents are free. The caller blocks only where an extent must
  // be mapped: it waits for work at addresses at which another extent was mapped, and the driver may wait for
  // the GPU. REQUIRES: the home has no memory, and `user` is not destroyed before the memory is taken away.
  bool place(DeviceHome& home, std::size_t bytes, Purpose purpose, CUstream_st* user);
  // Takes all memory of the home away. The next user's stream waits for `last`: events after all work that
  // used the memory. They must also be after the stream's position at place(), since the stream waits there
  // for earlier users.
  void take_away(DeviceHome& home, std::vector<Device::SharedEvent> last);

  // Assigns extents to a home: place() uses them from now on where they are free. Extents that are mapped
  // there already keep their places. Where other extents must be placed, these are assigned instead.
  // REQUIRES: the numbers are distinct and below extents(), and as many are placed at it each time.
  void assign(DeviceHome& home, std::vector<std::size_t> numbers);
  // Returns the addresses of homes that now hold extents assigned to this one, or, where none are assigned,
  // mapped at it; each once.
  std::vector<DeviceAddress> in_the_way(const DeviceHome& home) const;

  std::uint64_t maps() const;  // the number of extents mapped so far
  // Sets a function that is called before extents are unmapped, once for each home that gets other extents or
  // is destroyed. It waits for work that may still use the addresses: kernels of clients, whose memory
  // accesses are not known here.
  void before_unmapping(std::function<void()> wait);

 private:
  friend class DeviceHome;
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace sluice::allocator
