#pragma once
#include <vector>

#include "core/threads.h"
#include "engine/machine/arithmetic_rates.h"
#include "engine/plan/rates.h"
#include "kernels/matrix.h"
#include "offload/disk_folders.h"

namespace sluice::engine {

// Measures the limits of this machine, with which steps are compared, in about a second and the time to write
// and read 256 MiB in each folder. flops: multiply-adds in registers, or the library's best product of that
// type where that is more; memory_bandwidth: reading one array and writing another; disk: an io_uring alone
// with these options. Throws as offload::BareFile.
MachineRates measure_limits(Threads& threads, kernels::MatrixLibrary& library, Dtype dtype,
                            const std::vector<offload::DiskFolder>& disk, const offload::IoOptions& io);

// Adds the disk's rates for each of the ranks that share it: they use it at the same time, about equally.
// Striped folders work in parallel, at the pace of the slowest.
void add_disk(const std::vector<offload::DiskKnowledge>& disks, int ranks, MachineRates& rates);

// Turns rates that a process of `measured` threads reached alone into those of each of `ranks` ranks of
// `threads` threads: a rank has as many cores as threads, and at most its share of the machine's.
void share_cores(int ranks, int threads, int measured, int cores, MachineRates& rates);

// Seconds of its cores that a rank spends per received byte, as rank_processor_seconds: 0 where the machine
// has a core more for each of its ranks, whose transport then runs beside computing.
double rank_processor_seconds(int ranks, int threads, int cores, bool on_one_host, double memory_bandwidth);

// The same for a thread that does nothing else, as beside a GPU.
double seconds_of_received_byte(bool on_one_host, const MachineRates& rates);

struct MeasuredWork {
  std::span<const kernels::Product> products;
  kernels::AttentionShape attention;
  Dtype dtype;
  const optim::Optimizer& optimizer;
  std::uint64_t memory_sample = 0;  // bytes of the array for measuring the bandwidth of memory
  int ranks = 1;                    // that share the disks
};

// The size of that array: an eighth of the bytes that are trained, but at most a quarter of the stated
// memory, and from kMeasuringBytes to kMostMeasuringBytes: a smaller array would be in the caches.
std::uint64_t memory_sample(std::uint64_t trained, std::uint64_t memory);

// Measures, in some seconds, the rates for predicting time and for streaming updates.
MachineRates measure_rates(Threads& threads, kernels::MatrixLibrary& library, const MeasuredWork& work,
                           const std::vector<offload::DiskKnowledge>& disks);

}  // namespace sluice::engine
