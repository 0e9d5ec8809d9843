#pragma once
#include <string>
#include <vector>

#include "core/json.h"

namespace sluice::cli {

// One thing that this machine offers or lacks.
struct Finding {
  std::string name;
  std::string text;    // what was found
  std::string remedy;  // what to do where something is missing; empty: nothing is
  Json value;
  bool refused = false;  // a folder that was named and cannot be used
};

// Looks at this machine; folders of `disk` are measured. Never throws for what is missing: that is a finding.
std::vector<Finding> examine(const std::vector<std::string>& disk);

}  // namespace sluice::cli
