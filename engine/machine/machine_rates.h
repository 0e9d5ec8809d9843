#pragma once
#include <vector>

#include "core/threads.h"
#include "engine/machine/arithmetic_rates.h"
#include "engine/plan/rates.h"
#include "kernels/matrix.h"
#include "offload/disk_folders.h"

namespace sluice::engine {

// The most that this machine can do, measured in about a second (and what it takes to write and read 256 MiB
// a folder): what a step is held against. flops: fused multiply-adds in registers, or the library's best
// product of that type where that is more; memory_bandwidth: reading one array and writing another; disk: an
// io_uring alone with these options. Throws as offload::BareFile.
MachineRates measure_limits(Threads& threads, kernels::MatrixLibrary& library, Dtype dtype,
                            const std::vector<offload::DiskFolder>& disk, const offload::IoOptions& io);

// Striped folders work at once, at the pace of the slowest.
void add_disk(const std::vector<offload::DiskKnowledge>& disks, MachineRates& rates);

// What a run computes, whose rates are measured.
struct MeasuredWork {
  std::span<const kernels::Product> products;
  kernels::AttentionShape attention;
  Dtype dtype;
  const optim::Optimizer& optimizer;
  std::uint64_t memory_sample = 0;  // bytes with which the bandwidth of memory is measured
};

// An eighth of what is trained, as far as that is a quarter of the memory that was stated; kMeasuringBytes at
// least and kMostMeasuringBytes at most: less than caches hold would be measured at their rate.
std::uint64_t memory_sample(std::uint64_t trained, std::uint64_t memory);

// In some seconds: for the predicted time, and how the disk is kept busy.
MachineRates measure_rates(Threads& threads, kernels::MatrixLibrary& library, const MeasuredWork& work,
                           const std::vector<offload::DiskKnowledge>& disks);

}  // namespace sluice::engine
