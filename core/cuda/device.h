#pragma once
#include <mutex>

#include "core/cuda/driver.h"
#include "core/cuda/plugin.h"

namespace sluice::cuda {

// A GPU through CUDA's driver API. Each function is one or two driver calls in the device's primary context.
class CudaDevice final : public Device {
 public:
  explicit CudaDevice(int index);
  ~CudaDevice() override;
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  const DeviceInfo& info() const override { return info_; }
  std::size_t free_memory() const override;
  std::size_t measure_context() override;

  Extent create_extent(std::size_t bytes) override;
  void release_extent(Extent extent) override;
  Extent create_shared_extent(std::size_t bytes) override;
  Descriptor export_extent(Extent shared) override;
  Extent import_extent(const Descriptor& exported) override;
  DeviceAddress reserve_addresses(std::size_t bytes) override;
  void free_addresses(DeviceAddress address, std::size_t bytes) override;
  void map(std::size_t bytes, std::span<const Mapping> mappings) override;
  void unmap(DeviceAddress address, std::size_t bytes) override;
  void register_host(std::byte* memory, std::size_t bytes) override;
  void unregister_host(std::byte* memory) override;

  Stream make_stream(bool urgent) override;
  Event make_event(bool timed) override;
  void record(CUevent_st* event, CUstream_st* stream) override;
  void wait(CUstream_st* stream, CUevent_st* event) override;
  bool is_done(CUevent_st* event) override;
  void synchronize(CUevent_st* event) override;
  void synchronize(CUstream_st* stream) override;
  double seconds_between(CUevent_st* first, CUevent_st* second) override;
  void copy_in(CUstream_st* stream, DeviceAddress to, const std::byte* from, std::size_t bytes) override;
  void copy_out(CUstream_st* stream, std::byte* to, DeviceAddress from, std::size_t bytes) override;
  void copy(CUstream_st* stream, DeviceAddress to, DeviceAddress from, std::size_t bytes) override;
  void fill(CUstream_st* stream, DeviceAddress to, std::byte value, std::size_t bytes) override;
  void call(CUstream_st* stream, void (*function)(void*), void* argument) override;
  CUfunc_st* kernel(const char* name) override;
  void launch(CUstream_st* stream, CUfunc_st* kernel, unsigned blocks, unsigned threads,
              const void* arguments) override;
  bool is_capturing(CUstream_st* stream) override;
  void run_in_context(const std::function<void()>& action) override;

 protected:
  void end(CUstream_st* stream) noexcept override;
  void end(CUevent_st* event) noexcept override;

 private:
  Extent create(std::size_t bytes, const CUmemAllocationProp& properties);
  CUresult set_access(DeviceAddress address, std::size_t bytes);

  Driver driver_;
  CUdevice device_ = 0;
  CUcontext context_ = nullptr;
  DeviceInfo info_;
  std::mutex mutex_;
  CUmodule kernels_ = nullptr;  // guarded by mutex_; loaded at the first call of kernel()
};

}  // namespace sluice::cuda
