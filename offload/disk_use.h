#pragma once
#include <cstdint>
#include <string>

#include "offload/file.h"
#include "offload/measure.h"

// Measures the rates of a disk while all cores compute, as they do in a step, and the CPU time that its I/O
// takes from them.
namespace sluice::offload {

// Some disks (mostly in clouds) start faster than they can sustain, so the rates are those after four seconds
// of reading.
struct DiskUse {
  DiskRates rates;
  // Seconds of one core for each byte read or written: the computing time lost, plus a checksum's.
  double processor_seconds = 0;
};

// Streams through an unnamed file of `bytes` by a service with these options, while as many threads as this
// process may use multiply and add. Takes five seconds; with a file of less than 64 MiB, or on a slow disk,
// as long as one pass in each direction. Throws as try_disk(). REQUIRES: bytes is a multiple of kDiskBlock,
// and at least two of them.
DiskUse use_disk(const std::string& folder, std::uint64_t bytes, const IoOptions& io);

}  // namespace sluice::offload
