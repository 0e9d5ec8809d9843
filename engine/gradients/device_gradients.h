#pragma once
#include <functional>
#include <vector>

#include "allocator/ledger.h"
#include "engine/layout/layout.h"
#include "engine/memory/compute_region.h"
#include "engine/memory/device_work.h"
#include "engine/memory/host_records.h"
#include "kernels/device_reduce.h"
#include "kernels/device_sum.h"
#include "kernels/reduce.h"

namespace sluice::engine {

// The arithmetic of Gradients, where these are in a GPU's memory. It is queued on the client's stream. Sums
// of squares stay on the GPU until somebody asks for them: one of each block of the grid, of which the GPU
// then puts together the nodes of the written order that are brought to the host. Thread rule: one thread.
class DeviceGradients {
 public:
  DeviceGradients(const Layout& layout, DeviceWork& gpu);
  // In bytes, what there is for all parameters: on the GPU, and in the host's memory.
  static std::size_t device_bytes(const Layout& layout);
  static std::size_t host_bytes(const Layout& layout);
  void start(allocator::Ledger& ledger);

  // Queues sum = gradient, where the sum has a type that has all of the gradient's values; or, where it is
  // f32, sum = sum * factor + gradient; and the squares of the sum.
  void add(ParameterId parameter, Array sum, ConstArray gradient, bool accumulate, float factor);
  void read(ParameterId parameter, ConstArray sum, float factor, Array out);
  // Queue that a parameter's elements become zeros, or are multiplied.
  void fill_with_zeros(ParameterId parameter, Array sum);
  void scale(ParameterId parameter, Array sum, float factor);
  // Queues that n elements become f32 where they begin now, in memory that has room for these. REQUIRES: n is
  // a multiple of kUnitAlignment.
  void widen(Array narrow, std::size_t n);
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
  // What of each kind begins where, by parameter, and last of all the end. The host has all but the sums of
  // blocks, in the same order: the sums of nodes, the nodes, and a number for each unit.
  struct Places {
    explicit Places(const Layout& layout);
    std::vector<std::size_t> blocks, nodes;
    std::vector<std::uint8_t> levels;  // by node
    std::size_t units;
    std::size_t block_bytes() const { return blocks.back() * sizeof(double); }
    std::size_t sum_bytes() const { return nodes.back() * sizeof(double); }
    std::size_t node_bytes() const { return nodes.back() * sizeof(kernels::SumNode); }
    std::size_t found() const { return sum_bytes() + node_bytes(); }  // where it begins for the host
    std::size_t host_bytes() const { return found() + units * sizeof(std::uint32_t); }
  };
  std::byte* shared_on_gpu() const { return on_gpu_.data() + places_.block_bytes(); }
  DeviceWork::Memory blocks_of(ParameterId first, ParameterId end) const;
  DeviceWork::Memory memory_of(ParameterId parameter, ConstArray sum) const {
    return {static_cast<const std::byte*>(sum.data),
            layout_.location(parameter).elements * size_of(sum.type)};
  }
  const Layout& layout_;
  const Places places_;
  DeviceWork& gpu_;
  kernels::DeviceSum sum_;
  kernels::DeviceSquares squares_;
  ComputeRegion on_gpu_;
  RegisteredRegion on_host_;
};

}  // namespace sluice::engine
