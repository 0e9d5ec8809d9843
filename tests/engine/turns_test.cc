#include "engine/turns.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "engine/ranks_client.h"

// Tests of the order in which ranks that have other units than each other sum them in backward.
namespace sluice::engine {
namespace turns_test {

using ::testing::ElementsAre;
using Units = std::vector<UnitId>;

// Whether `units` come in `order` as they do here.
bool agrees(const Units& order, const Units& units) {
  auto from = order.begin();
  for (const UnitId unit : units) {
    from = std::find(from, order.end(), unit);
    if (from == order.end()) return false;
  }
  return true;
}

Units some_of(const Units& order, std::mt19937& random) {
  Units some;
  for (const UnitId unit : order)
    if (random() % 10 < 6) some.push_back(unit);
  return some;
}

Units shuffled(std::size_t units, std::mt19937& random) {
  Units order(units);
  std::iota(order.begin(), order.end(), UnitId{0});
  std::ranges::shuffle(order, random);
  return order;
}

Units reversed(Units units) {
  std::ranges::reverse(units);
  return units;
}

TEST(MergedOrders, AgreeWithEachThatContradictsNoOther) {
  for (unsigned seed = 0; seed < 200; ++seed) {
    std::mt19937 random(seed);
    const Units common = shuffled(12, random), before = shuffled(12, random);
    Turns::OfRanks orders;
    for (int rank = 0; rank < 3; ++rank) orders.push_back(some_of(common, random));
    const Units found = merged(before, orders);
    EXPECT_TRUE(std::ranges::is_permutation(found, before));
    for (const Units& order : orders) EXPECT_TRUE(agrees(found, order)) << seed;
  }
  EXPECT_THAT(merged({3, 2, 1, 0}, {}), ElementsAre(3, 2, 1, 0));
  EXPECT_THAT(merged({3, 2, 1, 0}, {{1, 3}}), ElementsAre(2, 1, 3, 0));
}

TEST(MergedOrders, HaveEachUnitWhereTheyContradictEachOther) {
  EXPECT_THAT(merged({2, 1, 0}, {{0, 1}, {1, 0}}), ElementsAre(2, 1, 0));
  EXPECT_THAT(merged({3, 2, 1, 0}, {{0, 1, 2, 3}, {3, 2, 1, 0}}), ElementsAre(3, 2, 1, 0));
}

TEST(Turns, BeginInTheReverseOfDeclaration) { EXPECT_THAT(Turns(4).order(), ElementsAre(3, 2, 1, 0)); }

// The units of each step are any.
TEST(Turns, FollowForwardPassesFromTheFirstStepOn) {
  for (unsigned seed = 0; seed < 100; ++seed) {
    std::mt19937 random(seed);
    const Units common = shuffled(12, random);
    Turns turns(12);
    for (int step = 0; step < 6; ++step) {
      Turns::OfRanks ready, read;
      for (int rank = 0; rank < 3; ++rank) {
        ready.push_back(some_of(common, random));
        read.push_back(reversed(ready.back()));
      }
      turns.begin_step(read);
      for (const Units& order : ready) EXPECT_TRUE(agrees(turns.order(), order)) << seed << ", step " << step;
      turns.follow(ready);
      turns.end_step();
    }
  }
}

// Where gradients come in the order of the forward pass, or in any that has nothing to do with it, or where
// there is none, one step tells.
TEST(Turns, FollowTheOrderOfEarlierSteps) {
  enum { kNothing, kTheSame, kAnyOrder };
  for (const auto reads : {kNothing, kTheSame, kAnyOrder})
    for (unsigned seed = 0; seed < 50; ++seed) {
      std::mt19937 random(seed);
      const Units common = shuffled(12, random), any = shuffled(12, random);
      Turns turns(12);
      for (int step = 0; step < 6; ++step) {
        Turns::OfRanks ready;
        for (int rank = 0; rank < 3; ++rank) ready.push_back(step == 0 ? common : some_of(common, random));
        turns.begin_step(reads == kNothing   ? Turns::OfRanks(3)
                         : reads == kTheSame ? ready
                                             : Turns::OfRanks(3, any));
        if (step > 0) {
          EXPECT_EQ(turns.order(), common) << seed << ", step " << step;
        }
        for (std::size_t i = 0; i < common.size(); ++i) {  // one more is ready each time, and one is summed
          Turns::OfRanks now(3);
          for (std::size_t rank = 0; rank < 3; ++rank)
            for (std::size_t j = std::max<std::size_t>(i, 1) - 1; j < std::min(i + 1, ready[rank].size());
                 ++j)
              now[rank].push_back(ready[rank][j]);
          for (Units& units : now) std::ranges::sort(units);
          turns.follow(now);
        }
        turns.end_step();
      }
    }
}

// A forward pass through two halves, and a backward pass through each before the next: within a half all
// comes as expected, and still no unit of the second half comes before the first.
TEST(Turns, NoticeAnotherOrderThatNoNeighboursShow) {
  const Units ready = {2, 1, 0, 5, 4, 3};
  Turns turns(6);
  for (int step = 0; step < 3; ++step) {
    turns.begin_step({{0, 1, 2, 3, 4, 5}});
    if (step > 0) {
      EXPECT_EQ(turns.order(), ready) << "step " << step;
    }
    for (const UnitId unit : ready) turns.follow({{unit}});
    turns.end_step();
  }
}

// In the first step of a client that reads nothing before.
TEST(Turns, LearnFromWhatIsReady) {
  Turns turns(5);
  turns.begin_step(Turns::OfRanks(2));
  turns.follow({{1}, {2}});
  turns.follow({{1, 2}, {2, 3}});
  EXPECT_THAT(turns.order(), ElementsAre(4, 3, 2, 1, 0));
  turns.learn();
  EXPECT_THAT(turns.order(), ElementsAre(4, 1, 2, 3, 0));
}

// Units of one meeting, which are updated together, became ready in no order.
TEST(Turns, LearnNothingFromUnitsThatAreReadyAtOnce) {
  Turns turns(3);
  turns.begin_step({{0, 1, 2}});
  turns.follow({{0, 1, 2}});
  turns.end_step();
  EXPECT_THAT(turns.order(), ElementsAre(2, 1, 0));
  turns.begin_step({{2, 1, 0}});
  EXPECT_THAT(turns.order(), ElementsAre(0, 1, 2));
}

// ---- of engines ----

// In which order ranks get gradients.
struct Habit {
  const char* name;
  bool forward;  // the reverse of that in which they have read units; otherwise that of declaration
};
void PrintTo(const Habit& habit, std::ostream* to) { *to << habit.name; }

class AnyUnitsOfRanks : public testing::TestWithParam<Habit> {};
INSTANTIATE_TEST_SUITE_P(Habits, AnyUnitsOfRanks,
                         testing::Values(Habit{"forward", true}, Habit{"declared", false}),
                         [](const auto& habit) { return std::string(habit.param.name); });

constexpr int kSteps = 5;

// The units of each rank and step, in one order. Without a forward pass it is the first step that tells this
// order, in which all ranks have all units.
std::vector<std::vector<Units>> drawn(const Layout& layout, int ranks, unsigned seed, bool forward) {
  std::mt19937 random(seed);
  Units common =
      forward ? shuffled(layout.units().size(), random) : reversed(Turns(layout.units().size()).order());
  std::erase_if(common, [&](UnitId unit) { return !layout.trainable(unit); });
  std::vector<std::vector<Units>> units(static_cast<std::size_t>(ranks));
  for (int step = 0; step < kSteps; ++step)
    for (std::vector<Units>& of_rank : units) {
      of_rank.push_back(common);
      if (step == 0 && !forward) continue;
      const Units chosen = some_of(common, random);
      std::erase_if(of_rank.back(), [&](UnitId unit) {  // parts of one parameter are had together
        return std::ranges::count(chosen, layout.siblings(unit).first) == 0;
      });
    }
  return units;
}

toy::Outcome trained(wrapped::Case setup, bool at_once, unsigned seed, bool forward) {
  setup.at_once = at_once;
  toy::Outcome outcome;
  wrapped::run(setup, [&](wrapped::Rank& rank) {
    const auto units =
        drawn(rank.layout(), setup.ranks, seed, forward)[static_cast<std::size_t>(rank.rank())];
    for (int step = 0; step < kSteps; ++step) {
      const Units& now = units[static_cast<std::size_t>(step)];
      rank.engine.begin_step(at_once ? wrapped::Rank::settings() : StepSettings{});
      for (const UnitId unit : forward ? reversed(now) : Units{}) {
        rank.engine.acquire(unit, Hold::kRead);
        rank.engine.release(unit);
      }
      for (const UnitId unit : now) {
        rank.engine.acquire(unit, Hold::kGradient);
        for (ParameterId p = rank.layout().first_parameter(unit); p < rank.layout().end_parameter(unit); ++p)
          rank.add(p, step);
        rank.engine.release(unit);
      }
      rank.engine.step(wrapped::Rank::settings());
    }
    toy::Outcome saved = rank.save();
    if (rank.rank() == 0) outcome = std::move(saved);
  });
  return outcome;
}

// No gradient is refused, and the bits are those of updates at the step.
TEST_P(AnyUnitsOfRanks, AreSummedWhereTheirOrderIsOne) {
  for (unsigned seed = 0; seed < 8; ++seed) {
    wrapped::Case setup;
    setup.ranks = 2 + static_cast<int>(seed % 3);
    setup.blocks = 8;
    const toy::Outcome late = trained(setup, false, seed, GetParam().forward);
    setup.stage = seed % 2 == 0 ? 0 : 3;
    setup.place = seed % 4 < 2 ? "memory" : "disk";
    EXPECT_TRUE(trained(setup, true, seed, GetParam().forward) == late) << "seed " << seed;
  }
}

}  // namespace turns_test
}  // namespace sluice::engine
