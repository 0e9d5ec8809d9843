#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cctype>
#include <cstdlib>
#include <filesystem>
#include <utility>

#include "bindings/cli/doctor.h"
#include "comm/nccl.h"
#include "core/bytes.h"
#include "core/device.h"
#include "core/error.h"
#include "kernels/device_sum.h"

// Findings about GPUs: the driver, the cards, Sluice's kernels, and NCCL.
namespace sluice::cli {
namespace {

std::vector<std::string> device_files() {
  std::vector<std::string> files;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/dev", ignored)) {
    const std::string name = entry.path().filename().string();
    if (name.size() > 6 && name.starts_with("nvidia") &&
        std::isdigit(static_cast<unsigned char>(name[6])) != 0)
      files.push_back(entry.path().string());
  }
  return files;
}

bool names_driver() {
  const char* const named = std::getenv("SLUICE_CUDA_DRIVER");
  return named != nullptr && *named != '\0';
}

// Without any sign of a GPU, nothing counts as missing.
Finding no_driver(const std::string& why) {
  const std::vector<std::string> files = device_files();
  const Json value = {{"devices", files}, {"count", nullptr}, {"why", why}};
  if (files.empty() && !names_driver())
    return {"GPU", "none that this process can use; Sluice computes on the CPU", "", value};
  return {"GPU",
          fmt::format("{}cannot be used", files.empty() ? "" : fmt::format("{}: ", fmt::join(files, " "))),
          why + "; in a container, give it --gpus all", value};
}

std::string version_of(const DeviceInfo& info) {
  return fmt::format("{}.{}", info.driver / 1000, info.driver % 1000 / 10);
}

Finding card(int index, const Device& device) {
  const DeviceInfo& info = device.info();
  const std::size_t free = device.free_memory();
  return {fmt::format("GPU {}", index),
          fmt::format("{} ({}), compute capability {}.{}, a driver of CUDA {}; {} free of {}", info.name,
                      info.pci_address, info.major, info.minor, version_of(info), format_size(free),
                      format_size(info.memory)),
          "",
          {{"index", index},
           {"name", info.name},
           {"pci_address", info.pci_address},
           {"compute_capability", fmt::format("{}.{}", info.major, info.minor)},
           {"driver", version_of(info)},
           {"memory", info.memory},
           {"free", free},
           {"usable", true}}};
}

// Loads the kernels, as an engine does.
Finding kernels_on(Device& device) {
  try {
    const kernels::DeviceSum sum(device);
    return {"GPU kernels", "those of this build", "", {{"present", true}}};
  } catch (const Error& error) {
    return {"GPU kernels", "cannot be loaded", error.what(), {{"present", false}}};
  }
}

// Nothing needs it.
Finding nccl() {
  try {
    const comm::NcclLibrary found = comm::find_nccl();
    return {"NCCL",
            fmt::format("{} ({})", found.version, found.path),
            "",
            {{"version", found.version}, {"path", found.path}, {"why", nullptr}}};
  } catch (const Error& error) {
    return {"NCCL",
            "none; ranks on GPUs of several hosts exchange data through host memory",
            "",
            {{"version", nullptr}, {"path", nullptr}, {"why", error.what()}}};
  }
}

}  // namespace

std::vector<Finding> gpu_findings() {
  int count = 0;
  try {
    count = device_count();
  } catch (const Error& error) {
    return {no_driver(error.what())};
  }
  std::vector<Finding> findings = {{"GPU",
                                    fmt::format("{} that this process may use", count),
                                    "",
                                    {{"devices", device_files()}, {"count", count}, {"why", nullptr}}}};
  bool has_kernels = false;
  for (int index = 0; index < count; ++index) try {
      const auto device = open_device(index);
      findings.push_back(card(index, *device));
      if (!std::exchange(has_kernels, true)) findings.push_back(kernels_on(*device));
    } catch (const Error& error) {
      findings.push_back({fmt::format("GPU {}", index),
                          "cannot be used",
                          error.what(),
                          {{"index", index}, {"usable", false}, {"why", error.what()}}});
    }
  findings.push_back(nccl());
  return findings;
}

}  // namespace sluice::cli
