#pragma once
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "offload/measure.h"

namespace sluice::cli {

// A job of fio: one stream by io_uring past the page cache, with buffers on huge pages where there are some.
struct FioJob {
  bool writes = false;
  offload::StreamShape shape;
  bool registered = false;  // buffers and files are registered with the ring
};
std::string to_text(const FioJob& job);  // "16 x 512.0 KiB, registered buffers"

// Runs jobs one after another, each over an existing file of `bytes`, or for two seconds. Returns their bytes
// a second, or nothing where fio is missing or fails; `why` then gets the reason. fio is killed when this
// process ends.
std::optional<std::vector<double>> fio_rates(const std::string& path, std::uint64_t bytes,
                                             std::span<const FioJob> jobs, std::string* why);

// The fastest job of each direction, over all tried block sizes, depths and buffers.
struct FioBest {
  FioJob write, read;
};
std::optional<FioBest> best_fio(const std::string& path, std::uint64_t bytes, std::string* why);

}  // namespace sluice::cli
