#include "engine/plan/given_elements.h"

#include <utility>

namespace sluice::engine {
namespace {

std::shared_ptr<const comm::Given> given_to_use(const Layout& layout, const Profile& profile,
                                                const RankOf& ranks, UnitId unit, int use) {
  if (profile.written.empty() || ranks.parts.empty()) return nullptr;
  std::vector<comm::Given::OfRank> by_rank(ranks.parts.size());
  for (ParameterId p = layout.first_parameter(unit); p < layout.end_parameter(unit); ++p) {
    if (layout.spec(p).uses <= use) continue;
    const std::size_t begin = in_use(layout, unit, use, layout.location(p).offset);
    const WrittenElements& written = profile.written[p][static_cast<std::size_t>(use)];
    for (std::size_t rank = 0; rank < by_rank.size(); ++rank)
      for (comm::Runs runs : written[static_cast<std::size_t>(ranks.parts[rank])]) {
        runs.first += begin;
        by_rank[rank].push_back(runs);
      }
  }
  return std::make_shared<const comm::Given>(std::move(by_rank));
}

}  // namespace

GivenElements given_elements(const Layout& layout, const Profile& profile, const RankOf& ranks) {
  const std::vector<int> uses = gradient_uses(profile);
  GivenElements given(uses.size());
  for (UnitId unit = 0; unit < uses.size(); ++unit)
    for (int use = 0; use < uses[unit]; ++use)
      given[unit].push_back(given_to_use(layout, profile, ranks, unit, use));
  return given;
}

}  // namespace sluice::engine
