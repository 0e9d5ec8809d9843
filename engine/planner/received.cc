#include <algorithm>

#include "engine/layout/stripes.h"
#include "engine/plan/rows_of_tokens.h"
#include "engine/planner/placement.h"

// The bytes that a rank receives from the others in a step, and its host from other hosts.
namespace sluice::engine {

// Where ranks of a host add before they send, this is not one array of each other rank; see comm::SumRoute.
void Placement::find_routes(const optim::Optimizer& optimizer) {
  if (hosts_.ranks() == 1) return;
  const auto sent = [](const comm::SumRoute& route, const auto& counts) {
    std::vector<SentArray> arrays;
    for (const comm::SumRoute::Input& input : route.own_inputs())
      if (counts(input.from)) arrays.push_back({input.from, route.relays_to_own(input.from)});
    return arrays;
  };
  const auto from_others = [&](int from) { return from != ranks_.rank; };
  const comm::SumOrder order = sums_.order();
  for (const int rank : hosts_.with(ranks_.rank)) {
    if (rank != ranks_.rank && hosts_.all_on_one()) continue;  // nothing comes from other hosts
    const comm::SumRoute route(order, hosts_, true, rank);
    from_hosts_.push_back(sent(route, [&](int from) { return !hosts_.on_one(from, rank); }));
    if (rank != ranks_.rank) continue;
    own_arrays_ = sent(route, from_others);
    relayed_arrays_ = static_cast<std::size_t>(
        std::ranges::count_if(route.host_inputs(), from_others, &comm::SumRoute::Input::from));
    for (int owner = 0; owner < ranks_.size; ++owner)
      if (route.relays_for(owner)) relayed_owners_.push_back(owner);
  }
  if ((!hosts_.all_on_one() && std::ranges::count(stages_, 0) < std::ssize(stages_)) || passes_shards())
    all_shards_.emplace(layout_, optimizer, kChunkGrain, Shards::Ranks{ranks_.size, 0, ranks_.size});
  given_ = given_elements(layout_, profile_, ranks_);
}

// Whether ranks do not sum that use of the unit's gradient, since another section does.
bool Placement::comes_from_section(UnitId unit, int use) const {
  return profile_.twin && profile_.twin->unit == unit && profile_.twin->other_use() == use;
}

bool Placement::sums_early(UnitId unit, const UnitPlan& plan, int use) const {
  const std::vector<std::size_t>& writes = units_[unit].at.last_writes;
  const auto at = static_cast<std::size_t>(use);
  return !profile_.any_order && !comes_from_section(unit, use) && plan.resident(Part::kGradient) &&
         at < writes.size() && writes[at] < units_[unit].at.last;
}

// Ranks of a host receive equal parts of the bytes from other hosts, and hand them on.
void Placement::count_in_host(Arriving& arriving) const {
  if (hosts_.all_on_one()) return;
  const std::uint64_t own = arriving.by_link / hosts_.with(ranks_.rank).size();
  arriving.in_host = arriving.bytes - std::min(arriving.bytes, own);
}

Arriving Placement::shards_of_others(UnitId unit) const {
  const std::size_t size = size_of(layout_.dtype(unit));
  Arriving all;
  all.bytes = all.by_link = (layout_.unit_elements(unit) - format_.shards().here(unit).size()) * size;
  if (hosts_.all_on_one()) return all;
  all.by_link = 0;
  for (int owner = 0; owner < ranks_.size; ++owner)
    if (!hosts_.on_one(owner, ranks_.rank)) all.by_link += all_shards_->shard(unit, owner).size() * size;
  count_in_host(all);
  return all;
}

Placement::Received Placement::received(UnitId unit, const UnitPlan& plan) const {
  Received received;
  if (ranks_.size == 1) return received;
  if (plan.tier(Part::kParameters) == allocator::Tier::kRanks &&
      (plan.shard_on_gpu() || passes_shards() || !copies_shards()))
    received.fetched = shards_of_others(unit);
  if (!updated(unit)) return received;
  for (int use = 0; use < (profile_.any_order ? 1 : uses_[unit]); ++use)
    if (!comes_from_section(unit, use))
      (sums_early(unit, plan, use) ? received.early : received.gradient) += received_of_sum(unit, use);
  if (sums_on_gpus(plan)) received.gradient = ranks_.by_nccl ? sent_by_nccl(unit) : read_by_gpu(unit);
  if (stages_[unit] > 0 && plan.tier(Part::kParameters) != allocator::Tier::kRanks)
    received.updated = shards_of_others(unit);
  return received;
}

// Each GPU reads what all others have of what its rank needs the sum of, and passes nothing on.
Arriving Placement::read_by_gpu(UnitId unit) const {
  const ElementRange all = {0, layout_.unit_elements(unit)};
  const std::size_t needed =
      elements_of_parameters(unit, stages_[unit] > 0 ? format_.shards().here(unit) : all);
  const Dtype given = is_one_gradient() ? layout_.dtype(unit) : Dtype::kF32;
  Arriving arriving;
  arriving.bytes = static_cast<std::size_t>(ranks_.size - 1) * needed * size_of(given);
  return arriving;
}

// Each rank gets what all others have of its share, and where the unit is not cut, the sums of theirs.
Arriving Placement::sent_by_nccl(UnitId unit) const {
  const bool cut = stages_[unit] > 0;
  const auto ranks = static_cast<std::size_t>(ranks_.size), me = static_cast<std::size_t>(ranks_.rank);
  std::vector<std::size_t> shares(ranks);
  if (cut) shares[me] = format_.shards().here(unit).size();
  const ElementRange all{0, cut ? 0 : layout_.unit_elements(unit)};
  for (const Stripe& stripe : stripes_of({&all, 1}, DeviceRanks::pace(layout_, true).elements))
    for (std::size_t rank = 0; rank < ranks; ++rank)
      shares[rank] += share_of(stripe.parts.front().elements.size(), rank, ranks).size();
  const std::size_t given = size_of(is_one_gradient() ? layout_.dtype(unit) : Dtype::kF32);
  Arriving arriving;
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    if (rank == me) continue;
    const std::size_t bytes = shares[me] * given + shares[rank] * sizeof(float);
    arriving.bytes += bytes;
    if (!hosts_.on_one(static_cast<int>(rank), ranks_.rank)) arriving.by_link += bytes;
  }
  return arriving;
}

std::uint64_t Placement::received_bytes(UnitId unit, const UnitPlan& plan, std::size_t groups) const {
  const Received all = received(unit, plan);
  return sums_in_step() * all.gradient.bytes + all.early.bytes + all.updated.bytes +
         all.fetched.bytes * units_[unit].at.fetches * groups;
}

std::uint64_t Placement::received_from_hosts(UnitId unit, const UnitPlan& plan) const {
  const Received all = received(unit, plan);
  if (hosts_.all_on_one()) return 0;
  return sums_in_step() * all.gradient.by_link + all.early.by_link + all.updated.by_link +
         all.fetched.by_link * units_[unit].at.fetches * micro_batches();
}

std::uint64_t Placement::received_of_sections() const {
  std::uint64_t bytes = profile_.whole_step ? profile_.whole_step->received : 0;
  if (!profile_.twin) return bytes;
  const UnitId unit = profile_.twin->unit;
  const ElementRange own = format_.shards().here(unit);
  const auto at = [&](std::size_t element) {
    return in_use(layout_, unit, profile_.twin->other_use(), element);
  };
  return bytes + (at(own.end) - at(own.begin)) * sizeof(float);
}

// How many elements of a sum that use of the unit's gradient has in the part that is that rank's.
std::size_t Placement::sent_to(UnitId unit, int use, int owner) const {
  if (stages_[unit] > 0) return sent_elements(unit, use, shard_of(unit, owner));
  const std::size_t all = sent_elements(unit, use, {0, layout_.unit_elements(unit)});
  const auto ranks = static_cast<std::size_t>(ranks_.size), rank = static_cast<std::size_t>(owner);
  return all / ranks + (rank < all % ranks ? 1 : 0);
}

// And how many of them these arrays have together.
std::size_t Placement::sent_to(UnitId unit, int use, int owner, const std::vector<SentArray>& arrays) const {
  const std::size_t all = sent_to(unit, use, owner), whole = use_elements(layout_, unit, use);
  const comm::Given* const given = given_[unit][static_cast<std::size_t>(use)].get();
  if (given == nullptr) return all * arrays.size();
  const bool by_rows = sent_elements(unit, use, {0, layout_.unit_elements(unit)}) < whole;
  const comm::Run part = part_of_sum(unit, use, owner);
  std::size_t sent = 0;
  for (const auto& [from, is_whole] : arrays) {
    if (is_whole)
      sent += all;
    else if (!by_rows)
      sent += given->count(from, part);
    else if (given->count(from, {0, whole}) > 0)  // of all rows, since others have none
      sent += all;
  }
  return sent;
}

// Where that part is in the buffer of the use. REQUIRES: it is summed whole.
comm::Run Placement::part_of_sum(UnitId unit, int use, int owner) const {
  comm::Run part{};
  if (stages_[unit] > 0) {
    part.begin = in_use(layout_, unit, use, shard_of(unit, owner).begin);
  } else {
    for (int before = 0; before < owner; ++before) part.begin += sent_to(unit, use, before);
  }
  part.end = part.begin + sent_to(unit, use, owner);
  return part;
}

// The sum of a rank's own part takes what the others have of it. Where nothing is partitioned, the other
// parts come when they are summed.
Arriving Placement::received_of_sum(UnitId unit, int use) const {
  const bool cut = stages_[unit] > 0;
  const std::size_t all_sent = cut ? 0 : sent_elements(unit, use, {0, layout_.unit_elements(unit)});
  const auto part_of = [&](int owner) { return sent_to(unit, use, owner); };
  Arriving all;
  all.bytes = sent_to(unit, use, ranks_.rank, own_arrays_) + (!cut ? all_sent - part_of(ranks_.rank) : 0);
  for (const int owner : relayed_owners_) all.bytes += part_of(owner) * relayed_arrays_;
  if (hosts_.all_on_one()) {
    all.by_link = all.bytes;
  } else {
    const std::span<const int> here = hosts_.with(ranks_.rank);
    std::size_t parts_here = 0;
    for (std::size_t i = 0; i < here.size(); ++i) {
      all.by_link += sent_to(unit, use, here[i], from_hosts_[i]);
      parts_here += part_of(here[i]);
    }
    if (!cut) all.by_link += all_sent - parts_here;
  }
  count_in_host(all);
  const bool on_gpus = compute_ == allocator::Tier::kDevice;
  return all * (on_gpus ? size_of(moved_gradient_type(unit)) : sizeof(float));
}

// How many of these elements of a unit are in sums of that use, at most.
std::size_t Placement::sent_elements(UnitId unit, int use, const ElementRange& of) const {
  std::size_t sent = in_use(layout_, unit, use, of.end) - in_use(layout_, unit, use, of.begin);
  for (ParameterId p = layout_.first_parameter(unit); p < layout_.end_parameter(unit); ++p) {
    const ParameterSpec& spec = layout_.spec(p);
    const std::optional<std::size_t> rows = rows_of_tokens(spec, use, ranks_, profile_);
    if (!rows) continue;
    const std::size_t whole = intersection(of, elements_of(layout_, p)).size();
    sent -= whole - std::min(whole, *rows * (spec.elements() / spec.shape.front()));
  }
  return sent;
}

}  // namespace sluice::engine
