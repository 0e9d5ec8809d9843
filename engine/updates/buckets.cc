#include "engine/updates/buckets.h"

#include <algorithm>

#include "core/bytes.h"
#include "engine/layout/kind.h"

namespace sluice::engine {
namespace {

constexpr std::size_t kRoundAlignment = 64;

Bucket bucket_from(const Layout& layout, const optim::Optimizer& optimizer, ParameterId first,
                   ParameterId end_of_unit) {
  Bucket bucket{first, first};
  for (; bucket.end < end_of_unit; ++bucket.end) {
    const optim::Kind kind = kind_of(layout.spec(bucket.end));
    const std::size_t bytes = scratch_bytes(optimizer, kind);
    if (bucket.end > first && bytes > 0 && bucket.scratch_bytes + bytes > kBucketBytes) break;
    bucket.scratch_bytes += bytes;
    bucket.workspace_bytes = std::max(bucket.workspace_bytes, optimizer.workspace(kind));
    if (optimizer.has_rounds(kind)) bucket.rounds = optimizer.rounds();
  }
  return bucket;
}

}  // namespace

std::size_t scratch_bytes(const optim::Optimizer& optimizer, const optim::Kind& kind) {
  return round_up(optimizer.scratch(kind) * sizeof(double), kRoundAlignment);
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

std::vector<Bucket> buckets_of(const Layout& layout, const optim::Optimizer& optimizer, const Shards& shards,
                               UnitId unit) {
  std::vector<Bucket> buckets;
  if (!layout.trainable(unit)) return buckets;
  const ParameterId end = layout.end_parameter(unit);
  for (ParameterId first = layout.first_parameter(unit); first < end; first = buckets.back().end) {
    Bucket bucket = bucket_from(layout, optimizer, first, end);
    const Layout::Location& last = layout.location(bucket.end - 1);
    const ElementRange chunks =
        shards.chunks_with(unit, {layout.location(first).offset, last.offset + last.elements});
    bucket.first_chunk = chunks.begin;
    bucket.end_chunk = chunks.end;
    buckets.push_back(bucket);
  }
  return buckets;
}

RoundsNeed rounds_need(const Layout& layout, const optim::Optimizer& optimizer) {
  RoundsNeed need;
  const Shards shards(layout, optimizer, kChunkGrain);
  for (UnitId unit = 0; unit < layout.units().size(); ++unit)
    for (const Bucket& bucket : buckets_of(layout, optimizer, shards, unit)) {
      const std::size_t bytes = bucket.scratch_bytes + bucket.workspace_bytes;
      if (bytes <= need.bytes) continue;
      need = {bytes, bucket.scratch_bytes, bucket.first};
      for (ParameterId p = bucket.first; p < bucket.end; ++p)
        if (scratch_bytes(optimizer, kind_of(layout.spec(p))) >
            scratch_bytes(optimizer, kind_of(layout.spec(need.largest))))
          need.largest = p;
    }
  return need;
}

}  // namespace sluice::engine
