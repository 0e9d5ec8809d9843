#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

// Properties of this machine and of the container around this process. Functions that read files take the
// folder that contains /proc and /sys. None of them throws where a file is missing or malformed: its value
// then counts as unknown.
namespace sluice {

struct MemoryState {                 // SIZE_MAX where a value is unknown
  std::size_t total = SIZE_MAX;      // of the machine, or of the tightest control group around this process
  std::size_t available = SIZE_MAX;  // the bytes that this process can still allocate within all such limits
  std::optional<std::size_t> group_limit;  // the tightest cgroup limit, where there is one
  std::optional<std::size_t> with_swap;    // what the whole machine has, together with its swap
};
MemoryState memory_state(const std::string& root = "/");

// Returns the cores that this process may use, by its affinity and its CPU quota (rounded up); at least 1.
int usable_cpus(const std::string& root = "/");
// Returns the CPU quota alone, in cores (1.5 is possible), or nothing where there is none.
std::optional<double> cpu_quota(const std::string& root = "/");

std::string cpu_model(const std::string& root = "/");  // "unknown" where /proc/cpuinfo does not name it
// Returns the CPU's vector features that this project uses, by Linux's names: "avx2", "avx512_bf16", ...
std::vector<std::string> simd_features(const std::string& root = "/");

// Returns the size in bytes of the largest cache of the first core; 0 where it is unknown.
std::size_t largest_cache(const std::string& root = "/");

// Returns "always", "madvise" or "never", or "" where the system has no transparent huge pages.
std::string huge_page_setting(const std::string& root = "/");
std::optional<std::size_t> mapping_limit(const std::string& root = "/");  // vm.max_map_count
std::string kernel_version(const std::string& root = "/");                // "6.1.0-18-amd64"
std::string host_name(const std::string& root = "/");                     // "" where it is unknown

bool user_faults_allowed();                        // tries userfaultfd for page faults in user mode
std::optional<std::size_t> locked_memory_limit();  // RLIMIT_MEMLOCK, or nothing where it is unlimited

}  // namespace sluice
