#include "engine/agreement.h"

#include <algorithm>
#include <cstring>

#include "core/bytes.h"
#include "core/error.h"
#include "engine/call_id.h"

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
  struct Choice {
    std::uint64_t stage, chunk_elements;
  };
  Choice agreed = {plan.stage, plan.chunk_elements};
  const std::string own(reinterpret_cast<const char*>(&agreed), sizeof agreed);
  for (const std::string& bytes : exchange(communicator, "the plan", own, meanwhile)) {
    Choice other = {};
    ensure(bytes.size() == sizeof other, "a rank's plan has {} bytes of {}", bytes.size(), sizeof other);
    std::memcpy(&other, bytes.data(), sizeof other);
    agreed = {std::max(agreed.stage, other.stage), std::min(agreed.chunk_elements, other.chunk_elements)};
  }
  if (agreed.stage == plan.stage && agreed.chunk_elements == plan.chunk_elements) return false;
  request.stage = agreed.stage;
  request.chunk_elements = round_up(agreed.chunk_elements, kChunkGrain);
  return true;
}

}  // namespace sluice::engine
