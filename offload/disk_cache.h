#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>

#include "offload/disk_trials.h"

// What is known of a disk, from this run or one of the last days: docs/formats/disk_cache.md.
namespace sluice::offload {

struct DiskKnowledge {
  DiskRates rates;               // beside work on all cores
  IoOptions io;                  // that reach them
  double processor_seconds = 0;  // of one core, for each byte that is read or written
  // Rounds of the measurement differed so much that something else was at work: what is kept counts for an
  // hour.
  bool disturbed = false;
};

// What use_disk() finds with the best of these. Throws as that.
DiskKnowledge knowledge_of(const std::string& folder, std::uint64_t bytes, std::span<const DiskTrial> trials);

using MeasureDisk = std::function<DiskKnowledge(const std::string& folder, std::uint64_t bytes)>;

// What is kept of the folder's disk, or else measured now, with a file of `bytes`, and kept. Throws as
// try_disk; that nothing can be kept is no error. `measure`: in place of try_disk, for tests.
DiskKnowledge know_disk(const std::string& folder, std::uint64_t bytes, const MeasureDisk& measure = {});

// Options for one service of all these disks; the slowest disk's way and block, and as much under way as all
// together. Where there is no disk, the defaults.
IoOptions options_for(std::span<const DiskKnowledge> disks);

// Keeps it. Returns where, or nothing where that is not possible; `why` then says why.
std::optional<std::string> keep_disk(const std::string& folder, const DiskKnowledge& known, std::string* why);
// What is kept and still counts.
std::optional<DiskKnowledge> kept_disk(const std::string& folder);

}  // namespace sluice::offload
