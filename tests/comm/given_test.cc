#include "comm/given.h"

#include "comm/values.h"
#include "comm/worlds.h"
#include "testing.h"

// Sums to which each rank gives some elements alone.
namespace sluice::comm::given_test {

// By element: whether the rank gives it.
std::vector<bool> given_by(const Given& given, int rank, std::size_t count) {
  std::vector<bool> gives(count);
  for (const Runs& runs : given.by_rank()[static_cast<std::size_t>(rank)])
    for (std::size_t run = 0; run < runs.count; ++run)
      for (std::size_t i = 0; i < runs.size; ++i) gives[runs.first + run * runs.stride + i] = true;
  return gives;
}

// Rows of a matrix of 24 columns, of which ranks have some; then a vector of one rank; and then elements
// that nobody gives, or all do. The first two ranks have the same columns, and the last one has no rows.
Given some_of(std::size_t count, int ranks) {
  std::vector<Given::OfRank> by_rank(static_cast<std::size_t>(ranks));
  const std::size_t rows = count / 2 / 24, vector = rows * 24, end = vector + count / 4;
  const auto columns = 24 / static_cast<std::size_t>(ranks);
  for (std::size_t rank = 0; rank < by_rank.size(); ++rank) {
    if (rank + 1 < by_rank.size() || ranks == 1) {
      by_rank[rank].push_back({std::max<std::size_t>(rank, 1) * columns % 24, columns, 24, rows});
      by_rank[rank].push_back({(rank + 1) * columns % 24, rank == 0 ? 0 : columns / 2, 24, rows});
    }
    by_rank[rank].push_back({end + count / 8, count / 16});
  }
  by_rank.back().push_back({vector, end - vector});
  return Given(std::move(by_rank));
}

TEST(Given, HasTheRunsWithinElementsAndTheirNumber) {
  std::mt19937_64 random(3);
  const Given given({{{3, 2, 7, 20}, {5, 1, 7, 20}, {200, 30}}, {}, {{0, 5, 5, 10}}});
  for (int times = 0; times < 500; ++times) {
    const int rank = static_cast<int>(random() % 3);
    const std::size_t begin = random() % 240, end = begin + random() % (241 - begin);
    std::vector<comm::Run> expected;
    std::size_t count = 0;
    for (std::size_t i = begin; i < end; ++i) {
      if (!given_by(given, rank, 240)[i]) continue;
      ++count;
      if (!expected.empty() && expected.back().end == i - begin)
        ++expected.back().end;
      else
        expected.push_back({i - begin, i - begin + 1});
    }
    ASSERT_EQ(given.within(rank, {begin, end}), expected) << rank << ": " << begin << " to " << end;
    ASSERT_EQ(given.count(rank, {begin, end}), count);
  }
}

using Case = std::tuple<World, int>;
class GivenTest : public testing::TestWithParam<Case> {
 protected:
  World world() const { return std::get<0>(GetParam()); }
  int ranks() const { return std::get<1>(GetParam()); }
  // More than one block of each of several arrays, but where packets are tiny.
  std::size_t elements() const { return world() == World::kTinyPackets ? 3001 : 260'003; }
};
INSTANTIATE_TEST_SUITE_P(Links, GivenTest,
                         testing::Values(Case(World::kThreads, 1), Case(World::kThreads, 2),
                                         Case(World::kThreads, 5), Case(World::kFaulty, 3),
                                         Case(World::kTinyPackets, 3), Case(World::kHosts, 4),
                                         Case(World::kWideHosts, 8), Case(World::kMixedHosts, 4)));

// The arrays of a rank, with `other` for what it does not give.
std::vector<Values> arrays_of(const Given& given, int rank, std::size_t arrays, std::size_t count,
                              float other) {
  std::vector<Values> all;
  const std::vector<bool> gives = given_by(given, rank, count);
  for (std::size_t array = 0; array < arrays; ++array) {
    all.emplace_back(Dtype::kF32, count, array, rank);
    for (std::size_t i = 0; i < count; ++i)
      if (!gives[i]) set(all.back().array(), i, other);
  }
  return all;
}

// A sum, scattered or of all, of which this rank's part, or all of it, is returned.
std::vector<float> sum(Communicator& comm, std::vector<Values> values, const SumOrder& order, bool scatter,
                       const std::shared_ptr<const Given>& given, std::uint64_t id) {
  std::vector<Array> arrays;
  for (Values& one : values) arrays.push_back(one.array());
  const std::size_t count = values[0].count();
  const auto borders = borders_of(id / 2, count, comm.size());
  Ending end;
  if (scatter)
    comm.reduce_scatter(id, "x", arrays, borders, order, end.done(), given);
  else
    comm.all_reduce(id, "x", arrays, count, order, end.done(), given);
  end.wait();
  const auto rank = static_cast<std::size_t>(comm.rank());
  const float* const begin = arrays[0].f32();
  if (!scatter) return {begin, begin + count};
  return {begin + borders[rank], begin + borders[rank + 1]};
}

// An element that a rank does not give is NaN here, and -0 where it is sent.
TEST_P(GivenTest, HaveTheBitsOfSumsToWhichAllElementsAreGiven) {
  const auto given = std::make_shared<const Given>(some_of(elements(), ranks()));
  std::vector<std::size_t> numbers{0};
  std::vector<int> owners;
  for (int i = 0; i < 2 * ranks(); ++i) {
    numbers.push_back(numbers.back() + 1 + numbers.back() % 3);
    owners.push_back(i % ranks());
  }
  const std::span once = std::span(owners).first(owners.size() / 2);
  for (const SumOrder& order :
       {order_of_ranks(ranks()), pairwise_order(numbers, once), pairwise_order(numbers, owners)})
    for (const bool scatter : {true, false})
      run_communicators(world(), ranks(), [&](Communicator& comm) {
        const int rank = comm.rank();
        const std::size_t arrays = order.arrays_of(rank);
        for (std::uint64_t id = 2; id < 8; id += 2) {
          const auto whole = sum(comm, arrays_of(*given, rank, arrays, elements(), -0.0f), order, scatter,
                                 nullptr, id),
                     some = sum(
                         comm,
                         arrays_of(*given, rank, arrays, elements(), std::numeric_limits<float>::quiet_NaN()),
                         order, scatter, given, id + 1);
          ASSERT_EQ(some.size(), whole.size());
          for (std::size_t i = 0; i < some.size(); ++i) {
            // An element is NaN where nobody gives it.
            const std::uint32_t expected =
                std::bit_cast<std::uint32_t>(std::isnan(some[i]) ? -0.0f : some[i]);
            ASSERT_EQ(std::bit_cast<std::uint32_t>(whole[i]), expected) << i;
          }
        }
      });
}

// Of what others give of its part, a rank gets each element once.
TEST_P(GivenTest, AreSentWhatIsGivenAlone) {
  if (has_hosts(world())) GTEST_SKIP() << "hosts add before they send";
  const Given given = some_of(elements(), ranks());
  const auto shared = std::make_shared<const Given>(given);
  run_communicators(world(), ranks(), [&](Communicator& comm) {
    const std::uint64_t before = comm.counters().received;
    const auto borders = borders_of(2, elements(), comm.size());
    const auto rank = static_cast<std::size_t>(comm.rank());
    sum(comm, arrays_of(given, comm.rank(), 1, elements(), 1), order_of_ranks(ranks()), true, shared, 4);
    std::size_t expected = 0;
    for (int other = 0; other < ranks(); ++other) {
      const std::vector<bool> gives = given_by(given, other, elements());
      for (std::size_t i = borders[rank]; other != comm.rank() && i < borders[rank + 1]; ++i)
        expected += gives[i] ? sizeof(float) : 0;
    }
    EXPECT_EQ(comm.counters().received - before, expected);
  });
}

}  // namespace sluice::comm::given_test
