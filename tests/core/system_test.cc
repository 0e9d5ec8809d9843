#include "core/system.h"

#include <sched.h>
#include <sys/resource.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "core/bytes.h"
#include "testing.h"
#include "tests/core/support.h"

namespace sluice::system_test {

constexpr const char* kNoLimitV1 = "9223372036854771712\n";

// Makes the files of a machine with 8 GiB, 6 of them available.
class FakeSystem : public TemporaryFolder {
 public:
  FakeSystem() {
    put("proc/meminfo", "MemTotal:        8388608 kB\nMemFree: 1 kB\nMemAvailable:    6291456 kB\n");
  }
  std::string root() const { return path(); }
  void mount_v1(const std::string& group = "/") const {
    put("proc/self/mountinfo",
        "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n32 31 0:29 " + group +
            " /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
            "35 31 0:32 " +
            group + " /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n");
  }
  void mount_v2(const std::string& group = "/") const {
    put("proc/self/mountinfo",
        "30 23 0:26 " + group + " /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n");
  }
  void group_v1(const std::string& folder, const std::string& limit, std::size_t used,
                std::size_t cached) const {
    const std::string group = "sys/fs/cgroup/memory" + folder;
    put(group + "/memory.limit_in_bytes", limit);
    put(group + "/memory.usage_in_bytes", std::to_string(used) + "\n");
    put(group + "/memory.stat", "cache 1\ninactive_file 7\ntotal_cache 9\ntotal_inactive_file " +
                                    std::to_string(cached) + "\ntotal_active_file 0\n");
  }
  void group_v2(const std::string& folder, const std::string& limit, std::size_t used,
                std::size_t cached) const {
    const std::string group = "sys/fs/cgroup" + folder;
    put(group + "/memory.max", limit);
    put(group + "/memory.high", "max\n");
    put(group + "/memory.current", std::to_string(used) + "\n");
    put(group + "/memory.stat", "anon 5\ninactive_file 0\nactive_file " + std::to_string(cached) + "\n");
  }
};

TEST(MemoryState, WithoutGroupsIsTheMachine) {
  const FakeSystem fake;
  const MemoryState state = memory_state(fake.root());
  EXPECT_EQ(state.total, 8 * kGiB);
  EXPECT_EQ(state.available, 6 * kGiB);
  EXPECT_FALSE(state.group_limit.has_value());
  EXPECT_EQ(state.with_swap, 8 * kGiB);
  fake.put("proc/meminfo", "MemTotal: 8388608 kB\nSwapTotal: 1048576 kB\n");
  EXPECT_EQ(memory_state(fake.root()).with_swap, 9 * kGiB);
}

TEST(MemoryState, IsUnknownWithoutFiles) {
  const TemporaryFolder empty;
  EXPECT_EQ(memory_state(empty.path()).total, SIZE_MAX);
  EXPECT_EQ(memory_state(empty.path()).available, SIZE_MAX);
  empty.put("proc/meminfo", "MemTotal: many kB\nMemAvailable:\n");
  empty.put("proc/self/cgroup", ":::\nx\n4:memory\n");
  empty.put("proc/self/mountinfo", "1 2\n - \n32 31 0:29 / /sys/fs/cgroup rw - cgroup\n");
  EXPECT_EQ(memory_state(empty.path()).total, SIZE_MAX);
}

TEST(MemoryState, Version1NestedGroups) {
  const FakeSystem fake;
  fake.mount_v1();
  fake.put("proc/self/cgroup", "5:devices:/\n4:memory:/outer/inner\n0::/\n");
  fake.group_v1("", kNoLimitV1, 3 * kGiB, 0);
  fake.group_v1("/outer", std::to_string(2 * kGiB), kGiB + kGiB / 2, kGiB);
  fake.group_v1("/outer/inner", std::to_string(4 * kGiB), kGiB, 0);
  const MemoryState state = memory_state(fake.root());
  EXPECT_EQ(state.total, 2 * kGiB);
  EXPECT_EQ(state.group_limit, 2 * kGiB);
  EXPECT_EQ(state.available, kGiB + kGiB / 2) << "cached pages of the group can be given up";
  fake.group_v1("/outer/inner", std::to_string(kGiB), kGiB - kMiB, 0);
  EXPECT_EQ(memory_state(fake.root()).group_limit, kGiB);
  EXPECT_EQ(memory_state(fake.root()).available, kMiB);
}

TEST(MemoryState, Version1WithoutLimitsIsTheMachine) {
  const FakeSystem fake;
  fake.mount_v1();
  fake.put("proc/self/cgroup", "4:memory:/\n");
  fake.group_v1("", kNoLimitV1, kGiB, 0);
  EXPECT_FALSE(memory_state(fake.root()).group_limit.has_value());
  EXPECT_EQ(memory_state(fake.root()).available, 6 * kGiB);
}

// Inside a container the group's own path may be mounted as the root of the hierarchy.
TEST(MemoryState, Version1MountedPartOfTheHierarchy) {
  const FakeSystem fake;
  fake.mount_v1("/docker/abc");
  fake.put("proc/self/cgroup", "4:memory:/docker/abc\n");
  fake.group_v1("", std::to_string(kGiB), kMiB, 0);
  EXPECT_EQ(memory_state(fake.root()).group_limit, kGiB);
  fake.put("proc/self/cgroup", "4:memory:/docker/abc/job\n");
  fake.group_v1("/job", std::to_string(kMiB), kKiB, 0);
  EXPECT_EQ(memory_state(fake.root()).group_limit, kMiB);
  fake.put("proc/self/cgroup", "4:memory:/docker/abcdef\n");
  EXPECT_EQ(memory_state(fake.root()).group_limit, kGiB) << "another group with the same beginning";
}

TEST(MemoryState, Version2NestedGroups) {
  const FakeSystem fake;
  fake.mount_v2();
  fake.put("proc/self/cgroup", "0::/user.slice/job\n");
  fake.group_v2("/user.slice", "max\n", 2 * kGiB, 0);
  fake.group_v2("/user.slice/job", std::to_string(3 * kGiB) + "\n", 2 * kGiB, kGiB);
  EXPECT_EQ(memory_state(fake.root()).group_limit, 3 * kGiB);
  EXPECT_EQ(memory_state(fake.root()).available, 2 * kGiB);
  fake.put("sys/fs/cgroup/user.slice/memory.high", std::to_string(2 * kGiB + kMiB));
  EXPECT_EQ(memory_state(fake.root()).group_limit, 2 * kGiB + kMiB) << "beyond it the group is slowed down";
  EXPECT_EQ(memory_state(fake.root()).available, kMiB);
}

TEST(MemoryState, UsedBeyondTheLimitLeavesNothing) {
  const FakeSystem fake;
  fake.mount_v2("/../..");
  fake.put("proc/self/cgroup", "0::/../../elsewhere\n");
  fake.group_v2("", std::to_string(kGiB), 2 * kGiB, 0);
  EXPECT_EQ(memory_state(fake.root()).available, 0u);
}

TEST(CpuQuota, Version1And2) {
  const FakeSystem fake;
  fake.mount_v1();
  fake.put("proc/self/cgroup", "2:cpu,cpuacct:/a/b\n");
  EXPECT_FALSE(cpu_quota(fake.root()).has_value());
  fake.put("sys/fs/cgroup/cpu,cpuacct/a/b/cpu.cfs_quota_us", "-1\n");
  fake.put("sys/fs/cgroup/cpu,cpuacct/a/b/cpu.cfs_period_us", "100000\n");
  EXPECT_FALSE(cpu_quota(fake.root()).has_value());
  fake.put("sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us", "50000\n");
  fake.put("sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(cpu_quota(fake.root()), 0.5);
  EXPECT_EQ(usable_cpus(fake.root()), 1);

  const FakeSystem other;
  other.mount_v2();
  other.put("proc/self/cgroup", "0::/job\n");
  other.put("sys/fs/cgroup/job/cpu.max", "max 100000\n");
  EXPECT_FALSE(cpu_quota(other.root()).has_value());
  other.put("sys/fs/cgroup/job/cpu.max", "150000 100000\n");
  EXPECT_EQ(cpu_quota(other.root()), 1.5);
  EXPECT_EQ(usable_cpus(other.root()), std::min(2, usable_cpus("/nothing/here")));
}

TEST(UsableCpus, FollowsTheAffinity) {
  cpu_set_t before;
  ASSERT_EQ(::sched_getaffinity(0, sizeof before, &before), 0);
  EXPECT_EQ(usable_cpus("/nothing/here"), CPU_COUNT(&before));
  cpu_set_t one;
  CPU_ZERO(&one);
  for (int cpu = 0; CPU_COUNT(&one) == 0; ++cpu)
    if (CPU_ISSET(cpu, &before)) CPU_SET(cpu, &one);
  ASSERT_EQ(::sched_setaffinity(0, sizeof one, &one), 0);
  EXPECT_EQ(usable_cpus("/nothing/here"), 1);
  ::sched_setaffinity(0, sizeof before, &before);
}

TEST(Cpu, TheLargestCache) {
  const TemporaryFolder folder;
  EXPECT_EQ(largest_cache(folder.path()), 0U);
  const std::string caches = "sys/devices/system/cpu/cpu0/cache/index";
  folder.put(caches + "0/size", "48K\n");
  folder.put(caches + "1/size", "300M\n");
  folder.put(caches + "2/size", "2048K\n");
  EXPECT_EQ(largest_cache(folder.path()), std::size_t{300} << 20);
}

TEST(Cpu, ModelAndFeatures) {
  const TemporaryFolder folder;
  EXPECT_EQ(cpu_model(folder.path()), "unknown");
  EXPECT_TRUE(simd_features(folder.path()).empty());
  folder.put("proc/cpuinfo",
             "processor\t: 0\ncpu family\t: 25\nmodel\t\t: 1\nmodel name\t: A CPU: 3000 @ 2.0GHz\n"
             "flags\t\t: fpu avx avx2 fma f16c avx512f avx512_bf16 amx_bf16\nvmx flags\t: avx512bw\n");
  EXPECT_EQ(cpu_model(folder.path()), "A CPU: 3000 @ 2.0GHz");
  EXPECT_THAT(simd_features(folder.path()),
              testing::ElementsAre("avx", "avx2", "fma", "f16c", "avx512f", "avx512_bf16", "amx_bf16"));
  folder.put("proc/cpuinfo", "processor\t: 0\nFeatures\t: fp asimd sve bf16\n");
  EXPECT_EQ(cpu_model(folder.path()), "unknown");
  EXPECT_THAT(simd_features(folder.path()), testing::ElementsAre("asimd", "bf16", "sve"));
}

TEST(Settings, AreReadOrUnknown) {
  const TemporaryFolder folder;
  EXPECT_EQ(huge_page_setting(folder.path()), "");
  EXPECT_FALSE(mapping_limit(folder.path()).has_value());
  EXPECT_EQ(kernel_version(folder.path()), "");
  EXPECT_EQ(host_name(folder.path()), "");
  folder.put("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n");
  folder.put("proc/sys/vm/max_map_count", "65530\n");
  folder.put("proc/sys/kernel/osrelease", "6.1.0-18-amd64\n");
  EXPECT_EQ(huge_page_setting(folder.path()), "madvise");
  EXPECT_EQ(mapping_limit(folder.path()), 65530u);
  EXPECT_EQ(kernel_version(folder.path()), "6.1.0-18-amd64");
  folder.put("sys/kernel/mm/transparent_hugepage/enabled", "]always[\n");
  EXPECT_EQ(huge_page_setting(folder.path()), "");
}

TEST(ThisMachine, AgreesWithOtherSources) {
  const MemoryState state = memory_state();
  const std::size_t pages = static_cast<std::size_t>(::sysconf(_SC_PHYS_PAGES));
  EXPECT_LE(state.total, pages * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)));
  EXPECT_GT(state.available, 0u);
  EXPECT_LE(state.available, state.total);
  EXPECT_GE(usable_cpus(), 1);
  struct utsname name = {};
  ASSERT_EQ(::uname(&name), 0);
  EXPECT_EQ(kernel_version(), name.release);
  EXPECT_EQ(host_name(), name.nodename);
  struct rlimit limit = {};
  ASSERT_EQ(::getrlimit(RLIMIT_MEMLOCK, &limit), 0);
  EXPECT_EQ(locked_memory_limit().value_or(RLIM_INFINITY), limit.rlim_cur);
  EXPECT_TRUE(mapping_limit().has_value());
}

}  // namespace sluice::system_test
