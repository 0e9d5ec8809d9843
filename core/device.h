#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "core/descriptor.h"

// CUDA's own names of what its calls return: a stream of this type is also one of PyTorch's.
struct CUstream_st;
struct CUevent_st;
struct CUfunc_st;

namespace sluice {

// CUDA's default stream, by the handle that is no null pointer: a null one means that there is none.
inline CUstream_st* default_stream() { return reinterpret_cast<CUstream_st*>(std::uintptr_t{1}); }

// A GPU: its memory, and the work that it is given. Everything is CUDA's driver interface, which a plug-in
// loads where there is one (core/cuda); what this header leaves unsaid is as NVIDIA documents it there.
//
// Work is queued on streams, and goes on while the caller does. A call that queues work returns at once; the
// memory that it names must stay as it is until an event that was recorded after it is done.
//
// Thread rule: any thread may call, several at once. Calls act in the device's primary context, which PyTorch
// also uses, and leave the calling thread's current context as it was. A client may capture its streams into
// graphs meanwhile, in any of CUDA's modes and on any thread: calls with other streams do not end the
// capture, and are not part of it. CUDA's default stream counts as captured while a stream that was not made
// non-blocking is.
//
// Each call throws Error(kIo) where the driver reports a failure, with the device's index and address, the
// call's name, its arguments and the driver's words, and Error(kBudget) where the device has too little
// memory. What the driver takes itself is measure_context(), and for tables of pages some more, which is in
// no ledger. After a fault of the device itself (a kernel that touched what is not there) every later call
// fails, and only a new process helps.

using DeviceAddress = std::uint64_t;

struct DeviceInfo {
  int index = 0;  // among the devices that this process may use
  std::string name;
  std::string pci_address;       // "0000:1b:00.0"
  int major = 0, minor = 0;      // the compute capability
  int multiprocessors = 0;       // of which each runs blocks of threads
  int copy_engines = 0;          // how many copies may be under way at once
  int driver = 0;                // the CUDA version that the driver speaks, as 13000
  std::size_t memory = 0;        // in bytes
  std::size_t extent_bytes = 0;  // physical memory is taken and mapped in multiples of it
};

class Device {
 public:
  virtual ~Device() = default;
  virtual const DeviceInfo& info() const = 0;
  // The bytes that nobody has taken, this process and all others counted.
  virtual std::size_t free_memory() const = 0;
  // The bytes that a context with Sluice's kernels takes, as the one that this process has on the device: one
  // more is made for the purpose, and ends. What others take or give back meanwhile counts, too. Throws as
  // kernel(), and Error(kBudget) where the GPU has no room for one more, or allows none.
  virtual std::size_t measure_context() = 0;

  // Physical memory, and the addresses under which it is seen. All sizes and addresses are multiples of
  // info().extent_bytes. An extent is always mapped whole, and may be mapped at several addresses.
  using Extent = std::uint64_t;
  virtual Extent create_extent(std::size_t bytes) = 0;
  virtual void release_extent(Extent extent) = 0;  // its memory is free when its last mapping ends, too
  // An extent that other processes of the host may import. Their GPUs read and write it where the two GPUs
  // reach each other (NVLink, or PCIe's peer access), or are the same one. What one process has queued the
  // other one's events do not know: they tell each other by other means when it is done. Its memory is free
  // when all of them have released it, and ended their mappings. Errors are those of create_extent().
  virtual Extent create_shared_extent(std::size_t bytes) = 0;
  // What a process imports the extent by, which the caller gets and closes. Of other extents it is
  // Error(kIo).
  virtual Descriptor export_extent(Extent shared) = 0;
  // Throws Error(kIo) where the descriptor is of no extent. It is the caller's then, who may close it. To map
  // the extent, which is whole as it was made, is Error(kIo) where the GPUs do not reach each other.
  virtual Extent import_extent(const Descriptor& exported) = 0;
  virtual DeviceAddress reserve_addresses(std::size_t bytes) = 0;
  virtual void free_addresses(DeviceAddress address, std::size_t bytes) = 0;  // nothing is mapped there
  struct Mapping {
    DeviceAddress address;
    Extent extent;
  };
  // Maps extents of so many bytes each, all or none of them, at ascending addresses of one reservation. What
  // lies between them is mapped already. The device may then read and write there.
  virtual void map(std::size_t bytes, std::span<const Mapping> mappings) = 0;
  void map(DeviceAddress address, std::size_t bytes, Extent extent) {
    const Mapping one{address, extent};
    map(bytes, {&one, 1});
  }
  // Ends the mapping of one extent. All work that was queued with these addresses must be done.
  virtual void unmap(DeviceAddress address, std::size_t bytes) = 0;

  // Host memory must be registered while copies of it are queued. It is present then, and never moves. A copy
  // is within one registration, which has less than 512 GiB: drivers refuse more.
  virtual void register_host(std::byte* memory, std::size_t bytes) = 0;
  virtual void unregister_host(std::byte* memory) = 0;

  struct EndStream {
    Device* device;
    void operator()(CUstream_st* stream) const { device->end(stream); }
  };
  struct EndEvent {
    Device* device;
    void operator()(CUevent_st* event) const { device->end(event); }
  };
  // They end before the device. A stream does not wait for the default one. Of an urgent stream the device
  // begins work first. Work that is queued on a stream still runs when the stream has ended.
  using Stream = std::unique_ptr<CUstream_st, EndStream>;
  using Event = std::unique_ptr<CUevent_st, EndEvent>;
  using SharedEvent = std::shared_ptr<CUevent_st>;  // of several users, who record it no more
  virtual Stream make_stream(bool urgent) = 0;
  virtual Event make_event(bool timed = false) = 0;  // one that is timed costs more

  // An event is done when everything is that was queued on the stream before it was recorded; one that was
  // never recorded is done. Recording it again makes it mean the new place.
  virtual void record(CUevent_st* event, CUstream_st* stream) = 0;
  virtual void wait(CUstream_st* stream, CUevent_st* event) = 0;  // the stream waits, and not the caller
  virtual bool is_done(CUevent_st* event) = 0;
  virtual void synchronize(CUevent_st* event) = 0;  // the caller waits
  virtual void synchronize(CUstream_st* stream) = 0;
  virtual double seconds_between(CUevent_st* first, CUevent_st* second) = 0;  // both timed and done

  virtual void copy_in(CUstream_st* stream, DeviceAddress to, const std::byte* from, std::size_t bytes) = 0;
  virtual void copy_out(CUstream_st* stream, std::byte* to, DeviceAddress from, std::size_t bytes) = 0;
  virtual void copy(CUstream_st* stream, DeviceAddress to, DeviceAddress from, std::size_t bytes) = 0;
  virtual void fill(CUstream_st* stream, DeviceAddress to, std::byte value, std::size_t bytes) = 0;
  // Calls the function, which calls nothing of CUDA, on a thread of the driver's.
  virtual void call(CUstream_st* stream, void (*function)(void*), void* argument) = 0;
  // A kernel of Sluice's by its name (core/cuda/kernel.h). It lives as long as the device. Throws
  // Error(kNotFound) where the file of kernels is not there, is of another build, or has nothing that the
  // driver can use, and Error(kCorrupt) where it is not whole.
  virtual CUfunc_st* kernel(const char* name) = 0;
  // Runs the kernel in so many blocks of so many threads. `arguments` is its structure of arguments, which is
  // copied.
  virtual void launch(CUstream_st* stream, CUfunc_st* kernel, unsigned blocks, unsigned threads,
                      const void* arguments) = 0;
  // Whether what is queued on the stream becomes a graph, and is not run.
  virtual bool is_capturing(CUstream_st* stream) = 0;

 protected:
  virtual void end(CUstream_st* stream) noexcept = 0;
  virtual void end(CUevent_st* event) noexcept = 0;
};

// Opens a device by its index. It holds the device's primary context until it is destroyed. Throws
// Error(kNotFound), with the remedy, where the plug-in or the driver is not there, or is too old; where the
// process may use no device, or a smaller number of them than `index` asks for; and where the device lacks
// what Sluice needs. Throws Error(kIo) where the device is busy or has failed. $SLUICE_CUDA_DRIVER names
// another file than the driver's, which has its functions.
std::unique_ptr<Device> open_device(int index);
// How many devices this process may use, of which some may be unfit. Throws as open_device() where there is
// no plug-in, no driver, or no device.
int device_count();

}  // namespace sluice
