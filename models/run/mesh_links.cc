#include "models/run/mesh_links.h"

#include <algorithm>
#include <limits>
#include <map>
#include <tuple>

#include "comm/sum_route.h"

namespace sluice::models {
namespace {

// Where a link between hosts is known and none within a host, communication within a host takes no time.
std::optional<engine::Link> link_within(const TrainSettings& s) {
  if (s.host_link || !s.link) return s.host_link;
  if (s.ranks.on_hosts().all_on_one()) return s.link;
  return engine::Link{std::numeric_limits<double>::infinity(), 0};
}

// Returns a share of the network between hosts.
std::optional<engine::Link> part_of_wire(const TrainSettings& s, std::size_t part, std::size_t of) {
  std::optional<engine::Link> link = s.link;
  if (link) link->bandwidth *= static_cast<double>(part) / static_cast<double>(of);
  return link;
}

int size_along(const TrainSettings& s, const char* axis) { return s.mesh ? s.mesh->size(axis) : 1; }

// Of the ranks of this one's section. What all ranks of an axis get, comes to a host once.
PartsFromHosts parts_from_hosts(const TrainSettings& s, const char* axis) {
  PartsFromHosts come;
  const comm::Hosts all = s.ranks.on_hosts();
  if (!s.mesh || all.all_on_one()) return come;
  for (const int rank : ranks_of_section(s, s.mesh->coordinate(s.ranks.rank, "pipeline"))) {
    if (!all.on_one(rank, s.ranks.rank)) continue;
    std::vector<int> numbers;
    for (const int other : s.mesh->along(rank, axis)) numbers.push_back(all.first_of(other));
    const comm::Hosts hosts(numbers);
    const int own = s.mesh->coordinate(rank, axis);
    const comm::SumRoute route(comm::order_of_ranks(hosts.ranks()), hosts, true, own);
    come.added += static_cast<std::size_t>(std::ranges::count_if(
        route.own_inputs(), [&](const auto& input) { return !hosts.on_one(input.from, own); }));
    if (hosts.first_of(own) == own) come.gathered += numbers.size() - hosts.with(own).size();
  }
  return come;
}

}  // namespace

int sections_of(const TrainSettings& s) { return size_along(s, "pipeline"); }

int data_size(const TrainSettings& s) { return s.mesh ? s.mesh->size("data") : s.ranks.size; }
int data_rank(const TrainSettings& s, int rank) { return s.mesh ? s.mesh->coordinate(rank, "data") : rank; }

int tensor_size(const TrainSettings& s) { return size_along(s, "tensor"); }

TensorCut tensor_cut(const TrainSettings& s) {
  TensorCut cut;
  cut.ranks = static_cast<std::size_t>(tensor_size(s));
  if (s.mesh) cut.rank = static_cast<std::size_t>(s.mesh->coordinate(s.ranks.rank, "tensor"));
  cut.from_hosts = parts_from_hosts(s, "tensor");
  cut.pieces = s.plan.reproducible ? *s.grain : cut.ranks;
  return cut;
}

SequenceCut sequence_cut(const TrainSettings& s) {
  SequenceCut cut;
  cut.ranks = static_cast<std::size_t>(size_along(s, "sequence"));
  if (s.mesh) cut.rank = static_cast<std::size_t>(s.mesh->coordinate(s.ranks.rank, "sequence"));
  cut.from_hosts = parts_from_hosts(s, "sequence");
  cut.pieces = s.sequence_grain.value_or(cut.ranks);
  return cut;
}

// For sums over the micro-batches of all ranks, ranks with the same pieces of layers are consecutive, and
// among them those with the same micro-batches.
std::vector<int> ranks_of_section(const TrainSettings& s, int section) {
  std::vector<int> ranks =
      s.mesh->across(s.mesh->along(0, "pipeline")[static_cast<std::size_t>(section)], "pipeline");
  if (s.plan.reproducible)
    std::ranges::sort(ranks, {}, [&](int rank) {
      const auto at = [&](const char* axis) { return s.mesh->coordinate(rank, axis); };
      return std::tuple(at("tensor"), at("data"), at("sequence"));
    });
  return ranks;
}

engine::RankOf section_ranks(const TrainSettings& s, int rank) {
  if (!s.mesh) return {rank, s.ranks.size, s.ranks.hosts};
  const std::vector<int> ranks = ranks_of_section(s, s.mesh->coordinate(rank, "pipeline"));
  engine::RankOf own{static_cast<int>(std::ranges::find(ranks, rank) - ranks.begin()),
                     static_cast<int>(ranks.size()),
                     {},
                     tensor_size(s) * size_along(s, "sequence"),
                     tensor_size(s)};
  if (tensor_size(s) > 1)
    for (const int other : ranks) own.parts.push_back(s.mesh->coordinate(other, "tensor"));
  if (!s.ranks.hosts.empty())
    for (const int other : ranks) own.hosts.push_back(s.ranks.hosts[static_cast<std::size_t>(other)]);
  return own;
}
engine::RankOf section_ranks(const TrainSettings& s) { return section_ranks(s, s.ranks.rank); }

void set_links(const TrainSettings& s, int rank, engine::MachineRates& rates) {
  const engine::RankOf ranks = section_ranks(s, rank);
  const comm::Hosts all = s.ranks.on_hosts();
  for (const char* axis : {"tensor", "sequence"}) {
    const std::vector<int> others = s.mesh ? s.mesh->along(rank, axis) : std::vector<int>();
    if (others.size() < 2) continue;
    const bool on_one = std::ranges::all_of(others, [&](int other) { return all.on_one(other, rank); });
    if (!rates.layer_link || !on_one)
      rates.layer_link = on_one ? link_within(s) : part_of_wire(s, 1, all.with(rank).size());
  }
  const comm::Hosts hosts = ranks.on_hosts();
  if (hosts.all_on_one()) {
    rates.link = link_within(s);
    rates.host_link.reset();
    return;
  }
  rates.link = part_of_wire(s, hosts.with(ranks.rank).size(), all.with(rank).size());
  rates.host_link = s.host_link;
}

std::optional<engine::Link> link_between(const TrainSettings& s, int section, int other) {
  const comm::Hosts hosts = s.ranks.on_hosts();
  const std::vector<int> from = ranks_of_section(s, section), to = ranks_of_section(s, other);
  std::map<int, std::size_t> sending, receiving;  // number of ranks, by host
  std::size_t most = 0;
  for (std::size_t i = 0; i < from.size(); ++i)
    if (!hosts.on_one(from[i], to[i]))
      most = std::max({most, ++sending[hosts.first_of(from[i])], ++receiving[hosts.first_of(to[i])]});
  return most == 0 ? link_within(s) : part_of_wire(s, 1, most);
}

}  // namespace sluice::models
