#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>

#include "offload/disk_trials.h"

// A cache, valid for some days, of a disk's measured properties: docs/formats/disk_cache.md.
namespace sluice::offload {

struct DiskKnowledge {
  DiskRates rates;               // measured while all cores compute
  IoOptions io;                  // the options that reach these rates
  double processor_seconds = 0;  // time of one core for each byte read or written
  // The rounds of the measurement differed so much that other work must have disturbed it. Such an entry is
  // kept for an hour only.
  bool disturbed = false;
};

// Measures with use_disk(), with the options of the best trial. Throws as use_disk().
DiskKnowledge knowledge_of(const std::string& folder, std::uint64_t bytes, std::span<const DiskTrial> trials);

using MeasureDisk = std::function<DiskKnowledge(const std::string& folder, std::uint64_t bytes)>;

// Returns the cached entry of the folder's disk. Without one it measures now, with a file of `bytes`, while
// no other process of this user measures, and caches the result; failing to cache it is no error. Throws as
// try_disk(). Tests pass a `measure`.
DiskKnowledge know_disk(const std::string& folder, std::uint64_t bytes, const MeasureDisk& measure = {});

// Returns options for one I/O service over all these disks: way and block size of the slowest disk, and
// enough bytes in flight for all disks together. Returns the defaults where there is no disk.
IoOptions options_for(std::span<const DiskKnowledge> disks);

// Caches an entry for the folder's disk. Returns the path of its file, or nothing where it cannot be written;
// `why` then gets the reason.
std::optional<std::string> keep_disk(const std::string& folder, const DiskKnowledge& known, std::string* why);
// Returns the cached entry of the folder's disk, if there is one that has not expired.
std::optional<DiskKnowledge> kept_disk(const std::string& folder);

}  // namespace sluice::offload
