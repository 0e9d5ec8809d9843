#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

// What this machine, and the container around this process, offer. Functions that read files take the folder
// under which /proc and /sys lie. None of them throws where a file is missing or malformed: the value that
// the file would give then counts as unknown.
namespace sluice {

struct MemoryState {                 // SIZE_MAX where a value is unknown
  std::size_t total = SIZE_MAX;      // of the machine, or of the smallest control group around this process
  std::size_t available = SIZE_MAX;  // what this process can still take within every such limit
  std::optional<std::size_t> group_limit;  // the smallest limit of a control group, where there is one
};
MemoryState memory_state(const std::string& root = "/");

// The cores that this process may use, by its affinity and its CPU quota (rounded up). It is at least 1.
int usable_cpus(const std::string& root = "/");
// The CPU quota alone, in cores (1.5 is possible), or nothing where there is none.
std::optional<double> cpu_quota(const std::string& root = "/");

std::string cpu_model(const std::string& root = "/");  // "unknown" where /proc/cpuinfo does not name it
// The vector features of the CPU that this project knows, by Linux's names: "avx2", "avx512_bf16", ...
std::vector<std::string> simd_features(const std::string& root = "/");

// The bytes of the largest cache that the first core uses; 0 where it is unknown.
std::size_t largest_cache(const std::string& root = "/");

// Returns "always", "madvise" or "never", or "" where the system has no transparent huge pages.
std::string huge_page_setting(const std::string& root = "/");
std::optional<std::size_t> mapping_limit(const std::string& root = "/");  // vm.max_map_count
std::string kernel_version(const std::string& root = "/");                // "6.1.0-18-amd64"
std::string host_name(const std::string& root = "/");                     // "" where it is unknown

bool user_faults_allowed();                        // tries userfaultfd for faults in user mode
std::optional<std::size_t> locked_memory_limit();  // RLIMIT_MEMLOCK, or nothing where it is unlimited

}  // namespace sluice
