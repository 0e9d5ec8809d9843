#pragma once
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace sluice {

// Returns the directories of this process's control group (cgroup) for a controller ("memory", "cpu"), from
// the group itself up to the root of the mounted hierarchy. A system with both cgroup versions may have the
// controller in both hierarchies.
struct ControlGroup {
  int version = 0;  // 1 or 2
  std::vector<std::string> folders;
};
std::vector<ControlGroup> control_groups(const std::string& root, std::string_view controller);

// Returns the whole text of a file, or nothing where it cannot be read.
std::optional<std::string> file_text(const std::string& path);
// Returns the number at the start of a file, or nothing where there is none (as for the text "max").
std::optional<unsigned long long> file_number(const std::string& path);

}  // namespace sluice
