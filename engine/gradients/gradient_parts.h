#pragma once
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/gradients/gradients.h"
#include "engine/memory/backing.h"
#include "engine/memory/compute_region.h"
#include "engine/memory/shard_memory.h"
#include "engine/plan/plan.h"
#include "engine/ranks/ranks.h"

namespace sluice::engine {

// What a rank keeps of gradients of which only its own part waits for the update: in the memory that is
// computed on, or in records, which are on disk, or, where a GPU computes, in host memory. Where ranks sum
// gradients in each backward pass (Plan::sums_each_backward), means are added to the parts; records then pass
// through a small buffer. Thread rule: one thread.
class GradientParts {
 public:
  // ranks: null where there are no parts. gpu: null where the CPU computes. The arguments outlive it.
  GradientParts(const Layout& layout, const Plan& plan, const Ranks* ranks, Gradients& gradients,
                Pager& pager, DeviceWork* gpu);
  void define(const Plan& plan, Backings& backings);  // the records
  void start(allocator::Ledger& ledger);
  // The bytes of the buffer.
  static constexpr std::size_t staging_bytes() { return kPieces * kPieceElements * sizeof(float); }

  // Whether the rank keeps its part alone of the unit's gradient; whether the part is in memory, and where.
  bool has(UnitId unit) const { return in_memory(unit) || records_[unit] != nullptr; }
  bool in_memory(UnitId unit) const { return memory_.has(unit); }
  std::byte* data(UnitId unit) const { return memory_.data(unit); }    // REQUIRES: in_memory(unit)
  Backing* record(UnitId unit) const { return records_[unit].get(); }  // used where it is not in memory

  struct Mean {
    ParameterId parameter;
    std::optional<double> factor;  // of the part to which the mean is added; nullopt: the mean replaces it
  };
  // Keeps this rank's part of means, which the unit's buffer has, in frames of a GPU or in memory. Afterwards
  // the buffer is free. REQUIRES: the buffer is held.
  void keep(Threads& threads, UnitId unit, std::span<const Mean> means);

  // A change of plan, while there are no gradients: see replan().
  bool define_record(UnitId unit, const UnitPlan& placed, Backings& backings);
  void forget_record(UnitId unit) { records_[unit].reset(); }
  void leave_memory(const Plan& next);
  void enter_memory(const Plan& next);

 private:
  static constexpr std::size_t kPieces = 2, kPieceElements = std::size_t{256} << 10;
  std::size_t bytes(UnitId unit) const;
  std::byte* piece(std::size_t number) const {
    return staging_.data() + number % kPieces * kPieceElements * sizeof(float);
  }
  // Puts these elements of the unit, which are the mean's, into a part, or adds them there.
  void put(Threads& threads, const Mean& mean, ElementRange elements, Array from, Array to);
  void keep_in_host(Threads& threads, UnitId unit, const Mean& mean, ElementRange elements, Array from);
  void keep_on_disk(Threads& threads, UnitId unit, std::span<const Mean> means, Array from);

  const Layout& layout_;
  const Ranks* const ranks_;
  Gradients& gradients_;
  Pager& pager_;
  DeviceWork* const gpu_;
  std::vector<bool> cut_;  // by unit: whether there is a part of its gradient
  const bool adds_;
  ShardMemory memory_;
  std::vector<std::unique_ptr<Backing>> records_;  // by unit
  ComputeRegion staging_;
};

}  // namespace sluice::engine
