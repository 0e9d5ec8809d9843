#include "core/device.h"

#include "bindings/c/handles.h"
#include "bindings/c/status.h"
#include "core/bytes.h"
#include "core/json.h"

namespace sluice::c {
namespace {

Json to_json(const Device& device) {
  const DeviceInfo& info = device.info();
  return {{"index", info.index},
          {"name", info.name},
          {"pci_address", info.pci_address},
          {"compute_capability", fmt::format("{}.{}", info.major, info.minor)},
          {"driver", fmt::format("{}.{}", info.driver / 1000, info.driver % 1000 / 10)},
          {"memory", info.memory},
          {"free", device.free_memory()}};
}

}  // namespace

void check_device(const sluice_engine_options& options) {
  if (options.device_memory == 0) {
    if (options.device != 0 || options.device_reserved != 0)
      fail(
          ErrorCode::kInvalidArgument,
          "options.device is {}, options.device_reserved {}, and options.device_memory 0, with which the CPU "
          "computes; state how much of the GPU's memory may be taken, or leave them out",
          options.device, options.device_reserved);
    return;
  }
  if (options.device_reserved >= options.device_memory)
    fail(ErrorCode::kBudget,
         "{} are reserved of the GPU's memory, and options.device_memory is {}; state more of it, or reserve "
         "less",
         format_size(options.device_reserved), format_size(options.device_memory));
  if (options.serve_touches != 0)
    fail(ErrorCode::kInvalidArgument,
         "options.serve_touches is given with options.device_memory, and touches of a GPU's memory cannot be "
         "served; leave one out, and acquire units before they are used");
}

std::unique_ptr<Device> open_device_of(const Planned& planned) {
  if (planned.budget.device == 0) return nullptr;
  std::unique_ptr<Device> device = open_device(static_cast<int>(planned.device));
  if (planned.budget.device > device->info().memory)
    fail(ErrorCode::kBudget,
         "options.device_memory is {}, and GPU {} ({}) has {}; state less, with room for CUDA itself",
         format_size(planned.budget.device), planned.device, device->info().name,
         format_size(device->info().memory));
  return device;
}

}  // namespace sluice::c

using namespace sluice::c;  // NOLINT: what follows is of this room

sluice_status sluice_engine_use_stream(sluice_engine* engine, void* stream) {
  return with_engine(engine, [&](sluice_engine& e) {
    e.engine->use_stream(stream == nullptr ? sluice::default_stream() : static_cast<CUstream_st*>(stream));
  });
}

sluice_status sluice_engine_absent(sluice_engine* engine, uint32_t parameter, const void** data) {
  return with_engine(engine, [&](sluice_engine& e) {
    required(data, "data") = e.engine->absent(parameter_of(e, parameter)).data;
  });
}

sluice_status sluice_engine_device(const sluice_engine* engine, char** json) {
  return ask(engine, [&](const sluice_engine& e) {
    char*& out = required(json, "json");
    out = e.device == nullptr ? nullptr : new_text(to_json(*e.device).dump());
  });
}
