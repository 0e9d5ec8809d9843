#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "models/run/trainer.h"

namespace sluice::models {

// metrics.jsonl: one JSON object a line, a line a step, appended and given to the system at once. See
// docs/formats/metrics.md. Numbers are printed so that reading them gives the same bits.
class MetricsFile {
 public:
  // `run`: the run's id, which every line carries. Without `resumed_step` a file that holds anything is
  // Error(kInvalidArgument). With it the lines of later steps are removed, and a last one that a kill cut
  // off; a file that is not this run's metrics is refused, unchanged.
  MetricsFile(const std::string& path, const std::string& run, std::optional<std::uint64_t> resumed_step);
  ~MetricsFile();
  MetricsFile(const MetricsFile&) = delete;
  MetricsFile& operator=(const MetricsFile&) = delete;

  // Throws Error(kIo), and then removes what was written of the line.
  void add(const StepReport& report);

 private:
  std::string path_, run_;
  int descriptor_ = -1;
};

// Removes the lines of steps after `resumed_step` from files beside rank 0's that are of this run, and of
// ranks that take no part in it now (`ranks` and higher). Says so of each. Warns of a file that is not this
// run's, or cannot be shortened, and leaves it.
void cut_metrics_of_absent_ranks(const std::string& first, int ranks, const std::string& run,
                                 std::uint64_t resumed_step);

// Throws Error(kInvalidArgument) where the file holds anything: a new run would mix its lines with it.
void refuse_other_metrics(const std::string& path);

}  // namespace sluice::models
