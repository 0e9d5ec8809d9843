#include "engine/layout/shards.h"

#include <algorithm>

#include "core/bytes.h"
#include "core/error.h"
#include "engine/layout/kind.h"

namespace sluice::engine {
namespace {

// The last element up to the rank's equal share at which the optimizer lets the parameter be cut.
std::size_t border_of(const Layout& layout, const optim::Optimizer& optimizer, UnitId unit, int rank,
                      int world) {
  const std::size_t elements = layout.unit_elements(unit);
  if (rank == world) return elements;
  const auto ranks = static_cast<std::size_t>(world), before = static_cast<std::size_t>(rank);
  const std::size_t share = elements / ranks * before + elements % ranks * before / ranks;
  ParameterId parameter = layout.end_parameter(unit) - 1;
  while (layout.location(parameter).offset > share) --parameter;
  const Layout::Location& location = layout.location(parameter);
  if (share >= location.offset + location.elements)
    return round_up(location.offset + location.elements, kParameterAlignment);
  const ParameterSpec& spec = layout.spec(parameter);
  const std::size_t cut = optimizer.last_cut(kind_of(spec), spec.span_first + share - location.offset);
  return location.offset + std::max(cut, spec.span_first) - spec.span_first;
}

}  // namespace

Shards::Shards(const Layout& layout, const optim::Optimizer& optimizer, std::size_t chunk_elements)
    : Shards(layout, optimizer, chunk_elements, Ranks{}) {}

Shards::Shards(const Layout& layout, const optim::Optimizer& optimizer, std::size_t chunk_elements,
               const Ranks& ranks)
    : layout_(layout), chunk_elements_(chunk_elements), first_(ranks.first) {
  ensure(0 <= ranks.first && ranks.first < ranks.end && ranks.end <= ranks.world,
         "shards of ranks {} to {} of {} cannot be asked for", ranks.first, ranks.end, ranks.world);
  held_ = static_cast<std::size_t>(ranks.end - ranks.first);
  borders_.resize(layout.units().size() * (held_ + 1));
  for (UnitId unit = 0; unit < layout.units().size(); ++unit) {
    const bool is_cut = ranks.cut.empty() || ranks.cut[unit];
    for (int rank = ranks.first; rank <= ranks.end; ++rank)
      borders_[unit * (held_ + 1) + static_cast<std::size_t>(rank - ranks.first)] =
          is_cut               ? border_of(layout, optimizer, unit, rank, ranks.world)
          : rank > ranks.first ? layout.unit_elements(unit)
                               : 0;
    chunks_before_.push_back(0);
    for (std::size_t i = 0; i < held_; ++i)
      chunks_before_.push_back(chunks_before_.back() + divide_up(held(unit, i).size(), chunk_elements_));
  }
}

ElementRange Shards::shard(UnitId unit, int rank) const {
  ensure(first_ <= rank && static_cast<std::size_t>(rank - first_) < held_,
         "the shard of rank {} is not here", rank);
  return held(unit, static_cast<std::size_t>(rank - first_));
}

ElementRange Shards::here(UnitId unit) const {
  return {borders_[unit * (held_ + 1)], borders_[unit * (held_ + 1) + held_]};
}

std::size_t Shards::chunks(UnitId unit) const { return chunks_before(unit)[held_]; }

ElementRange Shards::chunk(UnitId unit, std::size_t chunk) const {
  if (chunk >= chunks(unit))
    fail(ErrorCode::kState, "unit '{}' has no chunk {} here", layout_.units()[unit].name, chunk);
  const std::size_t* const before = chunks_before(unit);
  const auto index = static_cast<std::size_t>(std::upper_bound(before, before + held_, chunk) - before) - 1;
  const ElementRange shard = held(unit, index);
  const std::size_t begin = shard.begin + (chunk - before[index]) * chunk_elements_;
  return {begin, std::min(begin + chunk_elements_, shard.end)};
}

ElementRange Shards::chunks_with(UnitId unit, ElementRange elements) const {
  ElementRange found;
  for (std::size_t i = 0; i < held_; ++i) {
    const ElementRange shard = held(unit, i);
    const ElementRange both = intersection(elements, shard);
    if (both.size() == 0) continue;
    const std::size_t before = chunks_before(unit)[i];
    if (found.size() == 0) found.begin = before + (both.begin - shard.begin) / chunk_elements_;
    found.end = before + divide_up(both.end - shard.begin, chunk_elements_);
  }
  return found;
}

Slice Shards::slice(ParameterId parameter, ElementRange range) const {
  const ElementRange all = elements_of(layout_, parameter), both = intersection(range, all);
  if (both.size() == 0) return {parameter};
  return {parameter, both.begin - all.begin, both.begin - range.begin, both.size()};
}

Slice Shards::slice(ParameterId parameter, std::size_t chunk) const {
  return slice(parameter, this->chunk(layout_.location(parameter).unit, chunk));
}

std::vector<Slice> Shards::slices(UnitId unit, ElementRange elements) const {
  std::vector<Slice> slices;
  for (ParameterId p = layout_.first_parameter(unit); p < layout_.end_parameter(unit); ++p)
    if (const Slice found = slice(p, elements); found.count > 0) slices.push_back(found);
  return slices;
}

std::vector<Slice> Shards::slices(UnitId unit, std::size_t chunk) const {
  return slices(unit, this->chunk(unit, chunk));
}

}  // namespace sluice::engine
