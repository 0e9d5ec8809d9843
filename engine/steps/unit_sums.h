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

// Sums of a unit's gradients over the ranks of an AnyOrderEngine, which become their means: of all elements,
// or, where the unit's state is partitioned, of those that this rank updates. Of gradients in a GPU's memory
// (DeviceRanks) the GPU makes and measures the means, where GPUs read each other's memory; else the CPU does,
// in the host memory through which they pass. A gradient that waits for its update in a record there is
// summed in the record, and its mean stays there. Thread rule: one thread.
class UnitSums {
 public:
  // order: of what the ranks give; divisor: by which a sum is divided.
  UnitSums(Core& core, const comm::SumOrder& order, double divisor);

  // A sum goes from hold() to let_go(). Between begin() and let_go() nobody else uses the unit's buffers.
  // changes: the caller changes what is in them before begin().
  void hold(UnitId unit, bool changes);
  // Begins to sum what each rank has added to these gradients, in the first buffers of the unit: as many as
  // this rank has in the order. whole: the unit's other elements may be summed with them. REQUIRES: where
  // is_in_order(), all ranks begin sums in the same order.
  TransferGroup begin(UnitId unit, std::span<const ParameterId> of, bool whole);
  void let_go(UnitId unit, bool summed);
  bool is_in_order() const { return core_.device_sums.has_value(); }
  // Whether the sum takes no frames, where others hold none of the unit's.
  bool is_in_record(UnitId unit) const;
  // Comes when the group has ended. The gradients are means, whose squares are known.
  void finish(UnitId unit, std::span<const ParameterId> of);
  // Brings what the other ranks have of a parameter's mean. REQUIRES: the unit's state is partitioned, and
  // its first buffer held until the call ends.
  void gather(ParameterId parameter, Done done);

 private:
  // Whether the ranks add what this one has in the type in which it came.
  bool gives_as_it_came(UnitId unit) const;
  bool may_leave_frames(UnitId unit);
  void begin(UnitId unit, ElementRange elements, std::span<const ParameterId> of, Done done);
  void begin_on_gpu(UnitId unit, ElementRange elements, std::span<const ParameterId> of, Done done);
  void make_mean(std::span<const ConstArray> of_ranks, std::size_t first, std::size_t n, Array mean);
  // Calls body(parameter, its own elements within these of its unit), where there are any.
  template <class Body>
  void for_each(std::span<const ParameterId> of, ElementRange elements, const Body& body) const;
  // Adds the squares of these elements of the unit, which come before those that are known, to these.
  void measure(std::span<const ParameterId> of, ElementRange elements, Array mean, Threads& threads);
  void add_squares(ParameterId parameter, kernels::SquareSum squares);
  // The squares of elements of a parameter, by what the GPU has found of each block.
  kernels::SquareSum squares_of(ParameterId parameter, ElementRange elements,
                                std::span<const double> blocks) const;

  Core& core_;
  const comm::SumOrder order_;
  const double divisor_;
  std::optional<kernels::DeviceSum> gpu_sum_;  // where GPUs read each other's memory
  // By parameter: what is known of the pieces of means that have come so far, of which the last comes first.
  std::vector<std::optional<kernels::SquareSum>> squares_;
  std::vector<bool> in_record_;  // by unit: whether it is being summed there
};

}  // namespace sluice::engine
