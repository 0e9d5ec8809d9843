#pragma once
#include <cstdint>
#include <string>

#include "comm/communicator.h"
#include "core/device.h"
#include "kernels/device_sum.h"

namespace sluice::engine {

// How fast GPUs read each other's memory, all of them at the same time.
struct BetweenGpus {
  double bytes_a_second = 0;  // of the slowest one; 0: they do not
  std::string problem = {};   // why not
};
// The most ranks that may read each other's memory.
inline constexpr int kMostBetweenGpus = kernels::DeviceSum::kMostRanks;
// Tries whether the GPU of each rank can read the memory of all others' GPUs. Collective, with the same
// result on all ranks. Meanwhile takes GPU memory that only a ledger of its own counts: up to 128 MiB, and at
// most `bytes`, of which it needs 4 MiB. refused: why this rank refuses; empty: it does not. Throws as
// comm::Communicator::exchange().
BetweenGpus measure_between_gpus(comm::Communicator& communicator, Device& device, std::uint64_t bytes,
                                 const std::string& refused);

}  // namespace sluice::engine
