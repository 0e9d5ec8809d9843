#include "engine/machine/gpu_rates.h"

#include <algorithm>

#include "allocator/device_memory.h"
#include "core/bytes.h"
#include "core/error.h"
#include "core/log.h"
#include "engine/machine/arithmetic_rates.h"
#include "engine/machine/timing.h"
#include "engine/machine/update_sample.h"
#include "engine/store/host_records.h"
#include "optim/device_update.h"
#include "optim/elementwise.h"

namespace sluice::engine {
namespace {

using allocator::DeviceRegion;
using allocator::Purpose;

constexpr std::uint64_t kMostEachWay = 64 * kMiB, kMostUpdated = 256 * kMiB, kLeast = 4 * kMiB;
constexpr std::size_t kPiece = 32 * kMiB;  // about a unit
// Updates are measured with more and more elements, until they take long enough. A GPU's caches hold as many
// as a MiB of elements, so that what counts is the last one.
constexpr std::size_t kFewestElements = 16 << 10, kGrowth = 8;
constexpr double kLongEnough = 1e-3;  // seconds

// Waits for what is queued, also where an error ends the measurement: its memory goes next.
void finish(Device& device, const Device::Stream& stream) {
  try {
    device.synchronize(stream.get());
  } catch (const Error& error) {  // the device has had a fault, which the call that found it has reported
    log().debug("{}", error.what());
  }
}

class Copies {
 public:
  Copies(Device& device, std::size_t bytes)
      : device_(device),
        bytes_(bytes),
        on_gpu_(ledger_, device, Purpose::kStaging, 2 * bytes),
        on_host_(ledger_, device, Purpose::kStaging, 2 * bytes) {}
  ~Copies() {
    finish(device_, in_);
    finish(device_, out_);
  }
  Copies(const Copies&) = delete;
  Copies& operator=(const Copies&) = delete;

  double bytes_a_second(bool is_in, bool is_out) const {
    const double ways = (is_in ? 1 : 0) + (is_out ? 1 : 0);
    return ways * static_cast<double>(bytes_) / middle_seconds([&] {
             for (std::size_t at = 0; at < bytes_; at += kPiece) {
               const std::size_t now = std::min(kPiece, bytes_ - at), out = bytes_ + at;
               if (is_in) device_.copy_in(in_.get(), on_gpu_.address() + at, on_host_.data() + at, now);
               if (is_out) device_.copy_out(out_.get(), on_host_.data() + out, on_gpu_.address() + out, now);
             }
             device_.synchronize(in_.get());
             device_.synchronize(out_.get());
           });
  }

 private:
  Device& device_;
  std::size_t bytes_;
  allocator::Ledger ledger_;
  DeviceRegion on_gpu_;
  RegisteredRegion on_host_;
  Device::Stream in_ = device_.make_stream(true), out_ = device_.make_stream(false);
};

class Updates {
 public:
  Updates(Device& device, const optim::Optimizer& optimizer, Dtype dtype, std::size_t bytes)
      : device_(device),
        optimizer_(optimizer),
        dtype_(dtype),
        memory_(ledger_, device, Purpose::kWorkspace, bytes),
        update_(device, optimizer) {
    device.fill(stream_.get(), memory_.address(), std::byte{0}, memory_.size());
  }
  ~Updates() { finish(device_, stream_); }
  Updates(const Updates&) = delete;
  Updates& operator=(const Updates&) = delete;

  double seconds_an_element() {
    double found = 0;
    for (std::size_t elements = kFewestElements;; elements *= kGrowth) {
      const UpdateSample sample(optimizer_, dtype_, Dtype::kF32, elements);
      if (sample.bytes() > memory_.size()) return found;
      const double seconds = seconds_of(sample);
      found = seconds / static_cast<double>(elements);
      if (seconds >= kLongEnough) return found;
    }
  }

 private:
  double seconds_of(const UpdateSample& sample) {
    const optim::Span span = sample.span(reinterpret_cast<std::byte*>(memory_.address()));
    return middle_seconds([&] {
      update_.apply(stream_.get(), {.learning_rate = 1e-3}, span);
      device_.synchronize(stream_.get());
    });
  }

  Device& device_;
  const optim::Optimizer& optimizer_;
  Dtype dtype_;
  allocator::Ledger ledger_;
  DeviceRegion memory_;
  Device::Stream stream_ = device_.make_stream(false);
  optim::DeviceUpdate update_;
};

std::size_t room(std::uint64_t bytes, std::uint64_t most) {
  return std::min(bytes, most) / kHugePage * kHugePage;
}

}  // namespace

bool measure_gpu(const GpuWork& work, MachineRates& rates) {
  if (work.device_bytes < kLeast || work.host_bytes < kMostMeasuringBytes) return false;
  GpuRates gpu = rates.gpu;
  gpu.source = Source::kMeasured;
  {
    const Copies copies(work.device, room(std::min(work.device_bytes, work.host_bytes) / 2, kMostEachWay));
    gpu.in = copies.bytes_a_second(true, false);
    gpu.out = copies.bytes_a_second(false, true);
    gpu.both = copies.bytes_a_second(true, true);
  }
  if (work.optimizer.elementwise({}))
    gpu.update_seconds =
        Updates(work.device, work.optimizer, work.dtype, room(work.device_bytes, kMostUpdated))
            .seconds_an_element();
  rates.gpu = gpu;
  rates.memory_bandwidth = measure_memory(work.threads, kMostMeasuringBytes);
  rates.update_seconds = measure_update(work.threads, work.optimizer, work.dtype);
  if (work.products != nullptr) rates.flops = measure_square(work.threads, *work.products);
  return true;
}

}  // namespace sluice::engine
