#pragma once
#include <cstdint>
#include <optional>
#include <string>

#include "models/trainer.h"

namespace sluice::models {

// metrics.jsonl: one JSON object a line, a line a step, appended and given to the system at once. See
// docs/formats/metrics.md. Numbers are printed so that reading them gives the same bits.
class MetricsFile {
 public:
  // Without `resumed_step` a new file: one that holds anything is Error(kInvalidArgument). With it, the lines
  // of later steps, and a last line that a kill cut off, are taken away. A file of something else is refused,
  // unchanged.
  MetricsFile(const std::string& path, std::optional<std::uint64_t> resumed_step);
  ~MetricsFile();
  MetricsFile(const MetricsFile&) = delete;
  MetricsFile& operator=(const MetricsFile&) = delete;

  void add(const StepReport& report);  // throws Error(kIo)

 private:
  std::string path_;
  int descriptor_ = -1;
};

}  // namespace sluice::models
