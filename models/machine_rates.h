#pragma once
#include <vector>

#include "core/threads.h"
#include "engine/plan/plan.h"
#include "kernels/matrix.h"
#include "offload/file.h"
#include "offload/records.h"

namespace sluice::models {

// What measuring takes of memory at a time, and gives back.
inline constexpr std::size_t kMeasuringBytes = std::size_t{16} << 20;

struct DiskRates {
  double read = 0, write = 0;  // bytes per second
};
// Writes and reads back an unnamed file of `bytes` (a multiple of kDiskBlock) in a folder, past the page
// cache. Throws as IoService::open and File::allocate.
DiskRates measure_disk(offload::IoService& io, const std::string& folder, std::uint64_t bytes);

// Measured in a fraction of a second, for the predicted time alone.
engine::MachineRates measure_rates(Threads& threads, kernels::MatrixLibrary& library, offload::IoService& io,
                                   const std::vector<offload::DiskFolder>& disk);

}  // namespace sluice::models
