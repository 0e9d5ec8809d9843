#include <algorithm>
#include <limits>
#include <utility>

#include "allocator/memory.h"
#include "bindings/c/handles.h"
#include "bindings/c/status.h"
#include "core/bytes.h"

namespace sluice::c {
namespace {

void check_growth(const sluice_engine& e, std::uint64_t besides) {
  constexpr std::uint64_t kMost = std::numeric_limits<std::int64_t>::max() / 2;  // exceeds any machine
  const std::int64_t growth =
      e.engine->growth_of_leaving() + static_cast<std::int64_t>(std::min(besides, kMost));
  if (growth <= 0) return;
  const auto more = static_cast<std::uint64_t>(growth);
  const std::uint64_t held = allocator::resident_bytes(), budget = e.planned.budget.memory;
  if (more > budget - std::min(budget, held))
    fail(ErrorCode::kBudget,
         "keeping the parameters in memory when the engine ends takes {} more, and the process holds {} of "
         "its budget of {}",
         format_size(more), format_size(held), format_size(budget));
  if (const std::uint64_t available = allocator::available_memory_bytes(); more > available)
    fail(ErrorCode::kBudget,
         "keeping the parameters in memory when the engine ends takes {} more, and the system has {} left",
         format_size(more), format_size(available));
}

}  // namespace
}  // namespace sluice::c

using namespace sluice::c;  // NOLINT: what follows is of this room

sluice_status sluice_engine_leave(sluice_engine* handle, uint32_t with_values, uint64_t besides,
                                  sluice_home** homes) {
  return guarded([&] {
    sluice_engine& e = required(handle, "engine");
    const Turn turn(e);
    if (with_values != 0) {
      e.engine->release_touched();
      check_growth(e, besides);
    }
    if (homes == nullptr) return;
    e.engine->leave(with_values != 0, [&](sluice::engine::UnitId unit, sluice::allocator::FormerHome home) {
      homes[unit] = new sluice_home{std::move(home)};
    });
  });
}

void sluice_home_destroy(sluice_home* home) { destroy(home); }
