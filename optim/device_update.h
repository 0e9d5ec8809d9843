#pragma once
#include <map>
#include <string>

#include "core/device.h"
#include "optim/optimizer.h"

namespace sluice::optim {

// Updates what is in a GPU's memory, on the GPU, with the bits of Optimizer::apply(). Thread rule: one thread
// at a time.
class DeviceUpdate {
 public:
  // Throws Error(kInvalidArgument) for an optimizer that looks at parameters as a whole (Adafactor, Muon),
  // whose updates are the CPU's. The device and the optimizer outlive the object.
  DeviceUpdate(Device& device, const Optimizer& optimizer);
  // Queues the update of a span, all of whose pointers are addresses of the GPU's. Throws as
  // Optimizer::apply(), and Error(kNotFound) or Error(kIo) where the kernel is missing or cannot be queued.
  void apply(CUstream_st* stream, const Hyperparameters& hyperparameters, const Span& span);

 private:
  Device& device_;
  const Optimizer& optimizer_;
  std::map<std::string, CUfunc_st*> kernels_;
};

}  // namespace sluice::optim
