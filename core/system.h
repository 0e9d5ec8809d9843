#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

// What this machine, and the container around this process, offer. Functions that read files take the folder
// under which /proc and /sys lie. A file that is missing or malformed counts as "says nothing": none of these
// throw for it.
namespace sluice {

struct MemoryState {  // SIZE_MAX where nothing says it
  std::size_t total =
      SIZE_MAX;  // of the machine, or the smallest limit of a control group around this process
  std::size_t available =
      SIZE_MAX;  // what this process can still take: free or reclaimable, within every such limit
  std::optional<std::size_t> group_limit;  // the smallest limit, where there is one
};
MemoryState memory_state(const std::string& root = "/");

// The cores that this process may use: its affinity and the CPU quota of its control groups, rounded up; at
// least 1.
int usable_cpus(const std::string& root = "/");
// The quota alone, in cores (1.5 is possible); nothing where there is none.
std::optional<double> cpu_quota(const std::string& root = "/");

std::string cpu_model(const std::string& root = "/");  // "unknown" where it is not said
// Those of the known vector features that the CPU has, by Linux's names: "avx2", "fma", "avx512_bf16",
// "asimd", ...
std::vector<std::string> simd_features(const std::string& root = "/");

std::string huge_page_setting(
    const std::string& root = "/");  // "always", "madvise", "never", "" where there is none
std::optional<std::size_t> mapping_limit(const std::string& root = "/");  // vm.max_map_count
std::string kernel_version(const std::string& root = "/");                // "6.1.0-18-amd64"
// vm.unprivileged_userfaultfd; faults in user mode alone may be served without it, see user_faults_allowed.
bool unprivileged_userfaultfd(const std::string& root = "/");

bool user_faults_allowed();                        // userfaultfd for faults in user mode, tried
std::optional<std::size_t> locked_memory_limit();  // RLIMIT_MEMLOCK; nothing where it is unlimited

}  // namespace sluice
