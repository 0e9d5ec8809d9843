#include <cstdlib>
#include <numeric>
#include <random>

#include "engine/ranks_client.h"
#include "testing.h"

// Tests of updates in backward on several ranks: a unit's gradients are summed when it is let go, and
// applied.
namespace sluice::engine::wrapped::sums_in_backward_test {

// Which units have a gradient on a rank, and in which order they get it.
using Order = std::function<std::vector<UnitId>(const Rank& rank, int step)>;

std::vector<UnitId> last_to_first(const Rank& rank, int /*step*/) {
  std::vector<UnitId> units;
  for (UnitId unit = static_cast<UnitId>(rank.layout().units().size()); unit-- > 0;)
    if (rank.layout().trainable(unit)) units.push_back(unit);
  return units;
}

// Not the reverse of the order in which units are read, as where a step has a backward pass for each of two
// losses.
std::vector<UnitId> first_to_last(const Rank& rank, int step) {
  std::vector<UnitId> units = last_to_first(rank, step);
  std::ranges::reverse(units);
  return units;
}

// Pairs of units come in another order on rank 1.
std::vector<UnitId> crosswise(const Rank& rank, int step) {
  std::vector<UnitId> units = last_to_first(rank, step);
  for (std::size_t i = 0; rank.rank() == 1 && i + 1 < units.size(); i += 2) std::swap(units[i], units[i + 1]);
  return units;
}

// The gradients of a unit that is held once for all of them, or, where it is `torn`, for each.
void add_unit(Rank& rank, UnitId unit, int step, bool torn) {
  if (!torn) rank.engine.acquire(unit, Hold::kGradient);
  for (ParameterId p = rank.layout().first_parameter(unit); p < rank.layout().end_parameter(unit); ++p)
    rank.add(p, step);
  if (!torn) rank.engine.release(unit);
}

void train(bool at_once, const Order& order, bool torn, toy::Outcome& outcome, Rank& rank) {
  std::vector<double> norms;
  for (int step = 0; step < 3; ++step) {
    rank.engine.begin_step(at_once ? Rank::settings() : StepSettings{});
    for (UnitId unit = 0; unit < rank.layout().units().size(); ++unit) {  // a forward pass
      rank.engine.acquire(unit, Hold::kRead);
      rank.engine.release(unit);
    }
    for (const UnitId unit : order(rank, step)) add_unit(rank, unit, step, torn);
    if (at_once && step != 1) rank.engine.end_micro_batch();  // else step() ends it
    norms.push_back(rank.engine.step(Rank::settings()).gradient_norm);
  }
  toy::Outcome saved = rank.save();
  saved.norms = norms;
  if (rank.rank() == 0) outcome = std::move(saved);
}

toy::Outcome trained(Case setup, bool at_once, const Order& order, bool torn = false) {
  setup.at_once = at_once;
  toy::Outcome outcome;
  run(setup, [&](Rank& rank) { train(at_once, order, torn, outcome, rank); });
  return outcome;
}

constexpr Kind kPlain = {"adamw", Dtype::kF32, Dtype::kF32}, kCoded = {"adamw", Dtype::kBf16, Dtype::kU8},
               kFactored = {"adafactor", Dtype::kBf16, Dtype::kF32},
               kMuon = {"muon", Dtype::kF32, Dtype::kBf16};

class TwinsOfUpdatesInBackward : public testing::TestWithParam<std::pair<Kind, int>> {
};  // and how many ranks
INSTANTIATE_TEST_SUITE_P(Optimizers, TwinsOfUpdatesInBackward,
                         testing::Values(std::pair(kPlain, 3), std::pair(kCoded, 3), std::pair(kFactored, 3),
                                         std::pair(kMuon, 2)));
INSTANTIATE_TEST_SUITE_P(Long, TwinsOfUpdatesInBackward,
                         testing::Values(std::pair(kPlain, 2), std::pair(kCoded, 2),
                                         std::pair(kFactored, 2)));

TEST_P(TwinsOfUpdatesInBackward, HaveTheBitsOfUpdatesAtTheStep) {
  Case setup = case_of(GetParam().first);
  setup.ranks = GetParam().second;
  const bool slow = setup.optimizer.name == "muon";
  const toy::Outcome late = trained(setup, false, last_to_first);
  ASSERT_EQ(late.norms.size(), 3u);
  for (setup.stage = 0; setup.stage <= kMostStage; ++setup.stage) {
    if (setup.stage % 2 == 0 && setup.optimizer.name != "adamw") continue;  // it has the others
    setup.place = slow || (setup.stage + setup.ranks) % 2 == 0 ? "disk" : "memory";
    EXPECT_TRUE(trained(setup, true, setup.stage == 1 ? first_to_last : last_to_first) == late)
        << "stage " << setup.stage << ", " << setup.place;
  }
}

// As many seeds as $SLUICE_SEEDS says; else these, which have found defects.
std::vector<unsigned> seeds_or(std::vector<unsigned> seeds) {
  if (const char* const asked = std::getenv("SLUICE_SEEDS")) {
    seeds.resize(static_cast<std::size_t>(std::atoi(asked)));
    std::iota(seeds.begin(), seeds.end(), 0u);
  }
  return seeds;
}

// Each rank leaves out units at random, as one does that has other experts, and has some of the others a
// little earlier or later. Where all have one order, which may be that of the forward pass, the bits are
// those of updates at the step; else they are, or all ranks are told that orders differ. Nobody waits for
// ever.
TEST(UpdatesInBackwardOfRanks, HaveTheBitsOfUpdatesAtTheStepOrARefusalInAnyOrder) {
  for (const unsigned seed : seeds_or({3, 35, 43, 132, 142, 171})) {
    std::mt19937 random(seed);
    Case setup = case_of(seed % 7 == 0 ? kFactored : seed % 7 == 1 ? kCoded : kPlain);
    setup.ranks = 2 + static_cast<int>(random() % 2);
    setup.blocks = 4 + random() % 4;
    setup.stage = random() % (kMostStage + 1);
    setup.place = random() % 2 == 0 ? "memory" : "disk";
    setup.patience = std::chrono::seconds(20);
    const bool torn = random() % 2 == 0;
    const unsigned rare = 2 + random() % 4, swaps = random() % 3;
    const Order order = [=](const Rank& rank, int step) {
      const unsigned of_order = seed * 64 + static_cast<unsigned>(step * 8);
      std::mt19937 of_step(of_order), of_rank(of_order + static_cast<unsigned>(rank.rank() + 1));
      std::vector<bool> left_out(rank.layout().units().size());
      for (UnitId unit = 0; unit < left_out.size(); ++unit) {
        const bool by_all = of_step() % rare == 0, by_one = of_rank() % rare == 0;
        left_out[unit] = unit != kLast && (by_all || by_one);
      }
      std::vector<UnitId> units = last_to_first(rank, step);
      std::erase_if(units, [&](UnitId unit) { return left_out[rank.layout().siblings(unit).first]; });
      for (std::size_t i = 0; i + 1 < units.size(); ++i)
        if (swaps > 0 && of_rank() % (6 / swaps) == 0) std::swap(units[i], units[i + 1]);
      return units;
    };
    const toy::Outcome expected = trained(setup, false, order, torn);
    setup.at_once = true;
    toy::Outcome found;
    std::vector<std::string> errors(static_cast<std::size_t>(setup.ranks));
    comm::run_communicators(comm::World::kThreads, setup.ranks,
                            [&](comm::Communicator& communicator) {
                              try {
                                Rank rank(setup, &communicator);
                                train(true, order, torn, found, rank);
                                communicator.barrier(1, "the end of a test");
                              } catch (const std::exception& error) {
                                errors[static_cast<std::size_t>(communicator.rank())] = error.what();
                                communicator.fail(error.what());
                              }
                            },
                            {comm::kUnhurried.silence, setup.patience});
    SCOPED_TRACE(fmt::format("seed {}", seed));
    if (std::ranges::all_of(errors, &std::string::empty)) {
      EXPECT_TRUE(found == expected);
      continue;
    }
    EXPECT_THAT(errors, testing::Contains(HasSubstr("same order on all ranks")));
    EXPECT_GT(swaps, 0u);
  }
}

// Ranks have gradients of some units, or of none, or of a part of a unit's parameters, and read units
// meanwhile, which concludes their sums. All have one order.
TEST(UpdatesInBackwardOfRanks, HaveTheBitsOfUpdatesAtTheStepWhateverIsMissingAndRead) {
  for (const unsigned seed : seeds_or({4, 9, 19})) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    std::mt19937 random(seed);
    Case setup;
    setup.ranks = 2 + static_cast<int>(random() % 2);
    setup.blocks = 2 + random() % 5;
    setup.stage = random() % (kMostStage + 1);
    setup.place = random() % 2 == 0 ? "memory" : "disk";
    setup.patience = std::chrono::seconds(20);
    const unsigned rare = 2 + random() % 4;
    const bool reads = seed % 2 == 0, parts = !reads;
    const auto body = [=](bool at_once, toy::Outcome& outcome, Rank& rank) {
      const Layout& layout = rank.layout();
      const auto units = static_cast<UnitId>(layout.units().size());
      const auto read = [&](UnitId unit) {
        rank.engine.acquire(unit, Hold::kRead);
        rank.engine.release(unit);
      };
      for (int step = 0; step < 4; ++step) {
        const unsigned of_order = seed * 64 + static_cast<unsigned>(step * 8);
        std::mt19937 of_step(of_order), of_rank(of_order + static_cast<unsigned>(rank.rank() + 1));
        rank.engine.begin_step(at_once ? Rank::settings() : StepSettings{});
        for (UnitId unit = 0; unit < units; ++unit) read(unit);
        const bool none = reads && of_step() % 3 == 0;
        std::vector<bool> left_out(units);
        for (UnitId unit = 0; unit < units; ++unit) {
          const bool by_all = of_step() % rare == 0, by_one = of_rank() % rare == 0;
          left_out[unit] = none || (unit != kLast && (by_all || by_one));
        }
        for (const UnitId unit : last_to_first(rank, step)) {
          if (reads && of_rank() % 2 == 0) read(static_cast<UnitId>(of_rank() % units));
          const bool by_all = of_step() % 3 == 0, by_one = of_rank() % 3 == 0;
          if (left_out[layout.siblings(unit).first]) continue;
          rank.engine.acquire(unit, Hold::kGradient);
          const ParameterId first = layout.first_parameter(unit), end = layout.end_parameter(unit);
          for (ParameterId p = first; p < end; ++p)
            if (!parts || p == first || p + 1 < end || !(by_all || by_one)) rank.add(p, step);
          rank.engine.release(unit);
        }
        rank.engine.step(Rank::settings());
      }
      toy::Outcome saved = rank.save();
      if (rank.rank() == 0) outcome = std::move(saved);
    };
    toy::Outcome expected, found;
    run(setup, [&](Rank& rank) { body(false, expected, rank); });
    setup.at_once = true;
    run(setup, [&](Rank& rank) { body(true, found, rank); });
    EXPECT_TRUE(found == expected);
  }
}

// All turns of a step have come, and then units follow that have none.
TEST(UpdatesInBackwardOfRanks, HaveFramesForUnitsThatComeAfterAllTurns) {
  Case setup{.at_once = true};
  setup.blocks = 10;
  run(setup, [&](const Rank& rank) {
    if (rank.rank() == 0) setup.memory = rank.least_memory();
  });
  run(setup, [&](Rank& rank) {
    const ParameterId first = rank.layout().first_parameter(kLast + 1);
    for (int step = 0; step < 2; ++step) {
      rank.engine.begin_step(Rank::settings());
      rank.add_constant(first + 9, 1);
      rank.engine.acquire(kLast + 1 + 9, Hold::kRead);  // which concludes its sum
      rank.engine.release(kLast + 1 + 9);
      for (ParameterId block = 9; step > 0 && block-- > 0;) rank.add_constant(first + block, 1);
      rank.engine.step(Rank::settings());
    }
    EXPECT_EQ(rank.engine.steps(first), 1u);
  });
}

// As much at once as there may be, in the least memory: two units that are summed together, since each rank
// had another one of them first, beside two that are held. And units that no rank had in the first step.
TEST(UpdatesInBackwardOfRanks, HaveFramesForUnitsThatWait) {
  Case setup;
  setup.blocks = 7;
  const auto train = [&] {
    toy::Outcome outcome;
    run(setup, [&](Rank& rank) {
      for (int step = 0; step < 3; ++step) {
        rank.engine.begin_step(setup.at_once ? Rank::settings() : StepSettings{});
        std::vector<UnitId> units = crosswise(rank, step);
        if (step == 0) std::erase_if(units, [](UnitId unit) { return unit > kLast; });
        for (std::size_t i = 0; i < units.size(); i += 2) {
          const std::span pair = std::span(units).subspan(i, std::min<std::size_t>(2, units.size() - i));
          for (const UnitId unit : pair) rank.engine.acquire(unit, Hold::kGradient);
          for (const UnitId unit : pair)
            for (ParameterId p = rank.layout().first_parameter(unit); p < rank.layout().end_parameter(unit);
                 ++p) {
              const std::vector<float> values = rank.gradient(p, step, 0);
              rank.engine.add_gradient(p, {values.data(), Dtype::kF32});
            }
          for (const UnitId unit : pair) rank.engine.release(unit);
        }
        rank.engine.step(Rank::settings());
      }
      toy::Outcome saved = rank.save();
      if (rank.rank() == 0) outcome = std::move(saved);
    });
    return outcome;
  };
  const toy::Outcome late = train();
  setup.at_once = true;
  setup.place = "disk";
  for (const std::size_t stage : {1, 3}) {
    setup.stage = stage;
    std::uint64_t least = 0;
    run(setup, [&](const Rank& rank) {
      if (rank.rank() == 0) least = rank.least_memory();
      constexpr std::size_t kOfUnit = 4;  // extents of any of the largest units, and of its gradient
      const Plan plan = rank.plan_in(rank.least_memory());
      EXPECT_GE(plan.extents, (2 + 2 + plan.prefetch) * kOfUnit);
    });
    setup.memory = least;
    EXPECT_TRUE(train() == late) << "stage " << setup.stage;
    setup.memory = kGiB;
  }
}

class UpdatesInBackward : public testing::TestWithParam<std::tuple<std::size_t, const char*>> {
 protected:
  static Case setup(int ranks = 2) {
    Case setup{
        .ranks = ranks, .stage = std::get<0>(GetParam()), .place = std::get<1>(GetParam()), .at_once = true};
    return setup;
  }
  // Returns the error of an action on this rank, after which its engine, and those of the others, have
  // failed.
  static std::string failure_of(Rank& rank, const std::function<void()>& action) {
    const std::string text = thrown_by(action).text;
    EXPECT_FALSE(rank.engine.failure().empty()) << text;
    return text;
  }
};
INSTANTIATE_TEST_SUITE_P(Tiers, UpdatesInBackward,
                         testing::ValuesIn(std::vector<std::tuple<std::size_t, const char*>>{
                             {0, "memory"}, {1, "disk"}, {3, "memory"}, {3, "disk"}}));

// Until it is released it has the values of before, which the client reads.
TEST_P(UpdatesInBackward, AUnitThatIsSummedWhileItIsReadIsUpdatedAfterwards) {
  constexpr UnitId kBlock = kLast + 2;  // the first one to be summed
  const bool shares = std::get<0>(GetParam()) == 3;
  Case two = setup();
  two.blocks = 2;
  std::vector<std::vector<float>> of_first;
  std::mutex mutex;
  comm::run_communicators(comm::World::kThreads, 2, [&](comm::Communicator& communicator) {
    Rank rank(two, &communicator);
    const ParameterId p = rank.layout().first_parameter(kBlock);
    const std::vector<float> before = rank.values()[p];
    rank.engine.begin_step(Rank::settings());
    if (rank.rank() == 0)
      rank.add_constant(p, 1);
    else
      rank.engine.acquire(kBlock, Hold::kRead);
    const auto go_on = [&] {
      rank.add_constant(p - 1, 1);
      rank.add_constant(kC, 1);
      rank.add_constant(kGain, 1);
    };
    if (shares) {  // shards cannot change meanwhile
      const std::string text = failure_of(rank, [&] {
        go_on();
        rank.engine.step(Rank::settings());
      });
      EXPECT_THAT(text, HasSubstr("still holds its unit 'block1' while"));
      return;
    }
    go_on();
    if (rank.rank() == 1) {
      EXPECT_EQ(test::value_at(rank.engine.parameter(p), 7), before[7]);
      rank.engine.release(kBlock);
    }
    rank.engine.step(Rank::settings());
    const std::lock_guard lock(mutex);
    of_first.push_back(rank.values()[p]);
    EXPECT_NE(of_first.back(), before);
  });
  EXPECT_TRUE(shares || (of_first.size() == 2 && of_first[0] == of_first[1]));
}

// No rank needs another one's call outside of a step.
TEST_P(UpdatesInBackward, AreAppliedWhenTheStepHasEnded) {
  std::atomic<bool> has_read{false};
  run(setup(), [&](Rank& rank) {
    rank.engine.begin_step(Rank::settings());
    rank.add_all(0);
    rank.engine.step(Rank::settings());
    if (rank.rank() == 1) {
      EXPECT_EQ(rank.values()[kA].size(), rank.elements(kA));
      has_read = true;
    }
    while (!has_read) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
}

TEST_P(UpdatesInBackward, TakeLessMemoryThanGradientsThatAreKept) {
  Case at_once = setup(), late = setup();
  at_once.blocks = late.blocks = 6;
  late.at_once = false;
  std::uint64_t kept = 0;
  run(late, [&](Rank& rank) {
    if (rank.rank() == 0) kept = rank.plan().peak_memory;
  });
  run(at_once, [&](Rank& rank) {
    for (int step = 0; step < 2; ++step) {
      rank.engine.begin_step(Rank::settings());
      rank.add_all(step);
      rank.engine.step(Rank::settings());
    }
    if (setup().place == std::string("memory")) {
      EXPECT_LT(rank.plan().peak_memory, kept);
    }
    EXPECT_EQ(rank.ledger().snapshot().total[static_cast<std::size_t>(allocator::Tier::kHost)].peak,
              rank.plan().peak_memory);
  });
}

TEST_P(UpdatesInBackward, AGradientThatComesTooLateIsRefused) {
  Case late = setup();
  late.blocks = 6;
  comm::run_communicators(comm::World::kThreads, 2, [&](comm::Communicator& communicator) {
    Rank rank(late, &communicator);
    rank.engine.begin_step(Rank::settings());
    const auto add = [&](UnitId block) { rank.add_constant(kD + 1 + block, 1); };
    // Rank 0 waits with blocks 5 and 4, and rank 1 with 1 and 0. So block 5 is summed, and then another one.
    const bool first = rank.rank() == 0;
    if (first) {
      add(5);
      add(4);
      EXPECT_THAT(failure_of(rank, [&] { rank.engine.end_micro_batch(); }),
                  AllOf(HasSubstr("rank 1"), HasSubstr("is abandoned")));
      return;
    }
    add(1);
    add(0);
    EXPECT_THAT(refusal_of([&] { add(5); }), HasSubstr("others had one and this rank was further on"));
    EXPECT_THAT(failure_of(rank, [&] { rank.engine.abandon_step(); }), HasSubstr("is abandoned"));
  });
}

TEST_P(UpdatesInBackward, AStepThatIsAbandonedBeforeItsSumsIsDoneAgain) {
  run(setup(), [&](Rank& rank) {
    rank.engine.begin_step(Rank::settings());
    if (rank.rank() == 1) {
      rank.engine.acquire(kFirst, Hold::kGradient);
      rank.engine.abandon_step();
      rank.engine.begin_step(Rank::settings());
    }
    rank.add_constant(kA, 1);
    rank.engine.step(Rank::settings());
    EXPECT_EQ(rank.engine.steps(), 1u);
    EXPECT_EQ(rank.engine.steps(kA), 1u);
  });
}

TEST_P(UpdatesInBackward, AMeanThatIsNotFiniteFailsAllRanks) {
  comm::run_communicators(comm::World::kThreads, 2, [&](comm::Communicator& communicator) {
    Rank rank(setup(), &communicator);
    rank.engine.begin_step(Rank::settings());
    // The last element alone, which is in the shard of rank 1.
    std::vector<float> values(rank.elements(kA), 1.0f);
    if (rank.rank() == 0) values.back() = std::numeric_limits<float>::infinity();
    EXPECT_THAT(failure_of(rank,
                           [&] {
                             rank.engine.acquire(kFirst, Hold::kGradientOnly);
                             rank.engine.add_gradient(kA, {values.data(), Dtype::kF32});
                             rank.engine.release(kFirst);
                             rank.engine.step(Rank::settings());
                           }),
                HasSubstr("the gradient of 'a' is not finite"));
  });
}

TEST_P(UpdatesInBackward, ARankThatEndsMeanwhileEndsAll) {
  comm::run_communicators(comm::World::kThreads, 2, [&](comm::Communicator& communicator) {
    Rank rank(setup(), &communicator);
    rank.engine.begin_step(Rank::settings());
    rank.add_constant(kGain, 1);
    if (rank.rank() == 1) return;
    EXPECT_THAT(failure_of(rank, [&] { rank.engine.step(Rank::settings()); }),
                AllOf(HasSubstr("rank 1"), HasSubstr("destroyed in the middle of a step")));
  });
}

TEST_P(UpdatesInBackward, DifferencesAreRefusedOnAllRanks) {
  run(setup(), [&](Rank& rank) {
    StepSettings other = Rank::settings();
    if (rank.rank() == 1) other.clip_value = 3;
    rank.engine.begin_step(other);
    EXPECT_THAT(refusal_of([&] { rank.add_constant(kGain, 1); }), HasSubstr("\"clip_value\":3"));
    rank.engine.abandon_step();
    rank.engine.begin_step(Rank::settings());
    rank.add_constant(kGain, 1);
    EXPECT_THAT(refusal_of([&] { rank.add_constant(kGain, 1); }), HasSubstr("this rank had one before"));
    rank.engine.release(kSmall);
    EXPECT_THAT(refusal_of([&] { (void)rank.read(kGain); }), HasSubstr("a gradient is read"));
    EXPECT_THAT(refusal_of([&] { rank.engine.multiply_gradient(kGain, 2); }), HasSubstr("multiplied"));
    EXPECT_THAT(refusal_of([&] { (void)rank.engine.gradient_norm(kGain); }), HasSubstr("measured"));
    rank.engine.end_micro_batch();
    EXPECT_THAT(refusal_of([&] { rank.add_constant(kA, 1); }),
                HasSubstr("micro-batch of this rank has ended"));
    rank.engine.release(kFirst);
    rank.engine.step(Rank::settings());
    EXPECT_EQ(rank.engine.steps(kGain), 1u);
  });
}

TEST_P(UpdatesInBackward, ALoneEditIsFound) {
  if (std::get<0>(GetParam()) == 3) GTEST_SKIP() << "its end waits for the others";
  run(setup(), [&](Rank& rank) {
    rank.engine.begin_step(Rank::settings());
    if (rank.rank() == 1) {
      rank.engine.acquire(kSmall, Hold::kEdit);
      rank.engine.release(kSmall);
    }
    EXPECT_THAT(refusal_of([&] { rank.add_constant(kGain, 1); }),
                HasSubstr("unit 'small' was edited 1 times on rank 1, and 0 times on rank 0"));
    rank.engine.abandon_step();
  });
}

TEST(UpdatesInBackwardOfRanks, HaveOneMicroBatchOfEach) {
  comm::run_communicators(comm::World::kThreads, 2, [&](comm::Communicator& communicator) {
    Case setup{.counted = 2, .at_once = true};
    EXPECT_THAT(message_of([&] { const Rank rank(setup, &communicator); }),
                HasSubstr("with 2 micro-batches of each rank"));
  });
}

}  // namespace sluice::engine::wrapped::sums_in_backward_test
