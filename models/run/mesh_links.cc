#include "models/run/mesh_links.h"

#include <algorithm>
#include <limits>
#include <map>

namespace sluice::models {
namespace {

// Where a link between hosts is known, and nothing of a host's own, what passes within a host takes no time.
std::optional<engine::Link> link_within(const TrainSettings& s) {
  if (s.host_link || !s.link) return s.host_link;
  if (s.ranks.on_hosts().all_on_one()) return s.link;
  return engine::Link{std::numeric_limits<double>::infinity(), 0};
}

// A part of the wire between hosts.
std::optional<engine::Link> part_of_wire(const TrainSettings& s, std::size_t part, std::size_t of) {
  std::optional<engine::Link> link = s.link;
  if (link) link->bandwidth *= static_cast<double>(part) / static_cast<double>(of);
  return link;
}

}  // namespace

int sections_of(const TrainSettings& s) { return s.mesh ? s.mesh->size("pipeline") : 1; }

std::vector<int> ranks_of_section(const TrainSettings& s, int section) {
  const int first = s.mesh->along(0, "pipeline")[static_cast<std::size_t>(section)];
  return s.mesh->along(first, "data");
}

engine::RankOf data_ranks(const TrainSettings& s, int rank) {
  if (sections_of(s) == 1) return {rank, s.ranks.size, s.ranks.hosts};
  engine::RankOf ranks{s.mesh->coordinate(rank, "data"), s.mesh->size("data"), {}};
  if (!s.ranks.hosts.empty())
    for (const int other : s.mesh->along(rank, "data"))
      ranks.hosts.push_back(s.ranks.hosts[static_cast<std::size_t>(other)]);
  return ranks;
}
engine::RankOf data_ranks(const TrainSettings& s) { return data_ranks(s, s.ranks.rank); }

void set_links(const TrainSettings& s, int rank, engine::MachineRates& rates) {
  const engine::RankOf ranks = data_ranks(s, rank);
  const comm::Hosts hosts = ranks.on_hosts();
  if (hosts.all_on_one()) {
    rates.link = link_within(s);
    rates.host_link.reset();
    return;
  }
  rates.link = part_of_wire(s, hosts.with(ranks.rank).size(), s.ranks.on_hosts().with(rank).size());
  rates.host_link = s.host_link;
}

std::optional<engine::Link> link_between(const TrainSettings& s, int section, int other) {
  const comm::Hosts hosts = s.ranks.on_hosts();
  const std::vector<int> from = ranks_of_section(s, section), to = ranks_of_section(s, other);
  std::map<int, std::size_t> sending, receiving;  // by host
  std::size_t most = 0;
  for (std::size_t i = 0; i < from.size(); ++i)
    if (!hosts.on_one(from[i], to[i]))
      most = std::max({most, ++sending[hosts.first_of(from[i])], ++receiving[hosts.first_of(to[i])]});
  return most == 0 ? link_within(s) : part_of_wire(s, 1, most);
}

}  // namespace sluice::models
