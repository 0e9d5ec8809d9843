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

bool agree_on_order(comm::Communicator& communicator, const Plan& plan, const Profile& profile,
                    PlanRequest& request, const std::function<void()>& meanwhile) {
  const std::string name = "the order of the plan";
  const auto choices = [&](UnitId unit) -> const auto& { return profile.unit_profiles[unit].choices; };
  UnitId widest = 0;  // with the most choices
  for (UnitId unit = 0; unit < plan.units.size(); ++unit)
    if (choices(unit).size() > choices(widest).size()) widest = unit;
  const std::size_t own = plan.units[widest].choice;
  Json ways = Json::array();
  for (const ActivationChoice& choice : choices(widest)) ways.push_back(choice.name);
  std::size_t group = plan.group, level = own;
  std::vector<Json> all_ways;
  for (const std::string& text : exchange(
           communicator, name, Json{{"group", group}, {"level", level}, {"ways", ways}}.dump(), meanwhile)) {
    const Json other = parse_json(text, name);
    group = std::min(group, json_field<std::size_t>(other, "group", name));
    level = std::max(level, json_field<std::size_t>(other, "level", name));
    all_ways.push_back(other.at("ways"));
  }
  const auto way = [&](const Json& all) {
    return level < all.size() ? all[level].get<std::string>() : "nothing";
  };
  for (const Json& others : all_ways)
    if (way(others) != way(all_ways[0]))
      fail(ErrorCode::kInvalidArgument,
           "ranks that compute a micro-batch together would recompute different operations, '{}' and '{}': "
           "give all "
           "of them the same --recompute",
           way(all_ways[0]), way(others));
  request.group = group;
  request.recompute = choices(widest)[level].name;
  return group != plan.group || level != own;
}

namespace {

// Where this rank has its shards of parameters. Where its plan has none, it might have no room for them on
// its GPU, which is told only if nothing else does what is asked.
ShardPlace shard_place_of(const Plan& plan, const PlanRequest& request) {
  if (plan.partitions_any(Part::kParameters)) return plan.shard_place();
  const bool asks_gpu =
      request.updates == allocator::Tier::kDevice || request.place(Part::kState) == allocator::Tier::kDevice;
  return asks_gpu && request.place(Part::kParameters) != allocator::Tier::kDisk ? ShardPlace::kGpu
                                                                                : ShardPlace::kHost;
}

}  // namespace

bool agree_on_plan(comm::Communicator& communicator, const Plan& plan, PlanRequest& request,
                   const std::function<void()>& meanwhile, Stages chosen) {
  const std::vector<std::size_t> own = plan.stages();
  const std::string name = "the plan";
  const ShardPlace own_shards = shard_place_of(plan, request);
  const Json told = {{"stages", own},
                     {"chunk_elements", plan.chunk_elements},
                     {"has_shards", plan.partitions_any(Part::kParameters)},
                     {"shards", static_cast<int>(own_shards)},
                     {"gpus_meet", plan.ranks.gpus_meet},
                     {"asks", plan.ranks.gpus_meet && (!request.chooses_links || plan.needs_gpus_to_meet)}};
  std::vector<std::size_t> stages = own;
  std::size_t chunk_elements = plan.chunk_elements;
  ShardPlace shards = own_shards;
  bool all_meet = true, asks = false, have_shards = false;
  for (const std::string& text : exchange(communicator, name, told.dump(), meanwhile)) {
    const Json other = parse_json(text, name);
    const auto theirs = json_field<std::vector<std::size_t>>(other, "stages", name);
    ensure(theirs.size() == own.size(), "a rank's plan has {} units of {}", theirs.size(), own.size());
    for (UnitId unit = 0; unit < own.size(); ++unit)
      stages[unit] = chosen == Stages::kHighest ? std::max(stages[unit], theirs[unit])
                                                : std::min(stages[unit], theirs[unit]);
    chunk_elements = std::min(chunk_elements, json_field<std::size_t>(other, "chunk_elements", name));
    have_shards |= json_field<bool>(other, "has_shards", name);
    shards = std::max(shards, static_cast<ShardPlace>(json_field<int>(other, "shards", name)));
    all_meet &= json_field<bool>(other, "gpus_meet", name);
    asks |= json_field<bool>(other, "asks", name);
  }
  request.chooses_links = false;
  request.ranks.gpus_meet = all_meet || asks;
  request.ranks.by_nccl = request.ranks.by_nccl && request.ranks.gpus_meet;
  request.stages = stages;
  if (!request.ranks.gpus_read()) shards = ShardPlace::kHost;
  if (have_shards) request.shards = shards;
  const bool moves = (have_shards && shards != own_shards) || request.ranks.gpus_meet != plan.ranks.gpus_meet;
  if (stages == own && chunk_elements == plan.chunk_elements && !moves) return false;
  request.chunk_elements = round_up(chunk_elements, kChunkGrain);
  return true;
}

}  // namespace sluice::engine
