#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "offload/file.h"
#include "offload/measure.h"

// How a disk is best kept busy: by an io_uring or by how many threads, in blocks of which size, with how many
// of them under way. Found by trying.
namespace sluice::offload {

struct DiskTrial {
  IoOptions io;
  DiskRates rates;  // the best of its rounds: other work only takes away
  double steady =
      1;  // the share of that which its rounds had in the middle, of the direction that varied more
};

// Bytes that a service with these options has under way at most.
std::uint64_t in_flight(const IoOptions& io);

inline constexpr std::uint64_t kMostInFlight = std::uint64_t{16} << 20;

// Writes and reads back parts of an unnamed file of `bytes` (a multiple of kDiskBlock) through the File seam:
// first ways and blocks, then how many of the best are under way. Takes a second or two, on a slow disk as
// long as each trial needs once, and kMostInFlight of memory. Throws as IoService::open and
// File::allocate.
std::vector<DiskTrial> try_disk(const std::string& folder, std::uint64_t bytes);

// Of those within 3% of the quickest (for a byte written and one read) the one with the least under way; of
// these an io_uring rather than threads. REQUIRES: there is one.
const DiskTrial& best_trial(std::span<const DiskTrial> trials);

}  // namespace sluice::offload
