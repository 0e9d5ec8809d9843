#pragma once
#include <optional>
#include <string>
#include <vector>

#include "core/json.h"
#include "engine/machine/machine.h"

namespace sluice::cli {

// One thing that this machine has or lacks.
struct Finding {
  std::string name;
  std::string text;    // what was found
  std::string remedy;  // what to do where something is missing, else ""
  Json value;
  bool refused = false;  // the finding is a named folder that cannot be used
};

struct Examination {
  std::vector<Finding> findings;
  std::optional<engine::Machine> machine;  // nothing where arithmetic cannot be measured
};

// Of the driver, of each card and of the kernels for it. What cannot be used is a finding; it does not throw.
std::vector<Finding> gpu_findings();

// Examines this machine, measures its arithmetic (for two seconds) and the folders of `disk`. It does not
// throw where something is missing: that is a finding.
Examination examine(const std::vector<std::string>& disk);

}  // namespace sluice::cli
