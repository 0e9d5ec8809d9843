#include "engine/machine/machine_rates.h"

#include <algorithm>
#include <array>

#include "allocator/memory.h"
#include "core/bytes.h"
#include "engine/machine/timing.h"
#include "kernels/elementwise.h"
#include "kernels/limits.h"

namespace sluice::engine {
namespace {

constexpr std::uint64_t kLimitSample = 256 * kMiB;

double measure_square(Threads& threads, kernels::MatrixLibrary& library, Dtype dtype, std::size_t side) {
  return measure_product(threads, library, product_of(side, side, side, dtype));
}

double measure_multiply_adds(Threads& threads) {
  constexpr std::size_t kTimes = 10'000'000;
  double operations = 0;
  const double seconds = best_seconds([&] { operations = kernels::multiply_add(threads, kTimes); });
  return operations / seconds;
}

double measure_memory_limit(Threads& threads) {
  constexpr std::size_t kBytes = 128 * kMiB;
  allocator::Ledger unlimited;
  const allocator::Region memory(unlimited, allocator::Purpose::kWorkspace, 2 * kBytes);
  using Stream = kernels::MemoryStream;
  const std::array<Stream, 2> streams = {Stream{memory.data(), kBytes, Stream::Touch::kRead},
                                         Stream{memory.data() + kBytes, kBytes, Stream::Touch::kWrite}};
  double seconds = 1e9;
  for (const auto stores : {kernels::Stores::kPlain, kernels::Stores::kPastCaches})
    seconds = std::min(seconds, best_seconds([&] { kernels::go_through(threads, streams, stores); }));
  return 2.0 * static_cast<double>(kBytes) / seconds;
}

offload::DiskRates measure_disk_limit(const std::string& folder, std::uint64_t bytes,
                                      const offload::IoOptions& io) {
  const offload::StreamShape shape{io.block_bytes, std::max<std::size_t>(1, in_flight(io) / io.block_bytes)};
  allocator::Ledger unlimited;
  const allocator::Region memory(unlimited, allocator::Purpose::kStaging, shape.bytes());
  offload::fill_for_measuring(memory.bytes());
  offload::BareFile file(folder, bytes);
  file.measure(shape, memory.bytes());  // does not count: writing into reserved space is slower
  return file.measure(shape, memory.bytes());
}

void stripe(std::span<const offload::DiskRates> folders, MachineRates& rates) {
  if (folders.empty()) return;
  offload::DiskRates slowest = folders.front();
  for (const offload::DiskRates& folder : folders)
    slowest = {std::min(slowest.read, folder.read), std::min(slowest.write, folder.write),
               std::min(slowest.together, folder.together)};
  const auto count = static_cast<double>(folders.size());
  rates.disk_read = slowest.read * count;
  rates.disk_write = slowest.write * count;
  rates.disk_together = slowest.together * count;
}

// Bytes that memory moves per received byte. A rank gives about as much: one byte is copied into shared
// memory, and another one out of it. Over TCP the kernel's copies and packets take several times as long, as
// measured with Open MPI (docs/benchmarks.md).
double bytes_moved(bool on_one_host) { return on_one_host ? 4 : 14; }

// Bytes a second that one thread copies; more where a core's share of the memory's bandwidth is more.
constexpr double kMemoryOfThread = 10e9;

}  // namespace

void add_disk(const std::vector<offload::DiskKnowledge>& disks, int ranks, MachineRates& rates) {
  std::vector<offload::DiskRates> found;
  if (!disks.empty()) rates.disk_in_flight = 0;
  for (const offload::DiskKnowledge& disk : disks) {
    found.push_back(disk.rates);
    rates.disk_in_flight += in_flight(disk.io);
    rates.disk_processor_seconds = std::max(rates.disk_processor_seconds, disk.processor_seconds);
  }
  stripe(found, rates);
  for (double* rate : {&rates.disk_read, &rates.disk_write, &rates.disk_together}) *rate /= ranks;
}

void share_cores(int ranks, int threads, int measured, int cores, MachineRates& rates) {
  const double own = std::min<double>(threads, static_cast<double>(cores) / ranks);
  const double crowd = std::min(measured, cores) / own;
  for (ProductRate& product : rates.products) product.flops /= crowd;
  rates.flops /= crowd;
  if (rates.attention) *rates.attention /= crowd;
  rates.memory_bandwidth /= crowd;
  if (rates.update_seconds) *rates.update_seconds *= crowd;
}

double rank_processor_seconds(int ranks, int threads, int cores, bool on_one_host, double memory_bandwidth) {
  return ranks * (threads + 1) <= cores ? 0 : bytes_moved(on_one_host) / memory_bandwidth;
}

double seconds_of_received_byte(bool on_one_host, const MachineRates& rates) {
  const double alone = std::max(kMemoryOfThread, rates.memory_bandwidth / rates.cores);
  return bytes_moved(on_one_host) / std::min(alone, rates.memory_bandwidth);
}

std::uint64_t memory_sample(std::uint64_t trained, std::uint64_t memory) {
  return std::clamp<std::uint64_t>(std::min(trained / 8, memory / 4), kMeasuringBytes, kMostMeasuringBytes);
}

MachineRates measure_rates(Threads& threads, kernels::MatrixLibrary& library, const MeasuredWork& work,
                           const std::vector<offload::DiskKnowledge>& disks) {
  MachineRates rates;
  rates.cores = threads.count();
  rates.products = measure_products(threads, library, work.products, work.memory_sample);
  rates.flops = measure_square(threads, library, Dtype::kF32, 768);
  rates.attention = measure_attention(threads, work.attention, work.dtype);
  rates.memory_bandwidth = measure_memory(threads, work.memory_sample);
  rates.update_seconds = measure_update(threads, work.optimizer, work.dtype);
  add_disk(disks, work.ranks, rates);
  return rates;
}

MachineRates measure_limits(Threads& threads, kernels::MatrixLibrary& library, Dtype dtype,
                            const std::vector<offload::DiskFolder>& disk, const offload::IoOptions& io) {
  MachineRates rates;
  rates.are_limits = true;
  rates.flops = measure_multiply_adds(threads);
  for (const std::size_t side : {768, 2048})
    rates.flops = std::max(rates.flops, measure_square(threads, library, dtype, side));
  rates.memory_bandwidth = measure_memory_limit(threads);
  std::vector<offload::DiskRates> found;
  for (const offload::DiskFolder& folder : disk)
    found.push_back(measure_disk_limit(folder.path, offload::bytes_to_measure(folder, kLimitSample), io));
  stripe(found, rates);
  return rates;
}

}  // namespace sluice::engine
