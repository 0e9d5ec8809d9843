#pragma once
#include <cstdint>
#include <string>

#include "offload/file.h"
#include "offload/measure.h"

// What a disk gives to a step, which computes on all cores meanwhile, and what it takes of them.
namespace sluice::offload {

// Disks that are lent by the second (of clouds, mostly) give more for some seconds than they keep up: rates
// are those that are left after four seconds of reading.
struct DiskUse {
  DiskRates rates;
  // Of one core, for each byte that is read or written: what the cores computed less meanwhile, and a
  // checksum.
  double processor_seconds = 0;
};

// Streams through an unnamed file of `bytes` (a multiple of kDiskBlock, two at least) by a service with these
// options, beside as many threads as this process may use that multiply and add. Takes five seconds; with a
// file of less than 64 MiB, or on a slow disk, as long as each way needs once. Throws as try_disk.
DiskUse use_disk(const std::string& folder, std::uint64_t bytes, const IoOptions& io);

}  // namespace sluice::offload
