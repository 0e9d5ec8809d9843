#include "engine/machine/gpu_rates.h"

#include <algorithm>
#include <span>

#include "allocator/device_memory.h"
#include "core/bytes.h"
#include "core/error.h"
#include "core/log.h"
#include "core/system.h"
#include "engine/machine/arithmetic_rates.h"
#include "engine/machine/timing.h"
#include "engine/machine/update_sample.h"
#include "engine/memory/device_work.h"
#include "engine/memory/host_records.h"
#include "optim/device_update.h"
#include "optim/elementwise.h"

namespace sluice::engine {
namespace {

using allocator::DeviceRegion;
using allocator::Purpose;

constexpr std::uint64_t kMostEachWay = 64 * kMiB, kMostUpdated = 256 * kMiB, kLeast = 4 * kMiB;
constexpr std::size_t kPiece = 32 * kMiB;  // about a unit
// Updates are measured with ever more elements, until they take long enough: first those of a chunk, then
// several chunks, which are more than a GPU's caches hold.
constexpr std::size_t kFewestElements = 16 << 10, kGrowth = 8;
constexpr double kLongEnough = 1e-3;  // seconds
// How many times as long the CPU's loops take at most while copies go on both ways.
constexpr double kAtMostSlower = 2;

// Waits for queued work, also where an error ends the measurement: its memory is freed next.
void finish(Device& device, const Device::Stream& stream) {
  try {
    device.synchronize(stream.get());
  } catch (const Error& error) {  // a fault of the device, which the call that found it has reported
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
             queue(is_in, is_out);
             device_.synchronize(in_.get());
             device_.synchronize(out_.get());
           });
  }
  // Begins copies in both directions that take about `seconds` at the rate `both` of the two together.
  void begin(double seconds, double both) const {
    for (double queued = 0; queued < seconds; queued += 2 * static_cast<double>(bytes_) / both)
      queue(true, true);
  }

 private:
  void queue(bool is_in, bool is_out) const {
    for (std::size_t at = 0; at < bytes_; at += kPiece) {
      const std::size_t now = std::min(kPiece, bytes_ - at), out = bytes_ + at;
      if (is_in) device_.copy_in(in_.get(), on_gpu_.address() + at, on_host_.data() + at, now);
      if (is_out) device_.copy_out(out_.get(), on_host_.data() + out, on_gpu_.address() + out, now);
    }
  }

  Device& device_;
  std::size_t bytes_;
  allocator::Ledger ledger_;
  DeviceRegion on_gpu_;
  RegisteredRegion on_host_;
  Device::Stream in_ = device_.make_stream(true), out_ = device_.make_stream(false);
};

class Updates {
 public:
  Updates(Device& device, const optim::Optimizer& optimizer, Dtype dtype, std::size_t bytes,
          double memory_bandwidth)
      : sample_(fitting(optimizer, dtype, bytes, memory_bandwidth)),
        stride_(round_up(sample_.bytes(), kAligned)),
        memory_(ledger_, device, Purpose::kWorkspace, bytes),
        gpu_(device),
        update_(device, optimizer) {
    device.fill(gpu_.updates(), memory_.address(), std::byte{0}, memory_.size());
    for (std::size_t place = 0; place < places(); ++place)
      for (const DeviceWork::Memory& memory : {gradient(place), parameter(place), state(place)})
        gpu_.add(memory, memory.size());
  }
  ~Updates() { gpu_.finish(); }
  Updates(const Updates&) = delete;
  Updates& operator=(const Updates&) = delete;

  double seconds_an_element() {
    for (std::size_t elements = kFewestElements;; elements *= kGrowth) {
      const double seconds = seconds_of(elements);
      if (seconds >= kLongEnough) return seconds / static_cast<double>(elements);
    }
  }

 private:
  static constexpr std::size_t kAligned = 256;

  // A chunk of the engine's least size, or as fits: larger ones take no longer per element.
  static UpdateSample fitting(const optim::Optimizer& optimizer, Dtype dtype, std::size_t bytes,
                              double memory_bandwidth) {
    const UpdateSample any(optimizer, dtype, Dtype::kF32, kFewestElements);
    std::size_t elements = chunk_elements(any.bytes_an_element(), memory_bandwidth);
    while (elements > kFewestElements &&
           UpdateSample(optimizer, dtype, Dtype::kF32, elements).bytes() > bytes)
      elements /= 2;
    return UpdateSample(optimizer, dtype, Dtype::kF32, elements);
  }

  std::size_t places() const { return std::max<std::size_t>(1, memory_.size() / stride_); }
  std::byte* at(std::size_t place) const {
    return reinterpret_cast<std::byte*>(memory_.address()) + place * stride_;
  }
  DeviceWork::Memory bytes_of(const Array& array) const {
    return {static_cast<const std::byte*>(array.data), sample_.elements() * size_of(array.type)};
  }
  DeviceWork::Memory gradient(std::size_t place) const { return bytes_of(sample_.gradient(at(place))); }
  DeviceWork::Memory parameter(std::size_t place) const { return bytes_of(sample_.parameter(at(place))); }
  DeviceWork::Memory state(std::size_t place) const { return {at(place), sample_.state_bytes()}; }

  double seconds_of(std::size_t elements) {
    return middle_seconds([&] {
      for (std::size_t done = 0, place = 0; done < elements; done += sample_.elements(), ++place)
        queue(place % places(), std::min(sample_.elements(), elements - done));
      gpu_.device().synchronize(gpu_.updates());
    });
  }
  void queue(std::size_t place, std::size_t elements) {
    optim::DeviceUpdate::Part part;
    part.hyperparameters.learning_rate = 1e-3;
    part.span = sample_.span(at(place));
    part.span.count = elements;
    const DeviceWork::Memory read[] = {gradient(place)}, written[] = {parameter(place), state(place)};
    gpu_.queue(gpu_.updates(), read, std::span(written).first(sample_.state_bytes() > 0 ? 2 : 1), [&] {
      update_.apply(gpu_.updates(), {&part, 1});
    });
  }

  const UpdateSample sample_;
  const std::size_t stride_;
  allocator::Ledger ledger_;
  DeviceRegion memory_;
  DeviceWork gpu_;
  optim::DeviceUpdate update_;
};

std::size_t room(std::uint64_t bytes, std::uint64_t most) {
  return std::min(bytes, most) / kHugePage * kHugePage;
}

// A loop over less would measure the caches, which are several times as fast as memory.
std::uint64_t beyond_caches() {
  constexpr std::uint64_t kMost = 2048 * kMiB;
  return std::clamp<std::uint64_t>(4 * largest_cache(), kMostMeasuringBytes, kMost);
}

// Copies use memory's bandwidth, too; updates by the CPU beside them have what is left of it.
double measure_updates_beside(const Copies& copies, double both, const GpuWork& work) {
  const std::size_t bytes =
      std::clamp<std::uint64_t>(work.host_bytes / 8, kMostMeasuringBytes, beyond_caches());
  const auto measured = [&](const std::function<void()>& beside) {
    return measure_update_traffic(work.threads, work.optimizer, work.dtype, bytes, beside);
  };
  const double seconds = static_cast<double>(bytes) / measured({});
  return measured([&] { copies.begin(kAtMostSlower * seconds, both); });
}

}  // namespace

bool measure_gpu(const GpuWork& work, MachineRates& rates) {
  if (work.device_bytes < kLeast || work.host_bytes < 2 * kMostMeasuringBytes) return false;
  GpuRates gpu = rates.gpu;
  gpu.source = Source::kMeasured;
  const std::function<void()> begin_phase = work.begin_phase ? work.begin_phase : [] {};
  double bandwidth = 0;
  {
    const Copies copies(work.device,
                        room(std::min(work.device_bytes, work.host_bytes / 2) / 2, kMostEachWay));
    begin_phase();
    gpu.in = copies.bytes_a_second(true, false);
    begin_phase();
    gpu.out = copies.bytes_a_second(false, true);
    begin_phase();
    gpu.both = copies.bytes_a_second(true, true);
    begin_phase();
    bandwidth = measure_updates_beside(copies, gpu.both, work);
  }
  begin_phase();
  if (work.optimizer.elementwise({}))
    gpu.update_seconds =
        Updates(work.device, work.optimizer, work.dtype, room(work.device_bytes, kMostUpdated), bandwidth)
            .seconds_an_element();
  rates.gpu = gpu;
  rates.cores = work.threads.count();
  rates.memory_bandwidth = bandwidth;
  begin_phase();
  rates.update_seconds = measure_update(work.threads, work.optimizer, work.dtype);
  if (work.products != nullptr) rates.flops = measure_square(work.threads, *work.products);
  return true;
}

}  // namespace sluice::engine
