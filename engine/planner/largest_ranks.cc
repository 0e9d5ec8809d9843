#include "engine/planner/largest_ranks.h"

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <utility>

#include "engine/layout/layout.h"
#include "engine/layout/shards.h"
#include "engine/layout/state_format.h"
#include "engine/memory/relayed_shards.h"
#include "engine/plan/micro_batch_sums.h"

namespace sluice::engine {
namespace {

constexpr std::size_t kMostRanks = 8;

using Sizes = std::vector<std::size_t>;  // of what a rank has, in bytes
std::size_t sum(const Sizes& sizes) { return std::accumulate(sizes.begin(), sizes.end(), std::size_t{0}); }

// The sizes in which ranks of one plan differ.
class SizesOfRanks {
 public:
  SizesOfRanks(const Profile& profile, const optim::Optimizer& optimizer, const PlanRequest& request)
      : profile_(profile),
        request_(request),
        layout_(profile.units),
        hosts_(request.ranks.on_hosts()),
        shards_(layout_, optimizer, kChunkGrain, {request.ranks.size, 0, request.ranks.size}) {
    for (UnitId unit = 0; unit < layout_.units().size(); ++unit)
      if (layout_.unit_bytes(unit) > layout_.unit_bytes(largest_)) largest_ = unit;
  }

  Sizes of(int rank) const {
    Sizes sizes;
    for (UnitId unit = 0; unit < layout_.units().size(); ++unit)
      sizes.push_back(shards_.shard(unit, rank).size() * size_of(layout_.dtype(unit)));
    RankOf own = request_.ranks;
    own.rank = rank;
    sizes.push_back(engine::sums_bytes(
        profile_, layout_, {request_.reproducible, own, profile_.micro_batches, profile_.pieces}));
    const RelayedShards::Need need = RelayedShards::need_of(layout_, shards_, largest_, hosts_, rank);
    sizes.push_back(need.pieces * need.bytes);
    return sizes;
  }

 private:
  const Profile& profile_;
  const PlanRequest& request_;
  const Layout layout_;
  const comm::Hosts hosts_;
  const Shards shards_;
  UnitId largest_ = 0;
};

}  // namespace

std::vector<int> largest_ranks(const Profile& profile, const optim::Optimizer& optimizer,
                               const PlanRequest& request) {
  std::vector<int> ranks(static_cast<std::size_t>(request.ranks.size));
  std::iota(ranks.begin(), ranks.end(), 0);
  if (ranks.size() <= kMostRanks) return ranks;
  const SizesOfRanks sizes(profile, optimizer, request);
  std::map<Sizes, int> kinds;
  for (const int rank : ranks) kinds.try_emplace(sizes.of(rank), rank);
  std::vector<std::pair<Sizes, int>> all(kinds.begin(), kinds.end()), largest;
  std::ranges::stable_sort(all, std::greater<>(), [](const auto& kind) { return sum(kind.first); });
  for (auto& kind : all) {
    const auto has_all = [&](const auto& other) {
      return std::ranges::equal(kind.first, other.first, std::less_equal<>());
    };
    if (largest.size() < kMostRanks && std::ranges::none_of(largest, has_all))
      largest.push_back(std::move(kind));
  }
  ranks.clear();
  for (const auto& kind : largest) ranks.push_back(kind.second);
  return ranks;
}

}  // namespace sluice::engine
