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

// Each rank adds its own numbers, which are next to each other or dealt out in several turns, up to the
// largest sums of the order. The result is that of one rank.
TEST_P(PairwiseTest, HaveTheSameBitsWhoeverHasWhichNumbers) {
  run([&](Communicator& comm) {
    const auto rank = static_cast<std::size_t>(comm.rank());
    std::uint64_t id = 0;
    for (const int turns : {1, 2, 3})
      for (const std::size_t extra : {0, 1, 5, 6}) {
        const std::size_t count = turns == 1 ? most() : most() / 4;
        std::vector<std::size_t> numbers{0};  // unequal shares, where there are extra ones
        std::vector<int> owners;
        for (int turn = 0; turn < turns; ++turn)
          for (int r = 0; r < comm.size(); ++r) {
            const std::size_t each = turns == 1 ? 3 : 2;
            numbers.push_back(numbers.back() + each + (r == 1 || turn + 1 == turns ? extra : 0));
            owners.push_back(r);
          }
        const std::size_t total = numbers.back();
        std::vector<Values> all;
        for (std::size_t i = 0; i < total; ++i) all.emplace_back(Dtype::kF32, count, 77, static_cast<int>(i));
        std::vector<Values> own;
        for (std::size_t part = 0; part < owners.size(); ++part) {
          if (owners[part] != comm.rank()) continue;
          PairwiseStack stack(numbers[part]);
          for (std::size_t i = numbers[part]; i < numbers[part + 1]; ++i) {
            own.push_back(all[i]);
            for (std::size_t merge = stack.push(); merge > 0; --merge) {
              const Values upper = own.back();
              own.pop_back();
              own.back() = pairwise_sum({own.back(), upper});
            }
          }
        }
        std::vector<Array> arrays;
        for (Values& values : own) arrays.push_back(values.array());
        Values expected = pairwise_sum(all);
        const SumOrder order = pairwise_order(numbers, owners);
        const auto borders = borders_of(++id, count, comm.size());
        Ending scattered;
        comm.reduce_scatter(id, "x", arrays, borders, order, scattered.done());
        scattered.wait();
        for (std::size_t i = borders[rank]; i < borders[rank + 1]; ++i)
          ASSERT_EQ(get(arrays[0], i), get(expected.array(), i))
              << total << " numbers in " << turns << " turns, element " << i;
      }
  });
}

}  // namespace sluice::comm::pairwise_test
