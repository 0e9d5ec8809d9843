#pragma once
#include <optional>
#include <string>
#include <vector>

#include "core/json.h"
#include "engine/machine/machine.h"

namespace sluice::cli {

// A property of this machine, present or missing.
struct Finding {
  std::string name;
  std::string text;    // what was found
  std::string remedy;  // what to do where something is missing, or ""
  Json value;
  bool refused = false;  // it is about a named folder that cannot be used
};

struct Examination {
  std::vector<Finding> findings;
  std::optional<engine::Machine> machine;  // nothing where arithmetic cannot be measured
};

// Examines the driver, each GPU and the kernels for it. An unusable one is a finding, not an exception.
std::vector<Finding> gpu_findings();

// Examines this machine, and measures its arithmetic (for two seconds) and the folders of `disk`. Something
// missing is a finding, not an exception.
Examination examine(const std::vector<std::string>& disk);

}  // namespace sluice::cli
