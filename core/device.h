#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "core/descriptor.h"

// CUDA's own handle types, so that a stream here is also one of PyTorch's.
struct CUstream_st;
struct CUevent_st;
struct CUfunc_st;

namespace sluice {

// Returns CUDA's legacy default stream as a non-null handle; a null pointer means "no stream" here.
inline CUstream_st* default_stream() { return reinterpret_cast<CUstream_st*>(std::uintptr_t{1}); }

// A GPU: its memory, and the work queued on it. Device wraps CUDA's driver API, which a plug-in loads where
// there is one (core/cuda); where this header is silent, NVIDIA's documentation of that API holds.
//
// Work is queued on streams and runs asynchronously. A call that queues work returns at once. The memory that
// it names must stay valid and unchanged until an event recorded after it is done.
//
// Thread rule: any thread, several at once. Calls use the device's primary context, which PyTorch also uses,
// and leave the calling thread's current context as it was. A client may be capturing its streams into CUDA
// graphs, in any capture mode and on any thread: calls with other streams neither end the capture nor become
// part of it. The default stream counts as captured while a stream that was not made non-blocking is.
//
// Each call throws Error(kIo) where the driver reports a failure, with the device's index and PCI address,
// the call's name, its arguments and the driver's text, and Error(kBudget) where the device lacks memory. The
// driver's own memory (measure_context(), and some more for page tables) is in no ledger. After a fault of
// the device (a kernel accessed an invalid address) every later call fails until the process is restarted.

using DeviceAddress = std::uint64_t;

struct DeviceInfo {
  int index = 0;  // index among the devices visible to this process
  std::string name;
  std::string pci_address;       // "0000:1b:00.0"
  std::string uuid;              // no other GPU has it, and no other MIG instance of the same card
  int major = 0, minor = 0;      // the compute capability
  int multiprocessors = 0;       // number of SMs
  int copy_engines = 0;          // number of copies that may run concurrently
  int driver = 0;                // the CUDA version that the driver supports, as 13000
  std::size_t memory = 0;        // in bytes
  std::size_t extent_bytes = 0;  // granularity of allocating and mapping physical memory, in bytes
};

class Device {
 public:
  virtual ~Device() = default;
  virtual const DeviceInfo& info() const = 0;
  // Returns the bytes that no process has allocated.
  virtual std::size_t free_memory() const = 0;
  // Returns the bytes that one CUDA context with Sluice's kernels takes on the device, measured by creating
  // and destroying another one. Allocations of other processes during the call falsify the result. Throws as
  // kernel(), and Error(kBudget) where the GPU has no memory for another context or allows none.
  virtual std::size_t measure_context() = 0;

  // Physical memory, and the virtual addresses it is mapped at. All sizes and addresses are multiples of
  // info().extent_bytes. An extent is always mapped whole, and may be mapped at several addresses.
  using Extent = std::uint64_t;
  virtual Extent create_extent(std::size_t bytes) = 0;
  virtual void release_extent(Extent extent) = 0;  // frees the memory once its last mapping has ended, too
  // Creates an extent that other processes of the host may import. Their GPUs access it over NVLink or PCIe
  // peer access, or are the same GPU. Events do not order work across processes, which must synchronize by
  // other means. The memory is freed when all processes have released the extent and unmapped it. Throws as
  // create_extent().
  virtual Extent create_shared_extent(std::size_t bytes) = 0;
  // Returns a file descriptor by which another process imports the extent; the caller closes it. Throws
  // Error(kIo) for an extent that is not shared.
  virtual Descriptor export_extent(Extent shared) = 0;
  // Throws Error(kIo) where the descriptor is of no extent. The caller may close the descriptor afterwards.
  // The extent has the size that it was created with; mapping it throws Error(kIo) where the GPUs have no
  // peer access.
  virtual Extent import_extent(const Descriptor& exported) = 0;
  virtual DeviceAddress reserve_addresses(std::size_t bytes) = 0;
  virtual void free_addresses(DeviceAddress address, std::size_t bytes) = 0;  // REQUIRES: nothing is mapped
  struct Mapping {
    DeviceAddress address;
    Extent extent;
  };
  // Maps extents of `bytes` each, all or none of them, at ascending addresses of one reservation, for reading
  // and writing by the device. REQUIRES: the addresses between them are mapped already.
  virtual void map(std::size_t bytes, std::span<const Mapping> mappings) = 0;
  void map(DeviceAddress address, std::size_t bytes, Extent extent) {
    const Mapping one{address, extent};
    map(bytes, {&one, 1});
  }
  // Unmaps one extent. REQUIRES: all work that was queued with these addresses is done.
  virtual void unmap(DeviceAddress address, std::size_t bytes) = 0;

  // Registers (pins) host memory, which asynchronous copies need: it becomes resident and never moves. A copy
  // lies within one registration, which has less than 512 GiB, since drivers refuse more.
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
  // Streams and events are destroyed before the device. Streams are non-blocking: they do not synchronize
  // with the default stream. An urgent stream has the highest priority. Work that is queued on a stream still
  // runs after the stream has been destroyed.
  using Stream = std::unique_ptr<CUstream_st, EndStream>;
  using Event = std::unique_ptr<CUevent_st, EndEvent>;
  using SharedEvent = std::shared_ptr<CUevent_st>;  // shared by several users; none of them records it again
  virtual Stream make_stream(bool urgent) = 0;
  virtual Event make_event(bool timed = false) = 0;  // a timed event costs more

  // An event is done when all work is that was queued on the stream before the event was recorded, or if it
  // was never recorded. Recording it again replaces the earlier recording.
  virtual void record(CUevent_st* event, CUstream_st* stream) = 0;
  virtual void wait(CUstream_st* stream, CUevent_st* event) = 0;  // blocks the stream, not the caller
  virtual bool is_done(CUevent_st* event) = 0;
  virtual void synchronize(CUevent_st* event) = 0;  // blocks the caller
  virtual void synchronize(CUstream_st* stream) = 0;
  virtual double seconds_between(CUevent_st* first, CUevent_st* second) = 0;  // REQUIRES: both timed and done

  virtual void copy_in(CUstream_st* stream, DeviceAddress to, const std::byte* from, std::size_t bytes) = 0;
  virtual void copy_out(CUstream_st* stream, std::byte* to, DeviceAddress from, std::size_t bytes) = 0;
  virtual void copy(CUstream_st* stream, DeviceAddress to, DeviceAddress from, std::size_t bytes) = 0;
  virtual void fill(CUstream_st* stream, DeviceAddress to, std::byte value, std::size_t bytes) = 0;
  // Queues a call of the host function, on a thread of the driver's. The function must not call CUDA.
  virtual void call(CUstream_st* stream, void (*function)(void*), void* argument) = 0;
  // Returns one of Sluice's kernels by its name (core/cuda/kernel.h); it lives as long as the device. Throws
  // Error(kNotFound) where the file of kernels is missing, is of another build, or has no code that the
  // driver can use, and Error(kCorrupt) where it is damaged.
  virtual CUfunc_st* kernel(const char* name) = 0;
  // Queues a launch of `blocks` blocks of `threads` threads. `arguments` is the kernel's argument structure,
  // which is copied.
  virtual void launch(CUstream_st* stream, CUfunc_st* kernel, unsigned blocks, unsigned threads,
                      const void* arguments) = 0;
  // Whether work queued on the stream is being captured into a graph instead of being run.
  virtual bool is_capturing(CUstream_st* stream) = 0;
  // Calls `action` with the device's context current, for libraries that work with the current one.
  virtual void run_in_context(const std::function<void()>& action) = 0;

 protected:
  virtual void end(CUstream_st* stream) noexcept = 0;
  virtual void end(CUevent_st* event) noexcept = 0;
};

// Opens a device by its index and retains its primary context. Throws Error(kNotFound), with the remedy,
// where the plug-in or the driver is missing or too old, where the process has no device or too few for
// `index`, and where the device lacks a feature that Sluice needs. Throws Error(kIo) where the device is busy
// or has failed. $SLUICE_CUDA_DRIVER may name a library to load in place of the driver's.
std::unique_ptr<Device> open_device(int index);
// Returns the number of devices visible to this process, of which some may be unfit. Throws as open_device()
// where there is no plug-in, no driver, or no device.
int device_count();

}  // namespace sluice
