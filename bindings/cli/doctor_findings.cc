#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <thread>

#include "allocator/ledger.h"
#include "allocator/memory.h"
#include "bindings/cli/doctor.h"
#include "core/bytes.h"
#include "core/error.h"
#include "core/system.h"
#include "engine/machine/machine.h"
#include "kernels/matrix.h"
#include "kernels/targets.h"
#include "offload/disk_cache.h"
#include "offload/file.h"

namespace sluice::cli {
namespace {

constexpr std::uint64_t kDiskSample = 256 * kMiB, kLeastSample = 16 * kMiB;

Finding cores() {
  const int usable = usable_cpus();
  const unsigned all = std::max(1u, std::thread::hardware_concurrency());
  const auto quota = cpu_quota();
  std::string text = fmt::format("{} usable of {} ({})", usable, all, cpu_model());
  if (quota) text += fmt::format("; the container's quota is {:.2f}", *quota);
  return {"cores",
          text,
          "",
          {{"usable", usable}, {"model", cpu_model()}, {"quota", quota ? Json(*quota) : Json()}}};
}

Finding simd() {
  const std::vector<std::string> found = simd_features();
  const auto has = [&](const char* name) {
    return std::find(found.begin(), found.end(), name) != found.end();
  };
  const bool bf16 = has("avx512_bf16") || has("amx_bf16") || has("bf16");
  std::string text = found.empty() ? "none that Sluice knows" : fmt::format("{}", fmt::join(found, " "));
  text += bf16 ? "; bf16 products in hardware"
               : "; no bf16 instructions: bf16 is stored and moved, but widened for products";
  text += fmt::format("; Sluice's loops run on {}", kernels::chosen_target());
  return {"vector instructions",
          text,
          "",
          {{"features", found}, {"bf16", bf16}, {"target", kernels::chosen_target()}}};
}

Finding memory() {
  const MemoryState state = memory_state();
  std::string text = fmt::format("{} free of {}", format_size(state.available), format_size(state.total));
  if (state.group_limit)
    text += fmt::format("; the container's limit is {}", format_size(*state.group_limit));
  return {"memory",
          text,
          "",
          {{"available", state.available},
           {"total", state.total},
           {"group_limit", state.group_limit ? Json(*state.group_limit) : Json()}}};
}

Finding io_uring() {
  std::string why;
  if (offload::uring_available(&why)) return {"io_uring", "can be used", "", {{"available", true}}};
  return {"io_uring",
          why,
          "a pool of threads is used instead, which is somewhat slower. In Docker: --security-opt "
          "seccomp=unconfined, or a profile that allows io_uring_setup; elsewhere: sysctl "
          "kernel.io_uring_disabled=0",
          {{"available", false}, {"why", why}}};
}

// Allocates memory as a trial, because the setting alone does not tell: memory may be too fragmented.
double huge_page_share() {
  try {
    allocator::Ledger ledger;
    const allocator::Region region(ledger, allocator::Purpose::kStaging, 16 * kMiB);
    double share = 0;
    return allocator::huge_pages_given(region.data(), region.size(), &share) ? share : 0;
  } catch (const Error&) {
    return 0;
  }
}

Finding huge_pages() {
  const std::string setting = huge_page_setting();
  const double share = huge_page_share();
  std::string remedy;
  if (setting == "never" || setting.empty())
    remedy =
        "reading a disk into small pages is up to three times slower: echo madvise > "
        "/sys/kernel/mm/transparent_hugepage/enabled";
  else if (share < 0.9)
    remedy = "memory is fragmented; echo 1 > /proc/sys/vm/compact_memory may help";
  return {"huge pages",
          fmt::format("{}; {:.0f}% of a trial of 16 MiB",
                      setting.empty() ? "the system has no such setting" : setting, 100 * share),
          remedy,
          {{"setting", setting}, {"trial_share", share}}};
}

Finding locked_memory() {
  const auto limit = locked_memory_limit();
  const std::string text = limit ? format_size(*limit) : "unlimited";
  // No remedy, because registered buffers are never required.
  return {"locked memory", text, "", {{"limit", limit ? Json(*limit) : Json()}}};
}

Finding user_faults() {
  const bool allowed = user_faults_allowed();
  return {"userfaultfd",
          allowed ? "can be used"
                  : "cannot be used: a touch of an absent unit ends the process, with the unit's name",
          "",
          {{"available", allowed}}};
}

Finding matrix_library() {
  try {
    const auto library = kernels::load_matrix_library(1);
    return {
        "matrix library", library->name(), "", {{"name", library->name()}, {"bf16", library->has_bf16()}}};
  } catch (const Error& error) {
    return {"matrix library", "missing", error.what(), {{"name", nullptr}}};
  }
}

// Formats options as "16 x 512.0 KiB by an io_uring".
std::string text_of(const offload::IoOptions& io) {
  const std::uint64_t count = in_flight(io) / io.block_bytes;
  return fmt::format("{} x {} by {}", count, format_size(io.block_bytes),
                     io.way == offload::IoWay::kUring ? "an io_uring" : fmt::format("{} threads", count));
}

std::string text_of(const offload::DiskRates& rates) {
  return fmt::format("write {:.2f} GB/s, read {:.2f} GB/s", rates.write / 1e9, rates.read / 1e9);
}

Json json_of(const offload::DiskTrial& trial) {
  return {{"service", trial.io.way == offload::IoWay::kUring ? "io_uring" : "threads"},
          {"block", trial.io.block_bytes},
          {"under_way", in_flight(trial.io) / trial.io.block_bytes},
          {"write", trial.rates.write},
          {"read", trial.rates.read},
          {"steady", trial.steady}};
}

// Describes the best trial of the way that was not chosen.
std::string text_of_other(const std::vector<offload::DiskTrial>& trials, offload::IoWay chosen) {
  std::vector<offload::DiskTrial> others;
  std::ranges::copy_if(trials, std::back_inserter(others),
                       [&](const auto& trial) { return trial.io.way != chosen; });
  if (others.empty()) return {};
  const offload::DiskTrial& best = offload::best_trial(others);
  return fmt::format("; {}: {}", text_of(best.io), text_of(best.rates));
}

Finding disk(const std::string& folder, engine::Machine& machine) {
  try {
    offload::check_disk_folder(folder);
    const std::uint64_t free = offload::free_disk_bytes(folder),
                        room = free / 2 / kLeastSample * kLeastSample;
    if (room == 0)
      return {"disk " + folder,
              "too little space is free to measure it",
              "free some space: a run needs more",
              {{"folder", folder}}};
    const std::uint64_t sample = std::min(kDiskSample, room);
    const std::vector<offload::DiskTrial> trials = offload::try_disk(folder, sample);
    const offload::DiskTrial& best = offload::best_trial(trials);
    const offload::DiskKnowledge known = offload::knowledge_of(folder, sample, trials);
    machine.disks.push_back({folder, free, known});
    std::string why;
    const auto kept = offload::keep_disk(folder, known, &why);
    Json all = Json::array();
    for (const offload::DiskTrial& trial : trials) all.push_back(json_of(trial));
    Json value = json_of(best);
    value.update({{"folder", folder}, {"trials", all}, {"kept", kept ? Json(*kept) : Json()}});
    return {
        "disk " + folder,
        fmt::format("{} with {} under way, which runs use{}; beside work on all cores {}, {:.2f} GB/s both "
                    "ways at once, and {:.3f} s of a core for 1 GB; {}",
                    text_of(best.rates), text_of(known.io), text_of_other(trials, known.io.way),
                    text_of(known.rates), known.rates.together / 1e9, 1e9 * known.processor_seconds,
                    kept ? fmt::format("kept for {} in {}", known.disturbed ? "an hour" : "a week", *kept)
                         : "measured by each run, since the result cannot be kept: " + why),
        known.disturbed
            ? "the rounds of this measurement differed by more than a quarter, so other work was going on; "
              "run this again when it has ended"
            : "",
        value};
  } catch (const Error& error) {
    const Json value = {{"folder", folder}, {"error", error.what()}};
    return {"disk " + folder, "cannot be used", error.what(), value, true};
  }
}

// Describes the best rate of products for each type.
Finding arithmetic(const engine::Machine& machine) {
  std::string text;
  Json value;
  for (const Dtype type : {Dtype::kF32, Dtype::kBf16}) {
    double best = 0;
    for (const engine::ProductRate& rate : machine.products)
      if (rate.product.a.type == type) best = std::max(best, rate.flops);
    text += fmt::format("products of {} up to {:.0f} GFLOP/s, ", name_of(type), best / 1e9);
    value[std::string(name_of(type))] = best;
  }
  value["memory_bandwidth"] = machine.memory_bandwidth;
  return {"arithmetic", text + fmt::format("loops move {:.1f} GB/s", machine.memory_bandwidth / 1e9), "",
          value};
}

}  // namespace

Examination examine(const std::vector<std::string>& folders) {
  Examination result;
  std::vector<Finding>& findings = result.findings;
  findings = {cores(),    simd(),          memory(),      huge_pages(),
              io_uring(), locked_memory(), user_faults(), matrix_library()};
  std::ranges::move(gpu_findings(), std::back_inserter(findings));
  findings.push_back({"system", "Linux " + kernel_version(), "", {{"kernel", kernel_version()}}});
  if (const auto limit = mapping_limit())
    findings.push_back({"mappings", fmt::format("{} a process", *limit), "", {{"limit", *limit}}});
  try {
    result.machine = engine::measure_machine();
    findings.push_back(arithmetic(*result.machine));
  } catch (const Error& error) {
    findings.push_back({"arithmetic", "cannot be measured", error.what(), nullptr});
  }
  engine::Machine none;
  for (const std::string& folder : folders)
    findings.push_back(disk(folder, result.machine ? *result.machine : none));
  return result;
}

}  // namespace sluice::cli
