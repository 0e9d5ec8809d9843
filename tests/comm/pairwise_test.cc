#include "core/pairwise.h"
#include "comm/values.h"
#include "comm/worlds.h"
#include "testing.h"

namespace sluice::comm::pairwise_test {

using Case = std::tuple<World, int>;
class PairwiseTest : public testing::TestWithParam<Case> {
 protected:
  void run(const std::function<void(Communicator& comm)>& body) {
    run_communicators(std::get<0>(GetParam()), std::get<1>(GetParam()), body);
  }
  std::size_t most() const { return std::get<0>(GetParam()) == World::kTinyPackets ? 1001 : 70'001; }
};
INSTANTIATE_TEST_SUITE_P(Links, PairwiseTest,
                         testing::Values(Case(World::kThreads, 1), Case(World::kThreads, 8),
                                         Case(World::kTinyPackets, 3), Case(World::kHosts, 4),
                                         Case(World::kWideHosts, 8)));

// The sum of numbers [first, end) in the pairwise order, level by level as it is described.
Values pairwise_sum(std::vector<Values> level) {
  while (level.size() > 1) {
    std::vector<Values> next;
    for (std::size_t i = 0; i < level.size(); i += 2) {
      next.push_back(level[i]);
      for (std::size_t k = 0; i + 1 < level.size() && k < level[i].count(); ++k)
        set(next.back().array(), k, get(level[i].array(), k) + get(level[i + 1].array(), k));
    }
    level = std::move(next);
  }
  return level.front();
}

// Each rank adds its own numbers up to the largest sums of the order. The result is that of one rank.
TEST_P(PairwiseTest, HaveTheSameBitsWhoeverHasWhichNumbers) {
  run([&](Communicator& comm) {
    const auto rank = static_cast<std::size_t>(comm.rank());
    const std::size_t count = most();
    std::uint64_t id = 0;
    for (const std::size_t extra : {0, 1, 5, 6}) {
      const std::size_t total = static_cast<std::size_t>(comm.size()) * 3 + extra;
      std::vector<std::size_t> numbers{0};  // unequal shares, where there are extra ones
      for (int r = 0; r < comm.size(); ++r)
        numbers.push_back(r + 1 == comm.size() ? total : numbers.back() + 3 + (r == 1 ? extra : 0));
      std::vector<Values> all;
      for (std::size_t i = 0; i < total; ++i) all.emplace_back(Dtype::kF32, count, 77, static_cast<int>(i));
      std::vector<Values> own;
      PairwiseStack stack(numbers[rank]);
      for (std::size_t i = numbers[rank]; i < numbers[rank + 1]; ++i) {
        own.push_back(all[i]);
        for (std::size_t merge = stack.push(); merge > 0; --merge) {
          const Values upper = own.back();
          own.pop_back();
          own.back() = pairwise_sum({own.back(), upper});
        }
      }
      std::vector<Array> arrays;
      for (Values& values : own) arrays.push_back(values.array());
      Values expected = pairwise_sum(all);
      const SumOrder order = pairwise_order(numbers);
      const auto borders = borders_of(++id, count, comm.size());
      Ending scattered;
      comm.reduce_scatter(id, "x", arrays, borders, order, scattered.done());
      scattered.wait();
      for (std::size_t i = borders[rank]; i < borders[rank + 1]; ++i)
        ASSERT_EQ(get(arrays[0], i), get(expected.array(), i)) << total << " numbers, element " << i;
    }
  });
}

}  // namespace sluice::comm::pairwise_test
