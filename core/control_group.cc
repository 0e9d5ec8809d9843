#include "core/control_group.h"

#include <fmt/core.h>

#include <charconv>
#include <fstream>
#include <iterator>
#include <sstream>

namespace sluice {
namespace {

struct Mount {
  int version = 0;
  std::string group;   // the hierarchy's group that is mounted
  std::string folder;  // where it is mounted
};

bool has_word(const std::string& list, std::string_view word) {
  return ("," + list + ",").find(fmt::format(",{},", word)) != std::string::npos;
}

// Parses a line such as "31 23 0:28 / /sys/fs/cgroup rw shared:1 - cgroup2 cgroup2 rw": group and folder are
// the fourth and fifth word; the file system's type and options follow the dash.
std::optional<Mount> parse_mount(const std::string& line, std::string_view controller) {
  const std::size_t dash = line.find(" - ");
  if (dash == std::string::npos) return std::nullopt;
  std::istringstream before(line.substr(0, dash)), after(line.substr(dash + 3));
  std::string skipped, type, options;
  Mount mount;
  before >> skipped >> skipped >> skipped >> mount.group >> mount.folder;
  after >> type >> skipped >> options;
  if (type == "cgroup2") mount.version = 2;
  if (type == "cgroup" && has_word(options, controller)) mount.version = 1;
  return mount.version == 0 ? std::nullopt : std::optional(mount);
}

// Returns the process's path in the hierarchy. Lines look like "4:memory:/path", and "0::/path" in version 2.
std::optional<std::string> group_path(const std::string& root, int version, std::string_view controller) {
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (version == 2 ? controllers.empty() : has_word(controllers, controller))
      return line.substr(second + 1);
  }
  return std::nullopt;
}

// Returns the part of the path below the mounted group. A process's group outside of that appears as the
// mounted one.
std::string path_below(const Mount& mount, const std::string& path) {
  const std::string prefix = mount.group == "/" ? "" : mount.group;
  const bool inside = path.compare(0, prefix.size(), prefix) == 0 && path.find("/..") == std::string::npos &&
                      (path.size() == prefix.size() || path[prefix.size()] == '/');
  return inside && path != "/" ? path.substr(prefix.size()) : "";
}

}  // namespace

std::vector<ControlGroup> control_groups(const std::string& root, std::string_view controller) {
  std::vector<ControlGroup> groups;
  std::ifstream file(root + "/proc/self/mountinfo");
  for (std::string line; std::getline(file, line);) {
    const std::optional<Mount> mount = parse_mount(line, controller);
    if (!mount) continue;
    const std::optional<std::string> path = group_path(root, mount->version, controller);
    if (!path) continue;
    ControlGroup group{mount->version, {}};
    for (std::string below = path_below(*mount, *path); !below.empty(); below.resize(below.rfind('/')))
      group.folders.push_back(root + mount->folder + below);
    group.folders.push_back(root + mount->folder);
    groups.push_back(std::move(group));
  }
  return groups;
}

std::optional<std::string> file_text(const std::string& path) {
  std::ifstream file(path);
  if (!file) return std::nullopt;
  return std::string(std::istreambuf_iterator<char>(file), {});
}

std::optional<unsigned long long> file_number(const std::string& path) {
  const std::optional<std::string> text = file_text(path);
  unsigned long long value = 0;
  if (!text || std::from_chars(text->data(), text->data() + text->size(), value).ec != std::errc())
    return std::nullopt;
  return value;
}

}  // namespace sluice
