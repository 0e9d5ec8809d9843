#pragma once
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "offload/measure.h"

namespace sluice::cli {

// How fio moves a file: by io_uring past the page cache, from buffers in huge pages where the machine gives
// them.
struct FioJob {
  bool writes = false;
  offload::StreamShape shape;
  bool registered = false;  // buffers and files
};
std::string to_text(const FioJob& job);  // "16 x 512.0 KiB, registered buffers"

// Bytes a second of jobs that run one after another, each over a file of `bytes` that is there already, or
// for two seconds. Nothing where fio is not installed or fails; `why` then says which. It ends with this
// process.
std::optional<std::vector<double>> fio_rates(const std::string& path, std::uint64_t bytes,
                                             std::span<const FioJob> jobs, std::string* why);

// The quickest job of all block sizes, depths and buffers that are tried.
struct FioBest {
  FioJob write, read;
};
std::optional<FioBest> best_fio(const std::string& path, std::uint64_t bytes, std::string* why);

}  // namespace sluice::cli
