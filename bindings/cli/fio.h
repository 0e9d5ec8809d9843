#pragma once
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "offload/measure.h"

namespace sluice::cli {

// One stream of fio, by io_uring past the page cache, from buffers on huge pages where there are some.
struct FioJob {
  bool writes = false;
  offload::StreamShape shape;
  bool registered = false;  // buffers and files are registered with the ring
};
std::string to_text(const FioJob& job);  // "16 x 512.0 KiB, registered buffers"

// Returns the bytes a second of jobs that run one after another, each over an existing file of `bytes`, or
// for two seconds. Returns nothing where fio is missing or fails; `why` then says which. fio ends with this
// process.
std::optional<std::vector<double>> fio_rates(const std::string& path, std::uint64_t bytes,
                                             std::span<const FioJob> jobs, std::string* why);

// The quickest job of each direction, of all block sizes, depths and buffers that are tried.
struct FioBest {
  FioJob write, read;
};
std::optional<FioBest> best_fio(const std::string& path, std::uint64_t bytes, std::string* why);

}  // namespace sluice::cli
