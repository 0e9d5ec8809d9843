#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include "comm/communicator.h"
#include "comm/nccl.h"
#include "core/device.h"
#include "kernels/device_sum.h"

namespace sluice::engine {

// How fast bytes pass between the GPUs of ranks, all of them at the same time.
struct BetweenGpus {
  double bytes_a_second = 0;  // of the slowest one; 0: none pass
  std::string problem = {};   // why not
  // Carries the bytes; null: GPUs read each other's memory.
  std::unique_ptr<comm::Nccl> nccl = {};
  std::uint64_t nccl_bytes = 0;  // of the GPU's memory, which NCCL has taken
};
// The most ranks whose GPUs exchange pieces.
inline constexpr int kMostBetweenGpus = kernels::DeviceSum::kMostRanks;
// Tries whether the GPU of each rank can read the memory of all others' GPUs. Collective, with the same
// result on all ranks. Meanwhile takes GPU memory that only a ledger of its own counts: up to 128 MiB, and at
// most `bytes`, of which it needs 4 MiB. refused: why this rank refuses; empty: it does not. Throws as
// comm::Communicator::exchange().
BetweenGpus measure_reads_between_gpus(comm::Communicator& communicator, Device& device, std::uint64_t bytes,
                                       const std::string& refused);
// The same for messages by NCCL, between hosts, too. The GPU memory that NCCL takes comes on top.
BetweenGpus measure_nccl(comm::Communicator& communicator, Device& device, std::uint64_t bytes,
                         const std::string& refused);

}  // namespace sluice::engine
