#include "engine/ranks_client.h"
#include "testing.h"

// Tests of gradients in any order whose sums have the same bits at any number of ranks.
namespace sluice::engine::wrapped::any_order_reproducible_test {

constexpr std::size_t kAll = 12;

// Parameter c has gradients in few micro-batches, d in one alone, as experts have.
bool has_gradient(ParameterId p, int number) {
  return p == kC ? number % 5 == 2 || number == 3 : p == kD ? number == 7 : true;
}

void add_in_order(Rank& rank, int step) { rank.add_reproducibly(step, has_gradient); }

toy::Outcome trained(const Case& setup, const std::function<void(Rank& rank, int step)>& add = add_in_order) {
  return outcome_of(setup, [&](Rank& rank) {
    std::vector<double> norms;
    for (int step = 0; step < 2; ++step) {
      rank.engine.begin_step({});
      add(rank, step);
      norms.push_back(rank.engine.gradient_norm(kC));
      norms.push_back(rank.engine.step(Rank::settings(step == 1 ? 0.0 : 3.0)).gradient_norm);
    }
    return norms;
  });
}

struct OverRanks {
  Kind kind;
  std::vector<int> ranks;
};
void PrintTo(const OverRanks& of, std::ostream* to) { PrintTo(of.kind, to); }
class TwinsReproducible : public testing::TestWithParam<OverRanks> {};
constexpr Kind kPlain = {"adamw", Dtype::kF32, Dtype::kF32}, kCoded = {"adamw", Dtype::kBf16, Dtype::kU8},
               kFactored = {"adafactor", Dtype::kBf16, Dtype::kF32},
               kMuon = {"muon", Dtype::kF32, Dtype::kBf16};
INSTANTIATE_TEST_SUITE_P(Optimizers, TwinsReproducible,
                         testing::Values(OverRanks{kPlain, {2, 3}}, OverRanks{kCoded, {4}},
                                         OverRanks{kFactored, {2}}, OverRanks{kMuon, {2}}));
INSTANTIATE_TEST_SUITE_P(Long, TwinsReproducible,
                         testing::Values(OverRanks{kPlain, {4, 6}}, OverRanks{kCoded, {2, 3, 6}},
                                         OverRanks{kFactored, {3, 4, 6}}));

TEST_P(TwinsReproducible, HaveTheSameBitsAtAnyNumberOfRanks) {
  Case setup = case_of(GetParam().kind);
  const bool slow = setup.optimizer.name == "muon";
  setup.micro_batches = kAll;
  setup.ranks = 1;
  const toy::Outcome alone = trained(setup);
  ASSERT_EQ(alone.norms.size(), 4u);
  for (const int ranks : GetParam().ranks) {
    setup.ranks = ranks;
    for (std::size_t stage = 0; stage <= kMostStage; stage += ranks == 3 ? 1 : 3) {
      if ((slow || ranks == 6) && stage == 0) continue;
      setup.stage = stage;
      setup.place = slow || (stage + setup.ranks) % 3 == 0 ? "memory" : "disk";
      EXPECT_TRUE(trained(setup) == alone) << ranks << " ranks, stage " << stage << ", " << setup.place;
    }
  }
  setup.ranks = 1;
  setup.stage = 0;
  setup.place = "disk";
  EXPECT_TRUE(trained(setup) == alone) << "one rank, disk";
}

// As in a pipeline, each parameter's gradients come in order, and those of the next one a micro-batch later.
TEST(ReproducibleGradients, MayBeOfMicroBatchesInEachOthersMidst) {
  for (const int ranks : {1, 2}) {
    Case setup = case_of(kPlain);
    setup.micro_batches = kAll;
    setup.ranks = ranks;
    const auto count = static_cast<int>(kAll) / ranks;
    const auto add_in_midst = [&](Rank& rank, int step) {
      const auto parameters = static_cast<int>(rank.layout().parameters());
      for (int turn = 0; turn < count + parameters; ++turn)
        for (int p = std::max(0, turn - count + 1); p <= std::min(turn, parameters - 1); ++p) {
          const int number = turn - p, of_all = rank.rank() * count + number;
          const auto parameter = static_cast<ParameterId>(p);
          rank.engine.set_micro_batch(static_cast<std::size_t>(number));
          if (rank.layout().trainable(rank.layout().location(parameter).unit) &&
              has_gradient(parameter, of_all))
            rank.add(parameter, step, of_all);
        }
      rank.engine.set_micro_batch(static_cast<std::size_t>(count));
    };
    EXPECT_TRUE(trained(setup, add_in_midst) == trained(setup)) << ranks << " ranks";
  }
}

// Without it another number of ranks gives other bits, so that the test above can fail.
TEST(ReproducibleGradients, AreAddedInAnOrderThatMatters) {
  constexpr float kValues[] = {1e8f, 1.0f, -1e8f, 1.0f};
  const float mean = ((kValues[0] + kValues[1]) + (kValues[2] + kValues[3])) * 0.25f;
  ASSERT_NE(mean, (((kValues[0] + kValues[1]) + kValues[2]) + kValues[3]) * 0.25f);
  Case setup;
  setup.micro_batches = 4;
  for (setup.ranks = 1; setup.ranks <= 4; setup.ranks *= 2)
    run_any(setup, [&](Rank& rank) {
      rank.engine.begin_step({});
      const int count = 4 / setup.ranks;
      for (int number = rank.rank() * count; number < (rank.rank() + 1) * count; ++number) {
        rank.add_constant(kA, kValues[number]);
        rank.engine.end_micro_batch();
      }
      EXPECT_EQ(rank.read(kA), std::vector<float>(rank.elements(kA), mean)) << setup.ranks << " ranks";
      rank.engine.multiply_gradient(kA, 2);
      EXPECT_EQ(rank.read(kA)[7], 2 * mean);
      rank.engine.step(Rank::settings());
    });
}

// A micro-batch that is missing is no zero: that would change the sign of one.
TEST(ReproducibleGradients, OfFewMicroBatchesAreAsIfTheOthersHadNotBeen) {
  Case setup;
  setup.micro_batches = 12;
  for (setup.ranks = 1; setup.ranks <= 4; ++setup.ranks)
    run_any(setup, [&](Rank& rank) {
      rank.engine.begin_step({});
      const int count = 12 / setup.ranks;
      for (int number = rank.rank() * count; number < (rank.rank() + 1) * count; ++number) {
        rank.add_constant(kB, 1.0f);
        if (number == 5 || number == 6) rank.add_constant(kA, -0.0f);
        if (number == 10) rank.add_constant(kC, 3.0f);
        rank.engine.end_micro_batch();
      }
      EXPECT_TRUE(std::signbit(rank.read(kA)[9])) << setup.ranks << " ranks";
      EXPECT_EQ(rank.read(kC)[9], 3.0f * (1.0f / 12)) << setup.ranks << " ranks";
      rank.engine.step(Rank::settings());
      EXPECT_FALSE(rank.engine.has_gradient(kA));
    });
}

class Refusals : public testing::TestWithParam<int> {
 protected:
  Refusals() {
    setup_.micro_batches = 4;
    setup_.ranks = GetParam();
  }
  // Why no gradient can be added, after which it is as if nobody had tried.
  static std::string refused_gradient(Rank& rank, ParameterId p) {
    const UnitId unit = rank.layout().location(p).unit;
    const std::vector<float> values(rank.elements(p), 1.0f);
    rank.engine.acquire(unit, Hold::kGradient);
    const std::string text = refusal_of([&] { rank.engine.add_gradient(p, {values.data(), Dtype::kF32}); });
    rank.engine.release(unit);
    return text;
  }
  int count() const { return 4 / setup_.ranks; }
  Case setup_;
};
INSTANTIATE_TEST_SUITE_P(Ranks, Refusals, testing::Values(1, 2));

TEST_P(Refusals, OfGradientsThatDoNotBelongToMicroBatches) {
  run_any(setup_, [&](Rank& rank) {
    rank.engine.begin_step({});
    for (int number = 0; number < count(); ++number) {
      rank.add(kA, 0, number);
      EXPECT_THAT(refused_gradient(rank, kA), HasSubstr("a second gradient of 'a'"));
      EXPECT_THAT(refusal_of([&] { rank.engine.gradient_norm(kA); }), HasSubstr("micro-batches of rank 0"));
      if (number + 1 < count()) rank.engine.end_micro_batch();
    }
    rank.engine.end_micro_batch();
    EXPECT_THAT(refused_gradient(rank, kB), HasSubstr("micro-batches of the step have ended"));
    EXPECT_THAT(refusal_of([&] { rank.engine.end_micro_batch(); }), HasSubstr("of the step"));
    rank.engine.gradient_norm(kA);
    EXPECT_THAT(refused_gradient(rank, kA), HasSubstr("'a' is added to one that was used"));
    rank.engine.step(Rank::settings(0, true));
    rank.engine.begin_step({});
    EXPECT_THAT(refused_gradient(rank, kA), HasSubstr("'a' is added to one that was used"));
    rank.engine.drop_gradient(kA);
    rank.add_reproducibly(1, [](ParameterId, int) { return true; });
    rank.engine.step(Rank::settings());
  });
}

TEST_P(Refusals, OfMicroBatchesThatAreNotThere) {
  run_any(setup_, [&](Rank& rank) {
    const auto beyond = static_cast<std::size_t>(count()) + 1;
    EXPECT_THAT(refusal_of([&] { rank.engine.set_micro_batch(0); }), HasSubstr("outside of a step"));
    rank.engine.begin_step({});
    EXPECT_THAT(refusal_of([&] { rank.engine.set_micro_batch(beyond); }), HasSubstr("count them from 0"));
    rank.engine.set_micro_batch(beyond - 1);
    EXPECT_THAT(refused_gradient(rank, kA), HasSubstr("micro-batches of the step have ended"));
    for (std::size_t number = 0; number + 1 < beyond; ++number) {
      rank.engine.set_micro_batch(number);
      rank.add(kA, 0, static_cast<int>(number));
    }
    rank.engine.set_micro_batch(0);
    EXPECT_THAT(refused_gradient(rank, kA), HasSubstr("a second gradient of 'a'"));
    rank.engine.set_micro_batch(beyond - 1);
    rank.engine.step(Rank::settings());
  });
}

// Where all gradients were dropped, the micro-batches begin anew, and nothing of those before is left.
TEST_P(Refusals, AreNoneOfStepsThatBeginAgain) {
  toy::Outcome expected;
  for (const bool again : {false, true})
    run_any(setup_, [&](Rank& rank) {
      rank.engine.begin_step({});
      if (again) {
        rank.add(kA, 5, 5);
        rank.engine.end_micro_batch();
        if (count() > 1) rank.add(kC, 5, 5);
        rank.engine.drop_gradient(kA);
        rank.engine.drop_gradient(kC);
        rank.add(kB, 5, 5);
        rank.engine.abandon_step();
        rank.engine.begin_step({});
      }
      rank.add_reproducibly(0, has_gradient);
      rank.engine.step(Rank::settings());
      toy::Outcome saved = rank.save();
      if (rank.rank() != 0) return;
      if (!again)
        expected = std::move(saved);
      else
        EXPECT_TRUE(saved == expected);
    });
}

TEST(ReproducibleGradients, ThatDifferInNumberAreRefusedByAllRanks) {
  Case setup{.ranks = 2, .micro_batches = 4};
  run(setup, [&](Rank& rank) {
    rank.engine.begin_step({});
    for (int i = 0; i < 2 - rank.rank(); ++i) {
      rank.add(kA, 0, i);
      rank.engine.end_micro_batch();
    }
    EXPECT_THAT(thrown_by([&] { rank.engine.step(Rank::settings()); }).text,
                HasSubstr("after 1 micro-batches of rank 1"));
    if (rank.rank() == 1) {
      rank.add(kA, 0, 1);
      rank.engine.end_micro_batch();
    }
    rank.engine.step(Rank::settings());
  });
}

TEST(ReproducibleGradients, EndNoMicroBatchOfAnotherPlan) {
  Case setup;
  setup.ranks = 1;
  Rank rank(setup, nullptr);
  rank.engine.begin_step({});
  EXPECT_THROW(rank.engine.end_micro_batch(), Error);
  EXPECT_THROW(rank.engine.set_micro_batch(0), Error);
  rank.engine.abandon_step();
}

TEST(ReproducibleGradients, AreChosenInTheirPlanAlone) {
  Case setup;
  setup.counted = 4;
  run(setup, [&](Rank& rank) {
    rank.engine.begin_step({});
    EXPECT_THAT(refusal_of([&] { rank.engine.set_micro_batch(0); }), HasSubstr("is not reproducible"));
    rank.engine.abandon_step();
  });
}

}  // namespace sluice::engine::wrapped::any_order_reproducible_test
