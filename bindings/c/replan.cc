#include "bindings/c/handles.h"
#include "bindings/c/status.h"
#include "core/bytes.h"

namespace sluice::c {
namespace {

void replan(sluice_engine& e, std::uint64_t reserved) {
  Planned& planned = e.planned;
  if (reserved > planned.budget.memory)
    fail(ErrorCode::kBudget, "{} are reserved, which is more than the memory of {}", format_size(reserved),
         format_size(planned.budget.memory));
  e.assembly.replan(planned, planned.budget.base + reserved - planned.reserved);
  planned.reserved = reserved;
}

}  // namespace
}  // namespace sluice::c

using namespace sluice::c;  // NOLINT: what follows is of this room

sluice_status sluice_engine_replan(sluice_engine* engine, uint64_t reserved) {
  return with_engine(engine, [&](sluice_engine& e) { replan(e, reserved); });
}
