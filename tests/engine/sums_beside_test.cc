#include "engine/ranks_client.h"
#include "testing.h"

// Tests of sums over ranks that begin in the last micro-batch of a step, while the client goes on.
namespace sluice::engine::wrapped::sums_beside_test {

// Whether the micro-batch has a gradient of the parameter on this rank: some are like experts.
bool has(const Rank& rank, ParameterId p, int step, int micro_batch) {
  if (p == kC) return (rank.rank() + step + micro_batch) % 3 != 0;
  if (p == kGain) return rank.rank() == step % 2 && micro_batch == 0;
  return true;
}

// A backward pass, unit by unit; each tells that its gradients have come, where micro-batches are counted.
void backward(Rank& rank, int step, int micro_batch, bool counted) {
  for (UnitId unit = static_cast<UnitId>(rank.layout().units().size()); unit-- > 0;) {
    if (!rank.layout().trainable(unit)) continue;
    const UnitRange all = rank.layout().siblings(unit);
    for (ParameterId p = rank.layout().first_parameter(unit); p < rank.layout().end_parameter(unit); ++p)
      if (has(rank, p, step, micro_batch)) rank.add(p, step, micro_batch);
    // (A gradient of a parameter that spans units has come when all of them have theirs.)
    for (UnitId each = all.first; counted && unit == all.first && each < all.end; ++each)
      rank.engine.end_gradients(each);
  }
  if (counted) rank.engine.end_micro_batch();
}

toy::Outcome trained(Case setup, std::size_t micro_batches, bool counted) {
  setup.counted = counted ? micro_batches : 0;
  return outcome_of(setup, [&](Rank& rank) {
    std::vector<double> norms;
    for (int step = 0; step < 3; ++step) {
      rank.engine.begin_step({});
      for (int micro = 0; micro < static_cast<int>(micro_batches); ++micro)
        backward(rank, step, micro, counted);
      norms.push_back(rank.engine.step(Rank::settings(3.0, step == 1)).gradient_norm);
    }
    return norms;
  });
}

TEST(TwinsOfSumsBeside, HaveTheBitsOfSumsAtTheStep) {
  for (const std::size_t micro_batches : {1, 2}) {
    Case setup;
    setup.ranks = micro_batches == 1 ? 2 : 3;
    const toy::Outcome late = trained(setup, micro_batches, false);
    ASSERT_EQ(late.norms.size(), 3u);
    for (setup.stage = micro_batches - 1; setup.stage <= kMostStage; setup.stage += micro_batches) {
      setup.place = (setup.stage + setup.ranks) % 2 == 0 ? "memory" : "disk";
      EXPECT_TRUE(trained(setup, micro_batches, true) == late)
          << micro_batches << " micro-batches, stage " << setup.stage << ", " << setup.place;
    }
  }
}

class SumsBeside : public testing::TestWithParam<std::size_t> {
 protected:
  static Case setup(std::size_t micro_batches = 1, int ranks = 2) {
    Case setup{.ranks = ranks, .stage = GetParam(), .counted = micro_batches};
    return setup;
  }
  // Waits until this rank has received what it needs for the sum of the first unit.
  static bool has_received_sum(const Rank& rank, std::uint64_t before) {
    const Partition partition = rank.engine.partition(kFirst);
    const std::size_t elements = partition.shards.empty()
                                     ? rank.layout().unit_elements(kFirst)
                                     : partition.shards[static_cast<std::size_t>(rank.rank())].size();
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (rank.received() < before + elements * sizeof(float)) {
      if (std::chrono::steady_clock::now() > deadline) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
  }
  static float own(const Rank& rank) { return static_cast<float>(rank.rank()); }
  static void end(Rank& rank) {
    rank.engine.end_gradients(kFirst);
    rank.engine.end_micro_batch();
  }
  // Ends the micro-batch, in which the ranks' mean is this, and the step.
  static void end_with(Rank& rank, float mean) {
    end(rank);
    EXPECT_EQ(rank.read(kA), std::vector<float>(rank.elements(kA), mean));
    rank.engine.step(Rank::settings());
  }
};
INSTANTIATE_TEST_SUITE_P(Stages, SumsBeside, testing::Values<std::size_t>(0, 2, 3));

TEST_P(SumsBeside, BeginInTheLastMicroBatchAndGoOnWithoutACall) {
  if (GetParam() == 3) GTEST_SKIP() << "parameters are fetched ahead meanwhile";
  run(setup(2), [&](Rank& rank) {
    rank.engine.begin_step({});
    const std::uint64_t before = rank.received();
    rank.add_constant(kA, 1 + own(rank));
    end(rank);
    EXPECT_EQ(rank.received(), before);
    rank.add_constant(kA, 1);
    rank.engine.end_gradients(kFirst);
    EXPECT_TRUE(has_received_sum(rank, before));
    rank.engine.end_micro_batch();
    EXPECT_EQ(rank.read(kA), std::vector<float>(rank.elements(kA), 2.5f));
    rank.engine.step(Rank::settings());
  });
}

TEST_P(SumsBeside, ReceiveWhatThePlanSays) {
  if (GetParam() == 3) GTEST_SKIP() << "some parameters may still be there when they are needed again";
  run(setup(2), [&](Rank& rank) {
    for (int step = 0; step < 2; ++step) {
      const std::uint64_t before = rank.received();
      rank.engine.begin_step({});
      for (const int micro : {0, 1}) {
        rank.add_all(step, micro);
        for (UnitId unit = 0; unit < rank.layout().units().size(); ++unit) rank.engine.end_gradients(unit);
        rank.engine.end_micro_batch();
      }
      rank.engine.step(Rank::settings(1.0));
      EXPECT_EQ(rank.received() - before, rank.plan().step_bytes_received);
    }
  });
}

TEST_P(SumsBeside, WhatIsAddedAfterTheBeginIsAddedToTheMean) {
  run(setup(), [&](Rank& rank) {
    rank.engine.begin_step({});
    rank.add_constant(kA, 1 + 2 * own(rank));
    rank.add_constant(kC, 1);
    const std::uint64_t before = rank.received();
    rank.engine.end_gradients(kFirst);
    EXPECT_TRUE(has_received_sum(rank, before));
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // until it is added up
    rank.add_constant(kA, 4 * own(rank));
    rank.engine.end_micro_batch();
    EXPECT_EQ(rank.read(kA), std::vector<float>(rank.elements(kA), 4.0f));
    rank.engine.step(Rank::settings());
    EXPECT_EQ(rank.engine.steps(kA), 1u);
  });
}

// A rank does so whose backward pass has failed in its middle.
TEST_P(SumsBeside, ADropOnOneRankAloneIsAnErrorOnTheOthers) {
  run(setup(), [&](Rank& rank) {
    const bool failed = rank.rank() == 1;
    rank.engine.begin_step({});
    for (const ParameterId p : {kA, kC}) {
      if (failed && p == kC) break;
      rank.add_constant(p, 64);
      rank.engine.end_gradients(rank.layout().location(p).unit);
    }
    if (!failed) {
      EXPECT_THAT(refusal_of([&] { rank.engine.end_micro_batch(); }),
                  HasSubstr("rank 1 has dropped gradients while they were being summed"));
    }
    for (const ParameterId p : {kA, kC}) rank.engine.drop_gradient(p);
    rank.add_constant(kA, 2 * own(rank));
    end(rank);
    EXPECT_EQ(rank.read(kA), std::vector<float>(rank.elements(kA), 1.0f));
    EXPECT_FALSE(rank.engine.has_gradient(kC));
    rank.engine.step(Rank::settings());
  });
}

// Micro-batches begin anew where nothing is left of a step's gradients, as after a skipped step.
TEST_P(SumsBeside, BeginAgainAfterAllGradientsWereDropped) {
  run(setup(), [&](Rank& rank) {
    for (int step = 0; step < 3; ++step) {
      rank.engine.begin_step({});
      for (int skipped = 0; skipped < step; ++skipped) {
        rank.add_constant(kA, std::numeric_limits<float>::infinity());
        end(rank);
        EXPECT_TRUE(std::isinf(rank.engine.gradient_norm(kA)));
        rank.engine.drop_gradient(kA);
      }
      rank.add_constant(kA, 2 * own(rank));
      end_with(rank, 1.0f);
    }
  });
}

TEST_P(SumsBeside, AnotherNumberOfMicroBatchesThanStatedGivesTheMean) {
  run(setup(2), [&](Rank& rank) {
    for (const int micro_batches : {1, 3, 2}) {
      rank.engine.begin_step({});
      for (int micro = 0; micro < micro_batches; ++micro) {
        rank.add_constant(kA, 2 * own(rank));
        end(rank);
      }
      EXPECT_EQ(rank.read(kA), std::vector<float>(rank.elements(kA), static_cast<float>(micro_batches)));
      rank.engine.step(Rank::settings());
    }
  });
}

// Ranks that are refused beside sums that have begun may drop their gradients, and go on.
TEST_P(SumsBeside, ARefusalLeavesNoneBegun) {
  run(setup(), [&](Rank& rank) {
    rank.engine.begin_step({});
    for (int i = 0; i <= rank.rank(); ++i) rank.add_constant(kA, 1);
    rank.engine.end_gradients(kFirst);
    EXPECT_THAT(refusal_of([&] { rank.engine.end_micro_batch(); }),
                HasSubstr("rank 1 added up to 2 gradients to a parameter"));
    rank.engine.drop_gradient(kA);
    rank.add_constant(kA, 2 * own(rank));
    end_with(rank, 1.0f);
  });
}

// The one that abandons has begun the sums of two units; the other, of none, or of the first.
TEST_P(SumsBeside, AnAbandonedStepIsDoneAgain) {
  for (const bool both : {false, true})
    run(setup(), [&](Rank& rank) {
      const bool first = rank.rank() == 0;
      rank.engine.begin_step({});
      rank.add_constant(kA, 64);
      rank.add_constant(kC, 64);
      if (first || both) rank.engine.end_gradients(kFirst);
      if (first) {
        rank.engine.end_gradients(kLast);
        rank.engine.abandon_step();
      } else {
        EXPECT_THAT(refusal_of([&] { rank.engine.end_micro_batch(); }),
                    HasSubstr("rank 0 has abandoned the step"));
        EXPECT_THAT(refusal_of([&] { rank.engine.step(Rank::settings()); }), HasSubstr("on this rank, too"));
        rank.engine.abandon_step();
      }
      rank.engine.begin_step({});
      rank.add_constant(kA, first ? 2 : 4);
      end(rank);
      EXPECT_EQ(rank.read(kA), std::vector<float>(rank.elements(kA), 3.0f));
      EXPECT_FALSE(rank.engine.has_gradient(kC));
      rank.engine.step(Rank::settings());
      EXPECT_EQ(rank.engine.steps(), 1u);
    });
}

TEST_P(SumsBeside, AnEngineIsNotLeftMeanwhile) {
  run(setup(), [&](Rank& rank) {
    rank.engine.begin_step({});
    rank.add_constant(kA, 1);
    rank.engine.end_gradients(kFirst);
    EXPECT_THAT(refusal_of([&] { rank.engine.leave(true, [](UnitId, allocator::FormerHome) {}); }),
                HasSubstr("'first' is being summed"));
    rank.engine.end_micro_batch();
    rank.engine.step(Rank::settings());
  });
}

TEST(CountedMicroBatches, AreStatedBefore) {
  run({}, [&](Rank& rank) {
    rank.engine.begin_step({});
    EXPECT_THAT(refusal_of([&] { rank.engine.end_micro_batch(); }),
                HasSubstr("without a number of micro-batches"));
    EXPECT_THAT(refusal_of([&] { rank.engine.end_gradients(kFirst); }), HasSubstr("without a number"));
    rank.engine.abandon_step();
    EXPECT_THAT(refusal_of([&] { rank.engine.end_gradients(kFirst); }), HasSubstr("outside of a step"));
  });
}

}  // namespace sluice::engine::wrapped::sums_beside_test
