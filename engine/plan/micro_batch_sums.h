#pragma once
#include <cstddef>
#include <vector>

#include "comm/sums.h"
#include "engine/plan/plan.h"

namespace sluice::engine {

// In what order a rank adds the gradients that its micro-batches have of one use of a parameter. Either one
// after another; or pairwise over the micro-batches of all ranks, so that the sum does not depend on how many
// ranks there are. Then this rank's gradients pile up as on a PairwiseStack, of which each sum has a buffer.
// A micro-batch in pieces (Profile::pieces) counts as that many. Where other ranks have pieces of the same
// micro-batch, its sum is apart from those of this rank's other micro-batches.
class MicroBatchSums {
 public:
  // micro_batches: of each rank in a step. pieces: of each of them, on this rank.
  MicroBatchSums(bool pairwise, const RankOf& ranks, std::size_t micro_batches, std::size_t pieces = 1);

  bool pairwise() const { return pairwise_; }
  std::size_t count() const { return merges_.size(); }  // of this rank's gradients of a use
  // How many sums there are once so many gradients were added.
  std::size_t height(std::size_t added) const { return heights_[added]; }
  // How often the two topmost sums then become one, when this gradient was put on them.
  std::size_t merges(std::size_t gradient) const { return merges_[gradient]; }
  // The most sums at once, with the gradient that is being written.
  std::size_t most() const { return most_; }
  // How many sums are kept beyond an access that adds so many gradients; to_the_end: also beyond the
  // last.
  std::size_t kept(std::size_t group, bool to_the_end) const;
  comm::SumOrder order() const;  // of what the ranks then add up

 private:
  bool pairwise_;
  RankOf ranks_;
  // The gradients of all ranks that have others are numbered: owners_[i] has those from borders_[i] to before
  // borders_[i + 1].
  std::vector<std::size_t> borders_{0};
  std::vector<int> owners_;
  std::vector<std::size_t> heights_, merges_;
  std::size_t most_ = 1;
};

// By unit: how many buffers each use of its gradient has, where so many micro-batches pass through it
// together.
std::vector<std::size_t> gradient_buffers(const Profile& profile, const MicroBatchSums& sums,
                                          std::size_t group);
// Within an access there may be more sums than buffers. Returns the memory of these sums, for the accesses
// that are held together.
std::size_t sums_bytes(const Profile& profile, const Layout& layout, const MicroBatchSums& sums);

}  // namespace sluice::engine
