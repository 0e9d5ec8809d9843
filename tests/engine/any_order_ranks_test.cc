#include "engine/ranks_client.h"
#include "testing.h"

// Tests of several ranks that train a model whose units are accessed in any order.
namespace sluice::engine::wrapped::any_order_ranks_test {

constexpr std::size_t kStages = kMostStage + 1;

// Returns rank 0's values after some steps of two micro-batches, in one of which gradients are kept and added
// to.
toy::Outcome trained(const Case& setup) {
  return outcome_of(setup, [](Rank& rank) {
    std::vector<double> norms;
    for (int step = 0; step < 3; ++step) {
      rank.engine.begin_step({});
      for (int micro = 0; micro < 2; ++micro) rank.add_all(step, micro);
      norms.push_back(rank.engine.step(Rank::settings(step == 2 ? 0.0 : 3.0, step == 1)).gradient_norm);
    }
    return norms;
  });
}

class TwinsOfRanks : public testing::TestWithParam<std::pair<Kind, int>> {};  // and how many ranks
constexpr Kind kPlain = {"adamw", Dtype::kF32, Dtype::kF32}, kCoded = {"adamw", Dtype::kBf16, Dtype::kU8},
               kHalf = {"sgd", Dtype::kF16, Dtype::kF32},
               kFactored = {"adafactor", Dtype::kBf16, Dtype::kF32},
               kMuon = {"muon", Dtype::kF32, Dtype::kBf16};
INSTANTIATE_TEST_SUITE_P(Optimizers, TwinsOfRanks,
                         testing::Values(std::pair(kPlain, 3), std::pair(kCoded, 3), std::pair(kHalf, 2),
                                         std::pair(kFactored, 3), std::pair(kMuon, 2)));
INSTANTIATE_TEST_SUITE_P(Long, TwinsOfRanks,
                         testing::Values(std::pair(kPlain, 2), std::pair(kCoded, 2), std::pair(kHalf, 3),
                                         std::pair(kFactored, 2)));

TEST_P(TwinsOfRanks, HaveTheSameBitsAtEveryStageAndTier) {
  Case setup = case_of(GetParam().first);
  setup.ranks = GetParam().second;
  const bool slow = setup.optimizer.name == "muon";
  const toy::Outcome whole = trained(setup);
  ASSERT_EQ(whole.norms.size(), 3u);
  EXPECT_NE(whole.values[kA], std::vector<float>(whole.values[kA].size(), 0));
  for (setup.stage = 0; setup.stage < kStages; ++setup.stage) {
    if (setup.stage % 2 == 0 && setup.optimizer.name != "adamw") continue;  // it has the others
    setup.place = slow || setup.stage == 0 || (setup.stage + setup.ranks) % 2 == 0 ? "disk" : "memory";
    EXPECT_TRUE(trained(setup) == whole) << "stage " << setup.stage << ", " << setup.place;
  }
}

class EveryStage : public testing::TestWithParam<std::tuple<std::size_t, const char*>> {
 protected:
  static Case setup(int ranks) {
    Case setup{.ranks = ranks, .stage = std::get<0>(GetParam()), .place = std::get<1>(GetParam())};
    return setup;
  }
};
INSTANTIATE_TEST_SUITE_P(Tiers, EveryStage,
                         testing::ValuesIn(std::vector<std::tuple<std::size_t, const char*>>{
                             {0, "memory"}, {1, "disk"}, {2, "memory"}, {3, "memory"}, {3, "disk"}}));

TEST_P(EveryStage, TheMeanIsTakenInTheWrittenOrder) {
  constexpr float kValues[] = {1e8f, -1e8f, 1.0f};  // another order gives another sum
  run(setup(3), [&](Rank& rank) {
    rank.engine.begin_step({});
    rank.add_constant(kA, kValues[rank.rank()]);
    const float mean = ((kValues[0] + kValues[1]) + kValues[2]) * (1.0f / 3);
    EXPECT_EQ(rank.read(kA), std::vector<float>(rank.elements(kA), mean));
    EXPECT_NEAR(rank.engine.gradient_norm(kA), mean * std::sqrt(static_cast<double>(rank.elements(kA))),
                1e-3);
    rank.engine.multiply_gradient(kA, 2);
    EXPECT_EQ(rank.read(kA)[5], 2 * mean);
    rank.engine.step(Rank::settings());
  });
}

// The others come to it with their step(), and wait until the reader steps, too.
TEST_P(EveryStage, OneRankAloneUsesGradients) {
  std::mutex mutex;
  std::vector<std::vector<std::vector<float>>> values;
  run(setup(2), [&](Rank& rank) {
    for (int step = 0; step < 3; ++step) {
      rank.engine.begin_step({});
      rank.add_all(step);
      if (step % 2 == rank.rank()) {
        rank.engine.acquire(kFirst, Hold::kGradient);  // and it may hold units
        const std::vector<float> read = rank.read(kC);
        rank.engine.release(kFirst);
        double squares = 0;
        for (const float value : read) squares += static_cast<double>(value) * value;
        EXPECT_NEAR(rank.engine.gradient_norm(kC), std::sqrt(squares), 1e-6 * std::sqrt(squares));
      }
      rank.engine.step(Rank::settings(1.0));
    }
    const auto own = rank.values();
    const std::lock_guard lock(mutex);
    values.push_back(own);
  });
  ASSERT_EQ(values.size(), 2u);
  EXPECT_TRUE(values[0] == values[1]);
}

TEST_P(EveryStage, ParametersWithoutAGradientOnSomeRanksCountAsZerosThere) {
  run(setup(2), [&](Rank& rank) {
    const auto before = rank.values();
    const bool first = rank.rank() == 0;
    rank.engine.begin_step({});
    rank.add_constant(first ? kA : kC, first ? 1.0f : 3.0f);
    rank.add_constant(kGain, 1);
    EXPECT_EQ(rank.engine.has_gradient(kA), first);
    EXPECT_EQ(rank.read(first ? kA : kC)[0], first ? 0.5f : 1.5f);
    EXPECT_EQ(rank.read(first ? kC : kA)[0], first ? 1.5f : 0.5f);
    rank.engine.step(Rank::settings());
    const auto after = rank.values();
    for (ParameterId p = 0; p < before.size(); ++p) {
      const bool updated = p == kA || p == kC || p == kGain;
      EXPECT_EQ(after[p] != before[p], updated) << p;
      EXPECT_EQ(rank.engine.steps(p), updated ? 1u : 0u) << p;
    }
  });
}

TEST_P(EveryStage, WhatIsAddedToASharedGradientIsAveragedAndAdded) {
  run(setup(2), [&](Rank& rank) {
    const auto own = static_cast<float>(rank.rank());
    rank.engine.begin_step({});
    rank.add_constant(kA, 1 + own);
    rank.add_constant(kB, 4);
    EXPECT_EQ(rank.read(kA)[7], 1.5f);
    rank.add_constant(kA, 2 * own);  // in the same step
    EXPECT_EQ(rank.read(kA)[7], 2.5f);
    EXPECT_EQ(rank.read(kB)[7], 4.0f);  // in the same unit, and nothing was added to it
    rank.engine.multiply_gradient(kA, 2);
    rank.engine.step(Rank::settings(0, true));
    rank.engine.begin_step({});
    if (rank.rank() == 1) rank.add_constant(kA, 1);  // to a kept one, on one rank
    if (rank.rank() == 0) rank.add_constant(kGain, 1);
    EXPECT_EQ(rank.read(kA)[7], 5.5f);
    EXPECT_EQ(rank.read(kB)[7], 4.0f);
    rank.engine.step(Rank::settings());
    EXPECT_FALSE(rank.engine.has_gradient(kA));
    const auto values = rank.values();
    rank.engine.begin_step({});
    rank.add_constant(kA, 2);
    EXPECT_EQ(rank.read(kA)[7], 2.0f);
    rank.engine.step(Rank::settings());
  });
}

// Every error is a refusal on all ranks, after which they go on.
TEST_P(EveryStage, DifferencesAreRefusedOnAllRanks) {
  run(setup(2), [&](Rank& rank) {
    const bool first = rank.rank() == 0;
    const auto refused = [&](const StepSettings& settings = Rank::settings()) {
      return refusal_of([&] { rank.engine.step(settings); });
    };
    rank.engine.begin_step({});
    for (int i = 0; i < (first ? 1 : 2); ++i) rank.add_constant(kA, 1);
    rank.add_constant(kC, 1);
    EXPECT_THAT(refused(),
                HasSubstr("rank 1 added up to 2 gradients to a parameter ('a'), and rank 0 up to 1 ('a'); "));
    if (first) rank.add_constant(kA, 1);
    EXPECT_THAT(refused(Rank::settings(first ? 1 : 2)), HasSubstr("\"clip\":1"));
    if (first) rank.engine.multiply_gradient(kA, 0.5);
    EXPECT_THAT(refused(), HasSubstr("multiplied by 1 on rank 1, and by 0.5 on rank 0"));
    if (!first) rank.engine.multiply_gradient(kA, 0.5);
    if (!first) rank.engine.drop_gradient(kC);
    EXPECT_THAT(refused(), AllOf(HasSubstr("'c' was dropped on rank 1"), HasSubstr("there on rank 0")));
    if (first) rank.engine.drop_gradient(kC);
    if (first) rank.add_constant(kA, 1);
    EXPECT_THAT(refused(), HasSubstr("rank 1 added up to 0 gradients"));
    if (!first) rank.add_constant(kA, 1);
    if (first && setup(2).stage < 3) {
      rank.engine.acquire(kLast, Hold::kEdit);
      rank.engine.release(kLast);
      EXPECT_THAT(refused(), HasSubstr("unit 'last' was edited 0 times on rank 1, and 1 times on rank 0"));
    } else if (setup(2).stage < 3) {
      EXPECT_THAT(refused(), HasSubstr("edit it alike"));
      rank.engine.acquire(kLast, Hold::kEdit);
      rank.engine.release(kLast);
    }
    EXPECT_EQ(rank.read(kA)[3], 2.0f);
    rank.engine.step(Rank::settings());
    EXPECT_EQ(rank.engine.steps(), 1u);
  });
}

TEST_P(EveryStage, AnAbandonedStepIsDoneAgain) {
  run(setup(2), [&](Rank& rank) {
    const bool first = rank.rank() == 0;
    rank.engine.begin_step({});
    rank.add_constant(kA, 64);
    if (first) {  // before any sum: the others need not know
      rank.engine.abandon_step();
      rank.engine.begin_step({});
      rank.add_constant(kA, 2);
    }
    if (first) {  // after the sums
      EXPECT_EQ(rank.read(kA)[0], 33.0f);
      rank.engine.abandon_step();
    } else {
      EXPECT_THAT(refusal_of([&] { rank.engine.step(Rank::settings()); }),
                  HasSubstr("rank 0 has abandoned the step"));
      rank.engine.abandon_step();
    }
    rank.engine.begin_step({});
    rank.add_constant(kA, first ? 2 : 4);
    EXPECT_EQ(rank.read(kA)[0], 3.0f);
    rank.engine.step(Rank::settings());
    EXPECT_EQ(rank.engine.steps(), 1u);
  });
}

TEST_P(EveryStage, AGradientThatIsNotFiniteOnOneRankSkipsTheStepOnAll) {
  run(setup(2), [&](Rank& rank) {
    const auto before = rank.values();
    rank.engine.begin_step({});
    rank.add_constant(kA, rank.rank() == 1 ? std::numeric_limits<float>::infinity() : 1.0f);
    expect_error(ErrorCode::kNotFinite, {"'a'"}, [&] { rank.engine.step(Rank::settings()); });
    EXPECT_EQ(rank.engine.steps(), 0u);
    EXPECT_TRUE(rank.values() == before);
    rank.engine.begin_step({});
    rank.add_all(0);
    rank.engine.step(Rank::settings());
    EXPECT_FALSE(rank.values() == before);
  });
}

TEST_P(EveryStage, EditsByAllRanksAreTheUnitsValues) {
  run(setup(2), [&](Rank& rank) {
    rank.engine.begin_step({});
    rank.add_all(0);
    rank.engine.step(Rank::settings());
    for (const UnitId unit : {kFirst, kSmall, kFrozen}) {
      rank.engine.acquire(unit, Hold::kRead);  // also while it is held otherwise
      rank.engine.acquire(unit, Hold::kEdit);
      const ConstArray values = rank.engine.parameter(rank.layout().first_parameter(unit));
      const_cast<float*>(values.f32())[9] = 42;
      rank.engine.release(unit);
      EXPECT_EQ(values.f32()[9], 42);
      rank.engine.release(unit);
    }
    const auto after = rank.values();
    for (const UnitId unit : {kFirst, kSmall, kFrozen})
      EXPECT_EQ(after[rank.layout().first_parameter(unit)][9], 42);
    rank.engine.begin_step({});
    rank.add_constant(kA, 1);
    rank.engine.step(Rank::settings());
    EXPECT_NEAR(rank.values()[kA][9], 42, 0.2);
  });
}

// The others may be anywhere meanwhile: no rank needs another one's call.
TEST_P(EveryStage, OneRankAloneReadsUnits) {
  std::atomic<bool> has_read{false};
  run(setup(2), [&](Rank& rank) {
    rank.engine.begin_step({});
    rank.add_all(0);
    rank.engine.step(Rank::settings());
    if (rank.rank() == 1) {
      for (int pass = 0; pass < 3; ++pass) {
        double sum = 0;
        for (UnitId unit = 0; unit < rank.layout().units().size(); ++unit) {
          rank.engine.acquire(unit, Hold::kRead);
          sum += test::value_at(rank.engine.parameter(rank.layout().first_parameter(unit)), 3);
          rank.engine.release(unit);
        }
        EXPECT_TRUE(std::isfinite(sum));
      }
      EXPECT_EQ(rank.values()[kA].size(), rank.elements(kA));
      has_read = true;
    }
    while (!has_read) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
}

TEST_P(EveryStage, RanksLeaveWithTheirValues) {
  run(setup(2), [&](Rank& rank) {
    rank.engine.begin_step({});
    rank.add_all(0);
    rank.engine.step(Rank::settings());
    const auto values = rank.values();
    std::vector<allocator::FormerHome> homes(rank.layout().units().size());
    rank.engine.leave(true, [&](UnitId unit, allocator::FormerHome home) { homes[unit] = std::move(home); });
    for (UnitId unit = 0; unit < homes.size(); ++unit) {
      const ParameterId p = rank.layout().first_parameter(unit);
      const auto* const left = reinterpret_cast<const float*>(homes[unit].data());
      EXPECT_TRUE(std::equal(values[p].begin(), values[p].end(), left)) << unit;
    }
  });
}

TEST_P(EveryStage, ARankThatFailsEndsAll) {
  std::atomic<int> ready{0};
  comm::run_communicators(comm::World::kThreads, 3, [&](comm::Communicator& communicator) {
    Rank rank(setup(3), &communicator);
    rank.engine.begin_step({});
    rank.add_all(0);
    ++ready;
    if (communicator.rank() == 2) {
      while (ready < 3) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      // A source that throws in load_all() fails the engine.
      UnitSource source;
      source.values = [](ParameterId, std::size_t, std::span<float>) { fail(ErrorCode::kIo, "a bad disk"); };
      EXPECT_THROW(rank.engine.load_all(source), Error);
      return;
    }
    EXPECT_THAT(thrown_by([&] { rank.engine.step(Rank::settings()); }).text,
                AllOf(HasSubstr("rank 2"), HasSubstr("a bad disk")));
    EXPECT_THAT(refusal_of([&] { rank.engine.acquire(kFirst, Hold::kRead); }), HasSubstr("a bad disk"));
  });
}

}  // namespace sluice::engine::wrapped::any_order_ranks_test
