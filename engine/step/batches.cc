#include "engine/step/batches.h"

#include <algorithm>

#include "core/bytes.h"
#include "engine/kind.h"

namespace sluice::engine {
namespace {

constexpr std::size_t kAligned = 64;

Batch batch_from(const Layout& layout, const optim::Optimizer& optimizer, ParameterId first,
                 ParameterId end_of_unit) {
  Batch batch{first, first};
  for (; batch.end < end_of_unit; ++batch.end) {
    const optim::Kind kind = kind_of(layout.spec(batch.end));
    const std::size_t bytes = scratch_bytes(optimizer, kind);
    if (batch.end > first && bytes > 0 && batch.scratch_bytes + bytes > kBatchBytes) break;
    batch.scratch_bytes += bytes;
    batch.workspace_bytes = std::max(batch.workspace_bytes, optimizer.workspace(kind));
    if (optimizer.has_rounds(kind)) batch.rounds = optimizer.rounds();
  }
  return batch;
}

}  // namespace

std::size_t scratch_bytes(const optim::Optimizer& optimizer, const optim::Kind& kind) {
  return round_up(optimizer.scratch(kind) * sizeof(double), kAligned);
}

UnitRange updated_together(const Layout& layout, const optim::Optimizer& optimizer, UnitId unit) {
  const ParameterSpec& spec = layout.units()[unit].parameters.front();
  const UnitRange siblings = layout.siblings(unit);
  const bool together = siblings.size() > 1 && layout.trainable(unit) && optimizer.has_rounds(kind_of(spec));
  return together ? siblings : UnitRange{unit, unit + 1};
}

std::vector<std::pair<UnitId, Pass>> passes_of(const optim::Optimizer& optimizer, UnitRange units) {
  std::vector<std::pair<UnitId, Pass>> passes;
  for (int round = 0; units.size() > 1 && round <= optimizer.rounds(); ++round)
    for (UnitId unit = units.first; unit < units.end; ++unit)
      passes.push_back({unit, {round, unit == units.first, unit + 1 == units.end}});
  return passes;
}

std::vector<Batch> batches_of(const Layout& layout, const optim::Optimizer& optimizer, const Shards& shards,
                              UnitId unit) {
  std::vector<Batch> batches;
  if (!layout.trainable(unit)) return batches;
  const ParameterId end = layout.end_parameter(unit);
  for (ParameterId first = layout.first_parameter(unit); first < end; first = batches.back().end) {
    Batch batch = batch_from(layout, optimizer, first, end);
    const Layout::Place& last = layout.place(batch.end - 1);
    const ElementRange chunks =
        shards.chunks_with(unit, {layout.place(first).offset, last.offset + last.elements});
    batch.first_chunk = chunks.begin;
    batch.end_chunk = chunks.end;
    batches.push_back(batch);
  }
  return batches;
}

RoundsNeed rounds_need(const Layout& layout, const optim::Optimizer& optimizer) {
  RoundsNeed need;
  const Shards shards(layout, optimizer, kChunkGrain);
  for (UnitId unit = 0; unit < layout.units().size(); ++unit)
    for (const Batch& batch : batches_of(layout, optimizer, shards, unit)) {
      const std::size_t bytes = batch.scratch_bytes + batch.workspace_bytes;
      if (bytes <= need.bytes) continue;
      need = {bytes, batch.scratch_bytes, batch.first};
      for (ParameterId p = batch.first; p < batch.end; ++p)
        if (scratch_bytes(optimizer, kind_of(layout.spec(p))) >
            scratch_bytes(optimizer, kind_of(layout.spec(need.largest))))
          need.largest = p;
    }
  return need;
}

}  // namespace sluice::engine
