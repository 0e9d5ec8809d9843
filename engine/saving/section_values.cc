#include "engine/saving/section_values.h"

#include <optional>
#include <string>
#include <utility>

#include "core/json.h"
#include "engine/layout/shards.h"
#include "engine/ranks/agreement.h"

namespace sluice::engine {
namespace {

// Calls the same function with the parameter's number in the model.
template <class... Arguments>
void translate(std::function<void(ParameterId, Arguments...)>& function, const Section& section) {
  if (!function) return;
  function = [inner = std::move(function), &section](ParameterId own, Arguments... arguments) {
    inner(section.of_model(own), arguments...);
  };
}

// The report of how the units of a rank's section are partitioned.
Json told_of(const Layout& model, const Section& section, const Plan& plan) {
  const std::vector<bool> partitioned = plan.partitions_state();
  Json units = Json::array();
  for (UnitId unit = 0; unit < model.units().size(); ++unit)
    if (const std::optional<UnitId> own = section.own(unit))
      units.push_back({{"unit", unit},
                       {"state", bool{partitioned[*own]}},
                       {"parameters", plan.units[*own].tier(Part::kParameters) == allocator::Tier::kRanks}});
  return {{"number", plan.ranks.rank}, {"units", units}};
}

}  // namespace

std::vector<Partition> partitions_of(const Layout& model, const optim::Optimizer& optimizer,
                                     const Section& section, const Plan& plan, comm::Communicator& ranks) {
  const std::vector<std::string> all =
      exchange(ranks, "who has what of the model", told_of(model, section, plan).dump());
  const Shards shards(model, optimizer, kChunkGrain, {plan.ranks.size, 0, plan.ranks.size});
  std::vector<Partition> partitions(model.units().size());
  for (Partition& partition : partitions) partition.ranks.resize(static_cast<std::size_t>(plan.ranks.size));
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    const Json told = Json::parse(all[rank]);
    const auto number = told.at("number").get<int>();  // among the ranks of its section
    for (const Json& of_unit : told.at("units")) {
      const auto unit = of_unit.at("unit").get<UnitId>();
      Partition& partition = partitions[unit];
      partition.ranks[static_cast<std::size_t>(number)] = static_cast<int>(rank);
      partition.parameters = of_unit.at("parameters").get<bool>();
      if (of_unit.at("state").get<bool>() && partition.shards.empty())
        for (int each = 0; each < plan.ranks.size; ++each)
          partition.shards.push_back(shards.shard(unit, each));
    }
  }
  return partitions;
}

UnitSource of_section(UnitSource of_model, const Section& section) {
  translate(of_model.values, section);
  translate(of_model.state, section);
  translate(of_model.whole, section);
  return of_model;
}

UnitSink of_section(UnitSink of_model, const Section& section) {
  translate(of_model.parameter, section);
  translate(of_model.master, section);
  translate(of_model.state, section);
  translate(of_model.whole, section);
  translate(of_model.values, section);
  return of_model;
}

}  // namespace sluice::engine
