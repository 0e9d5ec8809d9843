#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "offload/file.h"
#include "offload/measure.h"

// Finds by trying how a disk is best kept busy: by an io_uring or by how many threads, in blocks of which
// size, and with how many blocks under way.
namespace sluice::offload {

struct DiskTrial {
  IoOptions io;
  DiskRates rates;    // those of the best round, since other work only takes away
  double steady = 1;  // the median round's rate as a share of the best, in the direction that varied more
};

// The most bytes that a service with these options has under way.
std::uint64_t in_flight(const IoOptions& io);

inline constexpr std::uint64_t kMostInFlight = std::uint64_t{16} << 20;

// Writes and reads back parts of an unnamed file of `bytes`, through the File seam: first tries ways and
// block sizes, and then, with the best of them, numbers of blocks under way. Takes a second or two (on a slow
// disk as long as each trial needs once) and kMostInFlight of memory. Throws as IoService::open() and
// File::allocate(). REQUIRES: bytes is a multiple of kDiskBlock.
std::vector<DiskTrial> try_disk(const std::string& folder, std::uint64_t bytes);

// Of the trials within 3% of the quickest (for a byte written and one read), returns the one with the fewest
// bytes under way; of equal ones, an io_uring rather than threads. REQUIRES: trials is not empty.
const DiskTrial& best_trial(std::span<const DiskTrial> trials);

}  // namespace sluice::offload
