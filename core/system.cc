#include "core/system.h"

#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <sstream>

#include "core/bytes.h"
#include "core/control_group.h"

#ifndef UFFD_USER_MODE_ONLY
#define UFFD_USER_MODE_ONLY 1
#endif

namespace sluice {
namespace {

constexpr std::array<std::string_view, 20> kSimdFeatures = {
    "sse4_2",   "avx",      "avx2",        "fma",         "f16c",        "avx_vnni", "avx512f",
    "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16",
    "amx_int8", "asimd",    "bf16",        "i8mm",        "sve",         "sve2"};

// Finds the number after a word at the start of a line: "MemTotal:  24 kB", "total_inactive_file 4096".
std::optional<std::size_t> number_after(const std::string& text, const std::string& word) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    unsigned long long value = 0;
    if (line.compare(0, word.size(), word) == 0 && line.size() > word.size() && line[word.size()] == ' ' &&
        std::sscanf(line.c_str() + word.size(), "%llu", &value) == 1)
      return value;
  }
  return std::nullopt;
}

// Returns the text after the colon of the first line that begins with the key.
std::string cpuinfo_value(const std::string& root, std::string_view key) {
  std::istringstream lines(file_text(root + "/proc/cpuinfo").value_or(""));
  for (std::string line; std::getline(lines, line);) {
    const std::size_t colon = line.find(':');
    if (colon == std::string::npos || line.compare(0, key.size(), key) != 0) continue;
    if (line.find_first_not_of(" \t", key.size()) != colon) continue;
    const std::size_t begin = line.find_first_not_of(" \t", colon + 1);
    return begin == std::string::npos ? "" : line.substr(begin);
  }
  return "";
}

struct GroupMemory {
  std::size_t limit = 0;
  std::size_t available = 0;
};

// The kernel counts cached file pages as used, but reclaims them when the group needs memory.
GroupMemory group_memory(std::size_t limit, std::size_t used, const std::string& stat,
                         const std::string& prefix) {
  const std::size_t cached = number_after(stat, prefix + "inactive_file").value_or(0) +
                             number_after(stat, prefix + "active_file").value_or(0);
  const std::size_t held = used - std::min(used, cached);
  return {limit, limit - std::min(limit, held)};
}

std::optional<GroupMemory> group_memory_at(int version, const std::string& folder) {
  const std::string stat = file_text(folder + "/memory.stat").value_or("");
  if (version == 1) {
    const auto limit = file_number(folder + "/memory.limit_in_bytes");
    if (!limit) return std::nullopt;
    return group_memory(*limit, file_number(folder + "/memory.usage_in_bytes").value_or(0), stat, "total_");
  }
  const auto hard = file_number(folder + "/memory.max"), soft = file_number(folder + "/memory.high");
  if (!hard && !soft) return std::nullopt;
  const std::size_t limit = std::min(hard.value_or(SIZE_MAX), soft.value_or(SIZE_MAX));
  return group_memory(limit, file_number(folder + "/memory.current").value_or(0), stat, "");
}

// Returns the number of cores that a folder's quota allows, or nothing without a quota.
std::optional<double> quota_at(int version, const std::string& folder) {
  double quota = 0, period = 0;
  if (version == 2) {
    const std::string text = file_text(folder + "/cpu.max").value_or("");
    if (std::sscanf(text.c_str(), "%lf %lf", &quota, &period) != 2) return std::nullopt;
  } else {  // "no limit" is -1, which file_number() does not read
    quota = static_cast<double>(file_number(folder + "/cpu.cfs_quota_us").value_or(0));
    period = static_cast<double>(file_number(folder + "/cpu.cfs_period_us").value_or(0));
  }
  if (!(quota > 0 && period > 0)) return std::nullopt;
  return quota / period;
}

int cpus_of_affinity() {
  for (std::size_t most = 1024; most <= (std::size_t{1} << 20); most *= 2) {
    cpu_set_t* set = CPU_ALLOC(most);
    const std::size_t bytes = CPU_ALLOC_SIZE(most);
    const bool known = ::sched_getaffinity(0, bytes, set) == 0;
    const int count = known ? CPU_COUNT_S(bytes, set) : 0;
    CPU_FREE(set);
    if (known) return count;
  }
  return 1;
}

std::string first_line(const std::string& path) {
  const std::optional<std::string> text = file_text(path);
  return text ? text->substr(0, text->find('\n')) : "";
}

}  // namespace

MemoryState memory_state(const std::string& root) {
  const std::string info = file_text(root + "/proc/meminfo").value_or("");
  MemoryState state;
  if (const auto kib = number_after(info, "MemTotal:")) {
    state.total = *kib * kKiB;
    state.with_swap = state.total + number_after(info, "SwapTotal:").value_or(0) * kKiB;
  }
  if (const auto kib = number_after(info, "MemAvailable:")) state.available = *kib * kKiB;
  for (const ControlGroup& group : control_groups(root, "memory"))
    for (const std::string& folder : group.folders) {
      const std::optional<GroupMemory> memory = group_memory_at(group.version, folder);
      if (!memory) continue;
      state.available = std::min(state.available, memory->available);
      if (memory->limit >= state.total) continue;
      state.total = memory->limit;
      state.group_limit = memory->limit;
    }
  return state;
}

std::optional<double> cpu_quota(const std::string& root) {
  std::optional<double> least;
  for (const ControlGroup& group : control_groups(root, "cpu"))
    for (const std::string& folder : group.folders)
      if (const auto quota = quota_at(group.version, folder))
        least = std::min(least.value_or(*quota), *quota);
  return least;
}

int usable_cpus(const std::string& root) {
  const int cpus = std::max(1, cpus_of_affinity());
  const std::optional<double> quota = cpu_quota(root);
  return quota && *quota < cpus ? std::max(1, static_cast<int>(std::ceil(*quota))) : cpus;
}

std::string cpu_model(const std::string& root) {
  for (const std::string_view key : {"model name", "Model", "Hardware", "cpu"})
    if (std::string name = cpuinfo_value(root, key); !name.empty()) return name;
  return "unknown";
}

std::vector<std::string> simd_features(const std::string& root) {
  std::vector<std::string> present;
  std::istringstream flags(cpuinfo_value(root, "flags") + " " + cpuinfo_value(root, "Features"));
  for (std::string flag; flags >> flag;) present.push_back(std::move(flag));
  std::vector<std::string> known;
  for (const std::string_view feature : kSimdFeatures)
    if (std::find(present.begin(), present.end(), feature) != present.end()) known.emplace_back(feature);
  return known;
}

std::size_t largest_cache(const std::string& root) {
  std::size_t largest = 0;
  for (int i = 0;; ++i) {
    const std::string size =
        first_line(root + "/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(i) + "/size");
    if (size.empty()) return largest;
    char* unit = nullptr;
    const std::size_t number = std::strtoull(size.c_str(), &unit, 10);
    largest = std::max(largest, number << (*unit == 'K' ? 10 : *unit == 'M' ? 20 : 0));
  }
}

std::string huge_page_setting(const std::string& root) {
  const std::string text = first_line(root + "/sys/kernel/mm/transparent_hugepage/enabled");
  const std::size_t open = text.find('['), close = text.find(']');
  return open == std::string::npos || close == std::string::npos || close < open
             ? ""
             : text.substr(open + 1, close - open - 1);
}

std::optional<std::size_t> mapping_limit(const std::string& root) {
  return file_number(root + "/proc/sys/vm/max_map_count");
}

std::string kernel_version(const std::string& root) {
  return first_line(root + "/proc/sys/kernel/osrelease");
}

std::string host_name(const std::string& root) { return first_line(root + "/proc/sys/kernel/hostname"); }

bool user_faults_allowed() {
  const auto descriptor = static_cast<int>(::syscall(SYS_userfaultfd, O_CLOEXEC | UFFD_USER_MODE_ONLY));
  if (descriptor >= 0) ::close(descriptor);
  return descriptor >= 0;
}

std::optional<std::size_t> locked_memory_limit() {
  struct rlimit limit = {};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return std::nullopt;
  return limit.rlim_cur;
}

}  // namespace sluice
