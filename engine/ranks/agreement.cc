#include "engine/ranks/agreement.h"

#include <algorithm>

#include "core/bytes.h"
#include "core/error.h"
#include "core/json.h"
#include "engine/ranks/call_id.h"

namespace sluice::engine {

std::vector<std::string> exchange(comm::Communicator& communicator, const std::string& name,
                                  const std::string& own, const std::function<void()>& meanwhile) {
  return communicator.exchange(call_id(name), name, own, meanwhile);
}

RankOf rank_of(const comm::Communicator& communicator) {
  const comm::Hosts& hosts = communicator.hosts();
  RankOf rank{communicator.rank(), communicator.size()};
  for (int r = 0; r < rank.size && !hosts.all_on_one(); ++r) rank.hosts.push_back(hosts.first_of(r));
  return rank;
}

bool agree_on_plan(comm::Communicator& communicator, const Plan& plan, PlanRequest& request,
                   const std::function<void()>& meanwhile) {
  const std::vector<std::size_t> own = plan.stages();
  const std::string name = "the plan";
  const Json told = {{"stages", own}, {"chunk_elements", plan.chunk_elements}};
  std::vector<std::size_t> stages = own;
  std::size_t chunk_elements = plan.chunk_elements;
  for (const std::string& text : exchange(communicator, name, told.dump(), meanwhile)) {
    const Json other = parse_json(text, name);
    const auto theirs = json_field<std::vector<std::size_t>>(other, "stages", name);
    ensure(theirs.size() == own.size(), "a rank's plan has {} units of {}", theirs.size(), own.size());
    for (UnitId unit = 0; unit < own.size(); ++unit) stages[unit] = std::max(stages[unit], theirs[unit]);
    chunk_elements = std::min(chunk_elements, json_field<std::size_t>(other, "chunk_elements", name));
  }
  request.stages = stages;
  if (stages == own && chunk_elements == plan.chunk_elements) return false;
  request.chunk_elements = round_up(chunk_elements, kChunkGrain);
  return true;
}

}  // namespace sluice::engine
