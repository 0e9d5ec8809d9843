#pragma once
#include <functional>
#include <vector>

#include "allocator/ledger.h"
#include "engine/layout.h"
#include "engine/store/compute_region.h"
#include "engine/store/device_work.h"
#include "engine/store/host_records.h"
#include "kernels/device_reduce.h"
#include "kernels/device_sum.h"
#include "kernels/reduce.h"

namespace sluice::engine {

// The arithmetic of Gradients, where these are in a GPU's memory. It is queued on the client's stream. Sums
// of squares stay on the GPU until somebody asks for them. Thread rule: one thread.
class DeviceGradients {
 public:
  DeviceGradients(const Layout& layout, DeviceWork& gpu);
  // In bytes: the room for sums of squares, and for what is found of each unit's, which there is once on the
  // GPU and once in the host's memory.
  static std::size_t sum_bytes(const Layout& layout);
  void start(allocator::Ledger& ledger);

  // Queues sum = gradient, or sum = sum * factor + gradient; and the squares of the sum.
  void add(ParameterId parameter, float* sum, ConstArray gradient, bool accumulate, float factor);
  void read(ParameterId parameter, const float* sum, float factor, Array out);
  // Queues that a number of the GPU's becomes 1 where one of these parameters' gradients is not finite, and
  // else 0. Returns where it is, as work that reads it has to state: in the GPU's memory, or, for_cpu, in the
  // host's, to where it is copied. `has` says which parameters have a gradient.
  const std::uint32_t* check(UnitId unit, const std::function<bool(ParameterId)>& has, bool for_cpu);
  static DeviceWork::Memory memory_of(const std::uint32_t* found) {
    return {reinterpret_cast<const std::byte*>(found), sizeof *found};
  }
  void fetch_squares();  // brings all sums of squares to the host, and waits for them
  // As they were when they were fetched last.
  kernels::SquareSum squares(ParameterId parameter) const;

 private:
  DeviceWork::Memory sums_of(ParameterId parameter) const;
  const Layout& layout_;
  DeviceWork& gpu_;
  kernels::DeviceSum sum_;
  kernels::DeviceSquares squares_;
  std::vector<std::size_t> offsets_;  // by parameter: its sums, in bytes
  std::size_t found_ = 0;             // where the numbers of units begin, behind all sums
  ComputeRegion on_gpu_;
  RegisteredRegion on_host_;
};

}  // namespace sluice::engine
