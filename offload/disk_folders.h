#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "offload/disk_cache.h"
#include "offload/records.h"

// The folders that a user names, before any of their space is taken.
namespace sluice::offload {

// The limit of a folder for which none is stated: what is free there, less the room that checkpoints need.
inline constexpr std::uint64_t kWholeDisk = UINT64_MAX;

// Reads FOLDER or FOLDER:SIZE. A folder whose name ends like a size is meant with a slash behind it. Throws
// Error(kInvalidArgument).
DiskFolder parse_disk(const std::string& text);

// Gives folders without a limit what is free there, less `reserved` bytes on the file system of `out`, or a
// share of it where several processes, the sharers, take space there at once. Throws
// Error(kNotFound) for a missing folder, Error(kInvalidArgument) for one that is on no disk or was given less
// than is of use, Error(kBudget) for a limit beyond what is free.
void resolve_disk(std::vector<DiskFolder>& disk, const std::string& out, std::uint64_t reserved,
                  int sharers = 1);
std::uint64_t usable_disk(const std::vector<DiskFolder>& disk);  // striped evenly

// At most so many bytes, and never more than the folder was given.
std::uint64_t bytes_to_measure(const DiskFolder& folder, std::uint64_t most);
// What is known of each folder's disk, measured now or in the last days: see disk_cache.h.
std::vector<DiskKnowledge> know_disks(const std::vector<DiskFolder>& disk);

}  // namespace sluice::offload
