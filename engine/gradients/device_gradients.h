#pragma once
#include <functional>
#include <vector>

#include "allocator/ledger.h"
#include "engine/layout/layout.h"
#include "engine/layout/shards.h"
#include "engine/memory/compute_region.h"
#include "engine/memory/device_work.h"
#include "engine/memory/host_records.h"
#include "kernels/device_reduce.h"
#include "kernels/device_sum.h"
#include "kernels/reduce.h"

namespace sluice::engine {

// The arithmetic of Gradients in GPU memory, queued on the client's stream. Sums of squares stay on the GPU
// until somebody asks for them: one per block of the grid, from which the GPU computes those nodes of the
// written order that are copied to the host. Thread rule: one thread.
class DeviceGradients {
 public:
  // own: by unit, the elements of gradients of which it knows nothing else; empty: all.
  using Own = std::vector<ElementRange>;
  DeviceGradients(const Layout& layout, DeviceWork& gpu, Own own = {});
  // The bytes for all parameters, in GPU memory and in host memory.
  static std::size_t device_bytes(const Layout& layout, const Own& own = {});
  static std::size_t host_bytes(const Layout& layout, const Own& own = {});
  void start(allocator::Ledger& ledger);

  // Queues sum = gradient, where the sum's type holds all of the gradient's values; or, where it is f32, sum
  // = sum * factor + gradient; and the squares of the sum.
  void add(ParameterId parameter, Array sum, ConstArray gradient, bool accumulate, float factor);
  // Queues, on the stream of what ranks send, sum = sum * factor + gradient, both f32, of elements that are
  // the parameter's in its unit, and the squares of the sum.
  void add_to_part(ParameterId parameter, ElementRange elements, Array sum, ConstArray gradient,
                   float factor);
  void read(ParameterId parameter, ConstArray sum, float factor, Array out);
  // Queue that a parameter's elements become zeros, or are scaled.
  void fill_with_zeros(ParameterId parameter, Array sum);
  void scale(ParameterId parameter, Array sum, float factor);
  // Queues the widening of n elements to f32, in place, in memory that has room for it. REQUIRES: n is a
  // multiple of kUnitAlignment.
  void widen(Array narrow, std::size_t n);
  // Queues a check that sets a number to 1 where one of these parameters' gradients is not finite, and else
  // to 0. Returns its address, which work that reads it has to state: in GPU memory, or, for_cpu, in host
  // memory, to which it is copied. `has` tells which parameters have a gradient.
  const std::uint32_t* check(UnitId unit, const std::function<bool(ParameterId)>& has, bool for_cpu);
  static DeviceWork::Memory memory_of(const std::uint32_t* found) {
    return {reinterpret_cast<const std::byte*>(found), sizeof *found};
  }
  void fetch_squares();  // brings all sums of squares to the host, and waits for them
  // As of the last fetch_squares().
  kernels::SquareSum squares(ParameterId parameter) const;

 private:
  // Where the entries of each parameter begin, by kind, and last the end. The host has all kinds but the sums
  // of blocks, in this order: the sums of nodes, the nodes, and a number per unit.
  struct Places {
    Places(const Layout& layout, const Own& own);
    std::vector<std::size_t> blocks, nodes;
    std::vector<ElementRange> elements;  // by parameter, counted in its unit
    std::vector<std::uint8_t> levels;    // by node
    std::size_t units;
    std::size_t block_bytes() const { return blocks.back() * sizeof(double); }
    std::size_t sum_bytes() const { return nodes.back() * sizeof(double); }
    std::size_t node_bytes() const { return nodes.back() * sizeof(kernels::SumNode); }
    std::size_t found() const { return sum_bytes() + node_bytes(); }  // their offset in host memory
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
