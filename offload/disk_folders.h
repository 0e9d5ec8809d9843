#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "offload/disk_cache.h"
#include "offload/records.h"

// The disk folders that a user names, checked before any space is allocated there.
namespace sluice::offload {

// The limit of a folder without a stated one: its free space, less the room that checkpoints need.
inline constexpr std::uint64_t kWholeDisk = UINT64_MAX;

// Parses FOLDER or FOLDER:SIZE. A folder whose name ends like a size is written with a slash behind it.
// Throws Error(kInvalidArgument).
DiskFolder parse_disk(const std::string& text);

// Sets the limit of folders without one to their free space, less `reserved` bytes on the file system of
// `out`; where several processes (sharers) allocate there at once, to a share of it. Throws Error(kNotFound)
// for a missing folder, Error(kInvalidArgument) for one that is on no disk or has a stated limit too small to
// be of use, and Error(kBudget) where the free space is too small for the limit or to be of use.
void resolve_disk(std::vector<DiskFolder>& disk, const std::string& out, std::uint64_t reserved,
                  int sharers = 1);
std::uint64_t usable_disk(const std::vector<DiskFolder>& disk);  // of all folders when striped evenly

// Returns the size of a file for measurements: at most `most`, and within the folder's limit.
std::uint64_t bytes_to_measure(const DiskFolder& folder, std::uint64_t most);
// Returns the properties of each folder's disk, cached or measured now: see disk_cache.h.
std::vector<DiskKnowledge> know_disks(const std::vector<DiskFolder>& disk);

}  // namespace sluice::offload
