#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "offload/measure.h"

// What is known of a disk, from this run or one of the last days: docs/formats/disk_cache.md.
namespace sluice::offload {

struct DiskKnowledge {
  DiskRates rates;              // with in_flight bytes under way
  std::uint64_t in_flight = 0;  // that reach 95% of the best rates, reading and writing
};

// Blocks of a stream that is measured, and the most of them under way.
inline constexpr StreamShape kMeasuredShape{std::size_t{512} << 10, 32};

// Writes and reads back an unnamed file of `bytes` (a multiple of kDiskBlock), with less and less under way
// as long as that costs no speed. Takes kMeasuredShape.bytes() of memory meanwhile. Throws as IoService::open
// and File::allocate.
DiskKnowledge measure_disk(IoService& io, const std::string& folder, std::uint64_t bytes);

// What is kept of the folder's disk, or else measured now and kept. Throws as measure_disk; that nothing can
// be kept is no error.
DiskKnowledge know_disk(IoService& io, const std::string& folder, std::uint64_t bytes);

// Keeps it. Returns where, or nothing where that is not possible; `why` then says why.
std::optional<std::string> keep_disk(const IoService& io, const std::string& folder,
                                     const DiskKnowledge& known, std::string* why);
// What is kept and still counts.
std::optional<DiskKnowledge> kept_disk(const IoService& io, const std::string& folder);

}  // namespace sluice::offload
