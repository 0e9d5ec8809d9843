#pragma once
#include <cstdint>
#include <string>

#include "comm/communicator.h"
#include "core/device.h"
#include "kernels/device_sum.h"

namespace sluice::engine {

// How fast GPUs read each other's memory, while all of them do.
struct BetweenGpus {
  double bytes_a_second = 0;  // of the slowest one; 0: they do not
  std::string problem = {};   // why not
};
// How many ranks may read each other's memory.
inline constexpr int kMostBetweenGpus = kernels::DeviceSum::kMostRanks;
// Finds out, by trying it, whether the GPU of each rank reads the memory of all others' GPUs. Collective,
// with the same result on all ranks. Takes memory of the GPU meanwhile, which no ledger but one of its own
// counts: up to 128 MiB, and at most `bytes`, of which 4 MiB are the least. refused: why this rank wants none
// of it; empty: it may be. Throws as comm::Communicator::exchange().
BetweenGpus measure_between_gpus(comm::Communicator& communicator, Device& device, std::uint64_t bytes,
                                 const std::string& refused);

}  // namespace sluice::engine
