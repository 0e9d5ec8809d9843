#pragma once
#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "engine/steps/core.h"
#include "kernels/device_sum.h"
#include "kernels/reduce.h"

// Private to this room.
namespace sluice::engine {

// Sums a unit's gradients over the ranks of an AnyOrderEngine and makes them means: of all elements, or,
// where the unit's state is partitioned, of those that this rank updates. For gradients in GPU memory
// (DeviceRanks) the GPU computes the means and their squares, where GPUs read each other's memory; else the
// CPU does, in the host memory through which they pass. A gradient that waits for its update in a host record
// is summed in the record, and its mean stays there. Thread rule: one thread.
class UnitSums {
 public:
  // order: what each rank contributes, and the order of addition; divisor: of each sum.
  UnitSums(Core& core, const comm::SumOrder& order, double divisor);

  // A sum lasts from hold() to let_go(). From begin() to let_go() nobody else uses the unit's buffers.
  // changes: the caller changes their contents before begin().
  void hold(UnitId unit, bool changes);
  // Begins to sum over the ranks what is in the unit's first buffers, as many as this rank contributes, of
  // these gradients. whole: the unit's other elements may be summed with them. REQUIRES: where is_in_order(),
  // all ranks begin sums in the same order.
  TransferGroup begin(UnitId unit, std::span<const ParameterId> of, bool whole);
  void let_go(UnitId unit, bool summed);
  bool is_in_order() const { return core_.device_sums.has_value(); }
  // Whether the sum runs in a record and takes no frames, if nobody else holds the unit's.
  bool is_in_record(UnitId unit) const;
  // Call when the group has completed. The gradients are then means with known squares.
  void finish(UnitId unit, std::span<const ParameterId> of);
  // Gathers the other ranks' shards of a parameter's mean. REQUIRES: the unit's state is partitioned, and its
  // first buffer held until `done`.
  void gather(ParameterId parameter, Done done);

 private:
  // Whether the ranks sum this rank's gradients in the type in which they came.
  bool gives_as_it_came(UnitId unit) const;
  bool may_leave_frames(UnitId unit);
  void begin(UnitId unit, ElementRange elements, std::span<const ParameterId> of, Done done);
  void begin_on_gpu(UnitId unit, ElementRange elements, std::span<const ParameterId> of, Done done);
  void make_mean(std::span<const ConstArray> of_ranks, std::size_t first, std::size_t n, Array mean);
  // Calls body(parameter, its elements among these of the unit) for each parameter that has some.
  template <class Body>
  void for_each(std::span<const ParameterId> of, ElementRange elements, const Body& body) const;
  // Adds the squares of these elements of the unit, which precede those that are known already.
  void measure(std::span<const ParameterId> of, ElementRange elements, Array mean, Threads& threads);
  void add_squares(ParameterId parameter, kernels::SquareSum squares);
  // The squares of elements of a parameter, from the GPU's sums per block.
  kernels::SquareSum squares_of(ParameterId parameter, ElementRange elements,
                                std::span<const double> blocks) const;

  Core& core_;
  const comm::SumOrder order_;
  const double divisor_;
  std::optional<kernels::DeviceSum> gpu_sum_;  // where GPUs read each other's memory
  // By parameter: the squares of the mean's pieces so far, which come from the last to the first.
  std::vector<std::optional<kernels::SquareSum>> squares_;
  std::vector<bool> in_record_;  // by unit: whether it is being summed in its record
};

}  // namespace sluice::engine
