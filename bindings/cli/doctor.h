#pragma once
#include <optional>
#include <string>
#include <vector>

#include "core/json.h"
#include "engine/machine/machine.h"

namespace sluice::cli {

// One thing that this machine offers or lacks.
struct Finding {
  std::string name;
  std::string text;    // what was found
  std::string remedy;  // what to do where something is missing; empty: nothing is
  Json value;
  bool refused = false;  // a folder that was named and cannot be used
};

struct Examination {
  std::vector<Finding> findings;
  std::optional<engine::Machine> machine;  // nothing where its arithmetic cannot be measured
};

// Looks at this machine and measures its arithmetic, in two seconds, and folders of `disk`. Never throws for
// what is missing: that is a finding.
Examination examine(const std::vector<std::string>& disk);

}  // namespace sluice::cli
