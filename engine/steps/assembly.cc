#include "engine/steps/assembly.h"

#include "core/bytes.h"
#include "engine/planner/placement.h"
#include "engine/planner/planner.h"

namespace sluice::engine {
namespace {

using allocator::Purpose;
using allocator::Tier;

// The memory of the record store's metadata if every part has a record, as after several plans.
std::uint64_t metadata_of_all(const Planned& planned, const optim::Optimizer& optimizer) {
  if (planned.disk.empty()) return 0;
  const std::vector<UnitPlan> on_disk(planned.profile.units.size(),
                                      {{Tier::kDisk, Tier::kDisk, Tier::kDisk}});
  return Placement(planned.profile, optimizer, planned.request).footprint(on_disk).metadata;
}

}  // namespace

Ground::Ground(const Planned& planned, const Means& means, const Options& options) : means_(means) {
  if (options.timeline_parts > 0) ledger_.record(options.timeline_parts, options.origin);
  ledger_.set_budget(Tier::kHost, planned.budget.memory);
  if (!planned.disk.empty()) ledger_.set_budget(Tier::kDisk, planned.budget.disk);
  if (planned.budget.device > 0) {
    ledger_.set_budget(Tier::kDevice, planned.budget.device);
    device_base_ = allocator::Charge(ledger_, Tier::kDevice, Purpose::kBase, planned.budget.device_base);
  }
  base_ = allocator::Charge(ledger_, Tier::kHost, Purpose::kBase,
                            planned.budget.base - planned.checkpoint_buffers);
  // Libraries allocate this themselves; the charge reserves it in the budget.
  hidden_ = allocator::Charge(ledger_, Tier::kHost, Purpose::kWorkspace, planned.profile.hidden_bytes);
  if (options.trace_events > 0) trace_.emplace(options.trace_events);
  if (planned.plan.uses_disk() || (options.may_replan && !planned.disk.empty()))
    disk_ = std::make_unique<offload::RecordStore>(means.io, planned.disk, ledger_, trace());
}

void Ground::replan(Planned& planned, std::uint64_t base, const std::function<void(const Plan&)>& change) {
  Budget budget = planned.budget;
  budget.base = base;
  PlanRequest request = planned.request;
  request.chunk_elements = round_up(planned.plan.chunk_elements, kChunkGrain);
  Budget with_records = budget;
  with_records.base += metadata_of_all(planned, means_.optimizer);
  const Plan plan = make_plan(planned.profile, means_.optimizer, with_records, request, planned.rates);
  const std::uint64_t before = base_.bytes(), after = base - planned.checkpoint_buffers;
  if (after < before) base_.shrink(after);
  try {
    change(plan);
  } catch (...) {
    if (after < before) base_.grow(before);
    throw;
  }
  if (after > before) base_.grow(after);
  planned.plan = plan;
  planned.budget = budget;
}

}  // namespace sluice::engine
