#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "offload/file.h"
#include "offload/measure.h"

// Finds by trials which I/O options make best use of a disk: io_uring or a number of threads, the block size,
// and the number of blocks in flight.
namespace sluice::offload {

struct DiskTrial {
  IoOptions io;
  DiskRates rates;    // of the fastest round, since other work can only slow a round down
  double steady = 1;  // the median round's rate divided by the best one's, in the direction that varied more
};

// Returns the most bytes that a service with these options has in flight.
std::uint64_t in_flight(const IoOptions& io);

inline constexpr std::uint64_t kMostInFlight = std::uint64_t{16} << 20;

// Writes and reads back parts of an unnamed file of `bytes`, through the File interface. It first tries ways
// and block sizes, and then numbers of blocks in flight for the best of them. Takes a second or two (on a
// slow disk as long as one pass of each trial) and kMostInFlight of memory. Throws as IoService::open() and
// File::allocate(). REQUIRES: bytes is a multiple of kDiskBlock.
std::vector<DiskTrial> try_disk(const std::string& folder, std::uint64_t bytes);

// Returns, of the trials within 3% of the fastest (by seconds for a byte written and one read), the one with
// the fewest bytes in flight; of equal ones, io_uring rather than threads. REQUIRES: trials is not empty.
const DiskTrial& best_trial(std::span<const DiskTrial> trials);

}  // namespace sluice::offload
