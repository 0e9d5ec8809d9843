#include "bindings/c/handles.h"
#include "bindings/c/status.h"
#include "core/bytes.h"
#include "engine/plan/placement.h"

namespace sluice::c {
namespace {

// What the store keeps in memory of all records that there may be: those of a plan before stay.
std::uint64_t metadata_of_all(const Planned& planned) {
  constexpr auto kDisk = allocator::Tier::kDisk;
  const std::vector<engine::UnitPlan> on_disk(planned.profile.units.size(), {{kDisk, kDisk, kDisk}});
  return planned.disk.empty()
             ? 0
             : engine::Placement(planned.profile, *planned.optimizer, planned.request).held(on_disk).metadata;
}

void replan(sluice_engine& e, std::uint64_t reserved) {
  Planned& planned = e.planned;
  if (reserved > planned.budget.memory)
    fail(ErrorCode::kBudget, "{} are reserved: more than the memory of {}", format_size(reserved),
         format_size(planned.budget.memory));
  engine::Budget budget = planned.budget;
  budget.base += reserved - planned.reserved;
  engine::PlanRequest request = planned.request;
  request.chunk_elements = round_up(planned.plan.chunk_elements, engine::kChunkGrain);
  engine::Budget with_records = budget;
  with_records.base += metadata_of_all(planned);
  const engine::Plan plan =
      engine::make_plan(planned.profile, *planned.optimizer, with_records, request, planned.rates);
  const std::uint64_t before = e.base.bytes(), after = budget.base - planned.checkpoint_buffers;
  if (after < before) e.base.shrink(after);
  try {
    e.engine->replan(plan);
  } catch (...) {
    if (after < before) e.base.grow(before);
    throw;
  }
  if (after > before) e.base.grow(after);
  planned.plan = plan;
  planned.budget = budget;
  planned.reserved = reserved;
}

}  // namespace
}  // namespace sluice::c

using namespace sluice::c;  // NOLINT: what follows is of this room

sluice_status sluice_engine_replan(sluice_engine* engine, uint64_t reserved) {
  return with_engine(engine, [&](sluice_engine& e) { replan(e, reserved); });
}
