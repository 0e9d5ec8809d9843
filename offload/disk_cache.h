#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>

#include "offload/disk_trials.h"

// Keeps for some days what was measured of a disk: docs/formats/disk_cache.md.
namespace sluice::offload {

struct DiskKnowledge {
  DiskRates rates;               // measured beside work on all cores
  IoOptions io;                  // reach these rates
  double processor_seconds = 0;  // of one core, for each byte that is read or written
  // Rounds of the measurement differed so much that other work must have disturbed it. It is kept an hour.
  bool disturbed = false;
};

// Measures with use_disk(), with the options of the best of these trials. Throws as use_disk().
DiskKnowledge knowledge_of(const std::string& folder, std::uint64_t bytes, std::span<const DiskTrial> trials);

using MeasureDisk = std::function<DiskKnowledge(const std::string& folder, std::uint64_t bytes)>;

// Returns what is kept of the folder's disk. Else measures it now, with a file of `bytes`, while no other
// process of this user measures, and keeps the result; where it cannot be kept, that is no error. Throws as
// try_disk(). Tests pass a `measure`.
DiskKnowledge know_disk(const std::string& folder, std::uint64_t bytes, const MeasureDisk& measure = {});

// Returns options for one service of all these disks: the slowest disk's way and block, and as many bytes
// under way as all disks together need. Returns the defaults where there is no disk.
IoOptions options_for(std::span<const DiskKnowledge> disks);

// Keeps what is known of the folder's disk. Returns the path of the entry, or nothing where it cannot be
// written; `why` then says why.
std::optional<std::string> keep_disk(const std::string& folder, const DiskKnowledge& known, std::string* why);
// Returns what is kept of the folder's disk and is not too old.
std::optional<DiskKnowledge> kept_disk(const std::string& folder);

}  // namespace sluice::offload
