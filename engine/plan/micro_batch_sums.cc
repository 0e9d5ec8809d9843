#include "engine/plan/micro_batch_sums.h"

#include <algorithm>
#include <set>

#include "core/pairwise.h"

namespace sluice::engine {

MicroBatchSums::MicroBatchSums(bool pairwise, const RankOf& ranks, std::size_t micro_batches,
                               std::size_t pieces)
    : pairwise_(pairwise), ranks_(ranks), heights_{0} {
  if (!pairwise) {
    merges_.assign(micro_batches * pieces, 0);
    heights_.resize(merges_.size() + 1, 1);
    return;
  }
  const int apart = ranks.size / ranks.alike;        // ranks with gradients of their own
  const int sharing = ranks.together / ranks.alike;  // of them, those that share a micro-batch
  // A rank's gradients are next to each other, unless it shares micro-batches.
  const std::size_t stretches = sharing > 1 ? micro_batches : 1, size = micro_batches * pieces / stretches;
  for (int first = 0; first < apart; first += sharing)
    for (std::size_t stretch = 0; stretch < stretches; ++stretch)
      for (int rank = first; rank < first + sharing; ++rank) {
        borders_.push_back(borders_.back() + size);
        owners_.push_back(rank);
      }
  for (std::size_t i = 0; i < owners_.size(); ++i) {
    if (owners_[i] != ranks.rank % apart) continue;
    PairwiseStack stack(borders_[i]);
    const std::size_t below = heights_.back();
    for (std::size_t gradient = 0; gradient < size; ++gradient) {
      most_ = std::max(most_, below + stack.height() + 1);
      merges_.push_back(stack.push());
      heights_.push_back(below + stack.height());
    }
    if (apart > 1) continue;
    merges_.back() += stack.carries();
    heights_.back() = 1;
  }
}

comm::SumOrder MicroBatchSums::order() const {
  // One rank alone has made its sums one.
  if (!pairwise_ || ranks_.size == ranks_.alike) return comm::order_of_ranks(ranks_.size);
  const comm::SumOrder once = comm::pairwise_order(borders_, owners_);
  comm::SumOrder order;
  PairwiseStack stack;
  for (int i = 0; i < ranks_.alike; ++i) {  // all but one of which give nothing of an element
    for (const int rank : once.from) order.from.push_back(i * once.ranks() + rank);
    order.merges.insert(order.merges.end(), once.merges.begin(), once.merges.end());
    order.merges.back() += stack.push();
  }
  order.merges.back() += stack.carries();
  return order;
}

std::size_t MicroBatchSums::kept(std::size_t group, bool to_the_end) const {
  std::size_t most = to_the_end ? heights_.back() : 1;
  for (std::size_t added = group; added + 1 < heights_.size(); added += group)
    most = std::max(most, heights_[added]);
  return most;
}

std::vector<std::size_t> gradient_buffers(const Profile& profile, const MicroBatchSums& sums,
                                          std::size_t group) {
  std::vector<std::set<int>> uses(profile.units.size());
  for (const Access& access : profile.schedule)
    if (access.gradient_use >= 0 || access.final) uses[access.unit].insert(access.gradient_use);
  // A use is kept until others are complete, and what is complete of a use until its weights are. In any
  // order gradients are used after the last access.
  std::vector<bool> kept(profile.units.size(), profile.any_order);
  for (UnitId unit = 0; unit < kept.size(); ++unit) kept[unit] = kept[unit] || uses[unit].size() > 1;
  for (std::size_t i = 0; profile.whole_step && i < profile.schedule.size(); ++i)
    if (profile.whole_step->parts[i].weights) kept[profile.schedule[i].unit] = true;
  std::vector<std::size_t> buffers;
  for (const bool to_the_end : kept) buffers.push_back(sums.kept(group * profile.pieces, to_the_end));
  return buffers;
}

std::size_t sums_bytes(const Profile& profile, const Layout& layout, const MicroBatchSums& sums) {
  // In any order a gradient is added from the client's memory.
  if (profile.any_order || sums.most() == 1) return 0;
  std::size_t most = 0, together = 0;
  for (const Access& access : profile.schedule) {
    if (!access.joined) together = 0;
    if (access.gradient_use >= 0) together += use_elements(layout, access.unit, access.gradient_use);
    most = std::max(most, together);
  }
  return (sums.most() - 1) * most * sizeof(float);
}

}  // namespace sluice::engine
