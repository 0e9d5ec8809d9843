#include "engine/ranks_client.h"
#include "testing.h"

// Ranks sum each micro-batch's gradients in its backward pass, and add up their own parts of the means. The
// reference adds in the written order by loops of its own, and an engine that trains alone gets its sums.
namespace sluice::engine::wrapped::sums_each_backward_test {

constexpr int kSteps = 3;
constexpr double kClip = 0.5;

// Whether a rank has a gradient of that parameter in that micro-batch.
using Has = std::function<bool(ParameterId p, int step, int micro_batch, int rank)>;
bool has_all(ParameterId, int, int, int) { return true; }
// A rank lacks some, all ranks lack others, and a unit has gradients of some parameters alone.
bool has_some(ParameterId p, int step, int micro_batch, int rank) {
  const auto of = static_cast<int>(p);
  return (of + micro_batch) % 4 != 1 && (of + step + 2 * micro_batch + rank) % 3 != 0;
}

void add_to(std::vector<float>& sum, const std::vector<float>& more) {
  for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += more[i];
}

// The mean, whose sum is pairwise, neighbours first, an odd last one carried.
std::vector<float> mean_of(std::vector<std::vector<float>> of_ranks) {
  const float factor = 1 / static_cast<float>(of_ranks.size());
  while (of_ranks.size() > 1) {
    std::vector<std::vector<float>> sums;
    for (std::size_t i = 0; i < of_ranks.size(); ++i)
      if (i % 2 == 0)
        sums.push_back(of_ranks[i]);
      else
        add_to(sums.back(), of_ranks[i]);
    of_ranks = sums;
  }
  for (float& value : of_ranks[0]) value *= factor;
  return of_ranks[0];
}

toy::Outcome reference(const Case& setup, const Has& has) {
  Case alone = setup;
  alone.stage = alone.counted = 0;
  alone.each_backward = false;
  Rank rank(alone, nullptr);
  std::vector<double> norms;
  for (int step = 0; step < kSteps; ++step) {
    rank.engine.begin_step({});
    for (ParameterId p = static_cast<ParameterId>(rank.layout().parameters()); p-- > 0;) {
      const UnitId unit = rank.layout().location(p).unit;
      if (!rank.layout().trainable(unit)) continue;
      rank.engine.acquire(unit, Hold::kGradient);
      std::vector<float> sum;
      for (int micro_batch = 0; micro_batch < static_cast<int>(setup.counted); ++micro_batch) {
        std::vector<std::vector<float>> of_ranks;
        bool any = false;
        for (int of = 0; of < setup.ranks; ++of) {
          const bool had = has(p, step, micro_batch, of);
          of_ranks.push_back(had ? rank.gradient(p, step, micro_batch, of)
                                 : std::vector<float>(rank.elements(p)));
          any = any || had;
        }
        if (any && sum.empty())
          sum = mean_of(of_ranks);
        else if (any)
          add_to(sum, mean_of(of_ranks));
      }
      if (!sum.empty()) rank.engine.add_gradient(p, {sum.data(), Dtype::kF32});
      rank.engine.release(unit);
    }
    norms.push_back(rank.engine.step(Rank::settings(kClip)).gradient_norm);
  }
  toy::Outcome outcome = rank.save();
  outcome.norms = norms;
  return outcome;
}

void compute(Rank& rank, int step, int micro_batch, const Has& has) {
  const Layout& layout = rank.layout();
  for (UnitId unit = 0; unit < layout.units().size(); ++unit) {  // a forward pass
    rank.engine.acquire(unit, Hold::kRead);
    rank.engine.release(unit);
  }
  for (ParameterId p = static_cast<ParameterId>(layout.parameters()); p-- > 0;)
    if (layout.trainable(layout.location(p).unit) && has(p, step, micro_batch, rank.rank()))
      rank.add(p, step, micro_batch);
  rank.engine.end_micro_batch();
}

// look: sees each rank when it has trained.
toy::Outcome trained(const Case& setup, const Has& has, const std::function<void(Rank&)>& look = {}) {
  toy::Outcome outcome;
  run(setup, [&](Rank& rank) {
    std::vector<double> norms;
    for (int step = 0; step < kSteps; ++step) {
      rank.engine.begin_step({});
      for (int i = 0; i < static_cast<int>(setup.counted); ++i) compute(rank, step, i, has);
      norms.push_back(rank.engine.step(Rank::settings(kClip)).gradient_norm);
    }
    if (look) look(rank);
    toy::Outcome saved = rank.save();
    saved.norms = norms;
    if (rank.rank() == 0) outcome = std::move(saved);
  });
  return outcome;
}

Case case_of_each(int ranks, std::size_t stage, std::size_t counted, const char* place) {
  Case setup;
  setup.ranks = ranks, setup.stage = stage, setup.counted = counted, setup.place = place;
  setup.each_backward = true;
  return setup;
}

std::uint64_t peak(const Rank& rank, allocator::Tier tier) {
  return rank.ledger().snapshot().total[static_cast<std::size_t>(tier)].peak;
}

class SumsInEachBackward : public testing::TestWithParam<std::tuple<int, std::size_t, const char*>> {};
INSTANTIATE_TEST_SUITE_P(RanksStagesPlaces, SumsInEachBackward,
                         testing::Combine(testing::Values(2, 3), testing::Values(2, 3),
                                          testing::Values("memory", "disk")));

TEST_P(SumsInEachBackward, HaveTheBitsOfTheWrittenOrderAndTakeWhatThePlanSays) {
  const auto& [ranks, stage, place] = GetParam();
  for (const std::size_t counted : {1, 2, 4}) {
    SCOPED_TRACE(fmt::format("{} micro-batches of a rank", counted));
    const Case setup = case_of_each(ranks, stage, counted, place);
    const Has has = counted == 2 ? Has(has_some) : Has(has_all);
    const toy::Outcome found = trained(setup, has, [](Rank& rank) {
      EXPECT_TRUE(rank.plan().sums_each_backward);
      EXPECT_EQ(peak(rank, allocator::Tier::kHost), rank.plan().peak_memory);
      EXPECT_EQ(peak(rank, allocator::Tier::kDisk), rank.plan().disk_bytes);
    });
    EXPECT_TRUE(found == reference(setup, has));
  }
}

// With one micro-batch the bits are those of the default, and with several they are others.
TEST(SumsInEachBackwardOfRanks, HaveTheBitsOfTheDefaultWithOneMicroBatchAlone) {
  for (const std::size_t counted : {1, 2}) {
    Case setup = case_of_each(3, 2, counted, "memory");
    const toy::Outcome each = trained(setup, has_all);
    setup.each_backward = false;
    EXPECT_EQ(trained(setup, has_all) == each, counted == 1);
  }
}

TEST(SumsInEachBackwardOfRanks, HaveTheBitsOfTheWrittenOrderWithEveryKindOfOptimizer) {
  for (const Kind& kind :
       {Kind{"adamw", Dtype::kBf16, Dtype::kU8}, Kind{"adafactor", Dtype::kBf16, Dtype::kF32},
        Kind{"muon", Dtype::kF32, Dtype::kBf16}}) {
    Case setup = case_of(kind);
    setup.stage = 3, setup.counted = 2, setup.each_backward = true;
    setup.place = kind.dtype == Dtype::kBf16 ? "disk" : "memory";
    EXPECT_TRUE(trained(setup, has_all) == reference(setup, has_all)) << kind.optimizer;
  }
}

// A rank has its own part of the gradients, and a few whole units.
TEST(SumsInEachBackwardOfRanks, KeepAPartOfGradientsInMemory) {
  Case each = case_of_each(4, 2, 4, "memory"), whole = each;
  each.blocks = whole.blocks = 20;
  whole.each_backward = false;
  std::uint64_t elements = 0;
  const auto gradients = [&](const Case& setup) {
    std::uint64_t bytes = 0;
    run(setup, [&](const Rank& rank) {
      if (rank.rank() != 0) return;
      const auto& of_host = rank.plan().bytes[static_cast<std::size_t>(allocator::Tier::kHost)];
      bytes = of_host[static_cast<std::size_t>(allocator::Purpose::kGradient)];
      elements = 0;
      for (UnitId unit = 0; unit < rank.layout().units().size(); ++unit)
        elements += rank.layout().trainable(unit) ? rank.layout().unit_elements(unit) : 0;
    });
    return bytes;
  };
  EXPECT_GE(gradients(whole), elements * sizeof(float));
  EXPECT_NEAR(static_cast<double>(gradients(each)), static_cast<double>(elements * sizeof(float)) / 4,
              2.0 * kHugePage);
}

// Ranks send as much as the plan says, which is a sum for each micro-batch.
TEST(SumsInEachBackwardOfRanks, SendWhatThePlanSays) {
  for (const std::size_t counted : {1, 3}) {
    const Case setup = case_of_each(2, 2, counted, "memory");
    run(setup, [&](Rank& rank) {
      for (int step = 0; step < 2; ++step) {
        const std::uint64_t before = rank.received();
        rank.engine.begin_step({});
        for (int i = 0; i < static_cast<int>(counted); ++i) compute(rank, step, i, has_all);
        rank.engine.step(Rank::settings(kClip));
        EXPECT_EQ(rank.received() - before, rank.plan().step_bytes_received);
      }
    });
  }
}

// Between micro-batches gradients may be measured, multiplied and dropped, and some may be kept over a step.
TEST(SumsInEachBackwardOfRanks, AddToWhatWasMultipliedDroppedOrKept) {
  for (const char* const place : {"memory", "disk"}) {
    std::vector<double> norms;
    run(case_of_each(2, 3, 2, place), [&](Rank& rank) {
      const auto all_ones = [&](float value) {
        for (const ParameterId p : {kC, kA}) rank.add_constant(p, value);
        rank.engine.end_micro_batch();
      };
      rank.engine.begin_step({});
      all_ones(7);
      for (ParameterId p = 0; p < rank.layout().parameters(); ++p) rank.engine.drop_gradient(p);
      all_ones(3);
      const double one = rank.engine.gradient_norm(kA);
      rank.engine.multiply_gradient(kA, 0.5);
      rank.engine.drop_gradient(kC);
      all_ones(1);
      if (rank.rank() == 0) norms = {one, rank.engine.gradient_norm(kA), rank.engine.gradient_norm(kC)};
      EXPECT_THAT(refusal_of([&] { rank.read(kA); }), HasSubstr("summed in each backward pass"));
      rank.engine.step(Rank::settings(0, true));
      rank.engine.begin_step({});
      all_ones(2);
      const double kept = rank.engine.step(Rank::settings()).gradient_norm;
      if (rank.rank() == 0) norms.push_back(kept);
    });
    const double root = std::sqrt(5000.0 * 140), other = std::sqrt(5000.0 * 120);
    EXPECT_THAT(norms, testing::Pointwise(testing::DoubleNear(1e-6),
                                          {3 * root, 2.5 * root, other, std::hypot(4.5 * root, 3 * other)}))
        << place;
  }
}

TEST(SumsInEachBackwardOfRanks, AGradientThatIsNotFiniteIsFoundAtTheStep) {
  run(case_of_each(2, 2, 2, "memory"), [](Rank& rank) {
    rank.engine.begin_step({});
    for (const float value : {std::numeric_limits<float>::infinity(), 1.0f}) {
      rank.add_constant(kA, rank.rank() == 1 ? value : 1);
      rank.engine.end_micro_batch();
    }
    const Thrown thrown = thrown_by([&] { rank.engine.step(Rank::settings()); });
    EXPECT_EQ(thrown.code, ErrorCode::kNotFinite) << thrown.text;
  });
}

// Ranks that have dropped different gradients would add up different parts.
TEST(SumsInEachBackwardOfRanks, ALoneDropIsFound) {
  run(case_of_each(2, 2, 2, "memory"), [](Rank& rank) {
    rank.engine.begin_step({});
    compute(rank, 0, 0, has_all);
    if (rank.rank() == 1) rank.engine.drop_gradient(kC);
    rank.add_constant(kB, 1);
    EXPECT_THAT(refusal_of([&] { rank.engine.end_micro_batch(); }),
                HasSubstr("was dropped on rank 1, and is there on rank 0; drop it on all"));
    if (rank.rank() == 0) rank.engine.drop_gradient(kC);
    rank.engine.end_micro_batch();
    rank.engine.step(Rank::settings());
  });
  comm::run_communicators(comm::World::kThreads, 2, [](comm::Communicator& communicator) {
    Rank rank(case_of_each(2, 2, 2, "memory"), &communicator);
    rank.engine.begin_step({});
    compute(rank, 0, 0, has_all);
    for (const ParameterId p : {kD, kC}) rank.add(p, 0, 1);  // with which the ranks begin to sum
    const Thrown thrown = thrown_by([&] {
      for (ParameterId p = kC; p-- > 0;) {
        if (!rank.layout().trainable(rank.layout().location(p).unit)) continue;
        if (rank.rank() == 1) rank.engine.drop_gradient(p);
        rank.add(p, 0, 1);
      }
      rank.engine.end_micro_batch();
    });
    EXPECT_THAT(thrown.text, HasSubstr("ranks keep gradients of different parameters"));
  });
}

// A gradient that one rank has dropped is found when the micro-batch ends, and counts no more when all have.
TEST(SumsInEachBackwardOfRanks, ADropWithinAMicroBatchLeavesTheNorm) {
  run(case_of_each(2, 2, 1, "memory"), [](Rank& rank) {
    rank.engine.begin_step({});
    double elements = 0;
    for (ParameterId p = static_cast<ParameterId>(rank.layout().parameters()); p-- > 0;) {
      if (!rank.layout().trainable(rank.layout().location(p).unit)) continue;
      rank.add_constant(p, 1);
      elements += p == kC ? 0 : static_cast<double>(rank.elements(p));
    }
    if (rank.rank() == 1) rank.engine.drop_gradient(kC);
    EXPECT_THAT(refusal_of([&] { rank.engine.end_micro_batch(); }), HasSubstr("was dropped on rank 1"));
    if (rank.rank() == 0) rank.engine.drop_gradient(kC);
    rank.engine.end_micro_batch();
    EXPECT_DOUBLE_EQ(rank.engine.step(Rank::settings()).gradient_norm, std::sqrt(elements));
  });
}

// A change of plan moves the parts of gradients between memory and disk.
TEST(SumsInEachBackwardOfRanks, PlansChangeInPlace) {
  Case setup = case_of_each(2, 3, 2, nullptr);
  setup.blocks = 12;
  toy::Outcome expected = trained(setup, has_all), found;
  run(setup, [&](Rank& rank) {
    const Plan small = rank.plan_in(rank.least_memory() + 4 * kMiB), large = rank.plan_in(kGiB);
    EXPECT_NE(std::ranges::count(small.units, true, &UnitPlan::gradient_shard_in_record),
              std::ranges::count(large.units, true, &UnitPlan::gradient_shard_in_record));
    std::vector<double> norms;
    for (int step = 0; step < kSteps; ++step) {
      rank.engine.replan(step % 2 == 0 ? small : large);
      rank.limit_memory(std::max(small.peak_memory, large.peak_memory) + 64 * 1024);
      rank.engine.begin_step({});
      for (int i = 0; i < 2; ++i) compute(rank, step, i, has_all);
      norms.push_back(rank.engine.step(Rank::settings(kClip)).gradient_norm);
    }
    toy::Outcome saved = rank.save();
    saved.norms = norms;
    if (rank.rank() == 0) found = std::move(saved);
  });
  EXPECT_TRUE(found == expected);
}

}  // namespace sluice::engine::wrapped::sums_each_backward_test
