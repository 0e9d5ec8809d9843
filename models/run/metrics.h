#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "models/run/trainer.h"

namespace sluice::models {

// metrics.jsonl: one JSON object for each step, a line each, appended and flushed to the system at once. See
// docs/formats/metrics.md. Numbers have enough digits to read back the same bits.
class MetricsFile {
 public:
  // `run` is the run's id, which every line has. Without `resumed_step` a file that is not empty is
  // Error(kInvalidArgument). With it, lines of later steps are removed, and an incomplete last line; a file
  // that is not this run's metrics is refused, unchanged.
  MetricsFile(const std::string& path, const std::string& run, std::optional<std::uint64_t> resumed_step);
  ~MetricsFile();
  MetricsFile(const MetricsFile&) = delete;
  MetricsFile& operator=(const MetricsFile&) = delete;

  // Throws Error(kIo) after removing a partly written line.
  void add(const StepReport& report);

 private:
  std::string path_, run_;
  int descriptor_ = -1;
};

// Removes the lines of steps after `resumed_step` from this run's metrics files of ranks that no longer take
// part (numbers `ranks` and higher), and logs each. Warns of a file beside rank 0's that is not this run's,
// or cannot be shortened, and leaves it.
void cut_metrics_of_absent_ranks(const std::string& first, int ranks, const std::string& run,
                                 std::uint64_t resumed_step);

// Throws Error(kInvalidArgument) where the file is not empty: a new run would mix its lines with others.
void refuse_other_metrics(const std::string& path);

}  // namespace sluice::models
