#include "models/machine_rates.h"

#include <algorithm>
#include <chrono>

#include "allocator/memory.h"
#include "core/bytes.h"
#include "kernels/elementwise.h"

namespace sluice::models {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int kRounds = 3;
constexpr std::uint64_t kDiskSample = 64 * kMiB;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// The best of a few rounds: the first one is also the warming up.
template <class Work>
double best_seconds(const Work& work) {
  double best = 1e9;
  for (int round = 0; round < kRounds; ++round) {
    const Clock::time_point begin = Clock::now();
    work();
    best = std::min(best, seconds_since(begin));
  }
  return std::max(best, 1e-9);
}

double measure_products(Threads& threads, kernels::MatrixLibrary& library) {
  constexpr std::size_t kSide = 768;
  allocator::Ledger unlimited;
  const allocator::Region memory(unlimited, allocator::Purpose::kWorkspace,
                                 3 * kSide * kSide * sizeof(float));
  auto* values = reinterpret_cast<float*>(memory.data());
  kernels::fill(threads, 2 * kSide * kSide, 0.5f, Array{values, Dtype::kF32});
  kernels::Product product;
  product.m = product.n = product.k = kSide;
  product.a = {values, Dtype::kF32};
  product.b = {values + kSide * kSide, Dtype::kF32};
  product.c = {values + 2 * kSide * kSide, Dtype::kF32};
  return 2.0 * kSide * kSide * kSide / best_seconds([&] { library.multiply_f32(product); });
}

double measure_memory(Threads& threads) {
  constexpr std::size_t kCount = kMeasuringBytes / 2 / sizeof(float);
  allocator::Ledger unlimited;
  const allocator::Region memory(unlimited, allocator::Purpose::kWorkspace, kMeasuringBytes);
  auto* values = reinterpret_cast<float*>(memory.data());
  const auto copy = [&] {
    kernels::convert(threads, kCount, ConstArray{values, Dtype::kF32}, Array{values + kCount, Dtype::kF32});
  };
  return static_cast<double>(kMeasuringBytes) / best_seconds(copy);
}

// Transfers of 1 MiB, eight at a time.
template <class Transfer>
double transfer_rate(std::uint64_t bytes, std::span<std::byte> memory, const Transfer& transfer) {
  const Clock::time_point begin = Clock::now();
  for (std::uint64_t offset = 0; offset < bytes;) {
    offload::Batch batch;
    for (std::size_t at = 0; at < memory.size() && offset < bytes; at += kMiB, offset += kMiB)
      transfer(offset, memory.subspan(at, std::min(kMiB, bytes - offset)), batch.add());
    batch.wait();
  }
  return static_cast<double>(bytes) / std::max(seconds_since(begin), 1e-9);
}

// Never more than the folder was given.
std::uint64_t sample_bytes(std::uint64_t limit) {
  return std::min(kDiskSample, limit / kDiskBlock * kDiskBlock);
}

}  // namespace

DiskRates measure_disk(offload::IoService& io, const std::string& folder, std::uint64_t bytes) {
  allocator::Ledger unlimited;
  const allocator::Region memory(unlimited, allocator::Purpose::kStaging, 8 * kMiB);
  // A pattern that no disk compresses to nothing.
  for (std::size_t i = 0; i < memory.size(); ++i)
    memory.data()[i] = static_cast<std::byte>(i * 2654435761u >> 13);
  const auto file = io.open(folder, offload::OpenMode::kUnnamed);
  file->allocate(bytes);
  DiskRates rates;
  rates.write = transfer_rate(bytes, memory.bytes(),
                              [&](std::uint64_t offset, std::span<std::byte> part, offload::Done done) {
                                file->write(offset, part, std::move(done));
                              });
  rates.read = transfer_rate(bytes, memory.bytes(),
                             [&](std::uint64_t offset, std::span<std::byte> part, offload::Done done) {
                               file->read(offset, part, std::move(done));
                             });
  return rates;
}

engine::MachineRates measure_rates(Threads& threads, kernels::MatrixLibrary& library, offload::IoService& io,
                                   const std::vector<offload::DiskFolder>& disk) {
  engine::MachineRates rates;
  rates.flops = measure_products(threads, library);
  rates.memory_bandwidth = measure_memory(threads);
  DiskRates slowest = {1e18, 1e18};
  for (const offload::DiskFolder& folder : disk) {
    const DiskRates measured = measure_disk(io, folder.path, sample_bytes(folder.limit));
    slowest = {std::min(slowest.read, measured.read), std::min(slowest.write, measured.write)};
  }
  if (!disk.empty()) {  // striped: all folders work at once, at the pace of the slowest
    rates.disk_read = slowest.read * static_cast<double>(disk.size());
    rates.disk_write = slowest.write * static_cast<double>(disk.size());
  }
  return rates;
}

}  // namespace sluice::models
