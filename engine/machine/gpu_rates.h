#pragma once
#include <cstdint>
#include <functional>

#include "core/device.h"
#include "core/threads.h"
#include "engine/plan/rates.h"
#include "kernels/matrix.h"
#include "optim/optimizer.h"

namespace sluice::engine {

// The inputs of a measurement, and its memory, which only a ledger of its own counts: at most 256 MiB of the
// GPU's, and 128 MiB and four times the host's largest cache, and at most device_bytes and host_bytes.
struct GpuWork {
  Device& device;
  Threads& threads;
  const optim::Optimizer& optimizer;
  Dtype dtype;                               // of the parameters that are updated
  kernels::F32Products* products = nullptr;  // of the optimizer; null: it has none
  std::uint64_t device_bytes = 0, host_bytes = 0;
  std::function<void()> begin_phase = {};  // comes before each rate is measured; empty: nothing does
};

// Measures, in about half a second, the rates by which a plan for a GPU is made: the link, by copies of
// registered memory as the engine makes them; updates in GPU memory, chunk by chunk, each queued as the
// engine queues it (a parameter that ends within a chunk costs one more launch there); and updates by the
// CPU, by its products, and by its loops while copies go on in both directions. With an optimizer that only
// the CPU can apply, the GPU's rate stays as it was. Returns false, with nothing changed, where there are
// less than 4 MiB of GPU memory or 128 MiB of host memory for it. Throws Error(kNotFound) where the GPU's
// kernels are missing, and Error(kBudget) or Error(kIo) as the device.
bool measure_gpu(const GpuWork& work, MachineRates& rates);

}  // namespace sluice::engine
