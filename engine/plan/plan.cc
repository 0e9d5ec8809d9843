#include "engine/plan/plan.h"

#include <algorithm>

#include "core/error.h"

namespace sluice::engine {

using allocator::Tier;

std::vector<std::size_t> Plan::stages() const {
  std::vector<std::size_t> stages;
  for (const UnitPlan& unit : units) stages.push_back(unit.stage);
  return stages;
}

std::optional<std::size_t> Plan::one_stage() const {
  const std::size_t stage = units.front().stage;
  if (std::ranges::count(units, stage, &UnitPlan::stage) != std::ssize(units)) return std::nullopt;
  return stage;
}

std::vector<bool> Plan::partitions_state() const {
  std::vector<bool> partitioned;
  for (const UnitPlan& unit : units) partitioned.push_back(unit.stage > 0);
  return partitioned;
}

std::vector<bool> Plan::updated_by_cpu() const {
  std::vector<bool> by_cpu;
  for (const UnitPlan& unit : units) by_cpu.push_back(unit.updated_by_cpu());
  return by_cpu;
}

bool Plan::shards_on_gpus() const { return std::ranges::any_of(units, &UnitPlan::shard_on_gpu); }

bool Plan::partitions_any(Part part) const {
  return std::ranges::any_of(units, [part](const UnitPlan& unit) { return unit.tier(part) == Tier::kRanks; });
}

Tier tier_of_place(std::string_view place) {
  for (const Tier tier : {Tier::kHost, Tier::kDisk, Tier::kDevice})
    if (place == place_of(tier)) return tier;
  fail(ErrorCode::kInvalidArgument,
       "'{}' is not a place for parameters, gradients or state; use memory or disk, or device where a GPU "
       "computes",
       place);
}

std::string_view place_of(Tier tier) { return tier == Tier::kHost ? "memory" : name_of(tier); }

const char* DeviceTime::bound() const {
  const double most = least();
  if (computing.value_or(0) > most) return "computing";
  if (ranks > 0 && most == ranks) return "ranks";
  return most == link ? "link" : most == disk ? "disk" : most == cpu_updates ? "cpu updates" : "gpu updates";
}

}  // namespace sluice::engine
