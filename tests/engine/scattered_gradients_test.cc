#include "engine/ranks_client.h"
#include "testing.h"

// Tests of what ranks send each other of gradients, where units are accessed in any order and a rank gets the
// sums of its own shard alone.
namespace sluice::engine::wrapped::scattered_gradients_test {

class Scattered : public testing::TestWithParam<std::tuple<std::size_t, const char*>> {
 protected:
  static std::size_t stage() { return std::get<0>(GetParam()); }
  static Case setup(int ranks = 2) {
    Case setup{.ranks = ranks, .stage = stage(), .place = std::get<1>(GetParam())};
    return setup;
  }
  template <class Action>
  static std::uint64_t received_by(Rank& rank, const Action& action) {
    const std::uint64_t before = rank.received();
    action();
    return rank.received() - before;
  }
};
INSTANTIATE_TEST_SUITE_P(Tiers, Scattered,
                         testing::ValuesIn(std::vector<std::tuple<std::size_t, const char*>>{
                             {0, "memory"}, {1, "disk"}, {2, "memory"}, {3, "memory"}, {3, "disk"}}));

// The client does as a wrapped model: forward through all units, and backward.
TEST_P(Scattered, AStepReceivesWhatThePlanSays) {
  for (const int ranks : {2, 3})
    run(setup(ranks), [&](Rank& rank) {
      for (int step = 0; step < 3; ++step) {
        const std::uint64_t received = received_by(rank, [&] {
          rank.engine.begin_step({});
          rank.add_all(step);
          rank.engine.step(Rank::settings(1.0));
        });
        // At stage 3 some parameters may still be there when they are needed again.
        if (stage() < 3)
          EXPECT_EQ(received, rank.plan().step_bytes_received) << step;
        else
          EXPECT_LE(received, rank.plan().step_bytes_received) << step;
      }
    });
}

TEST_P(Scattered, NormsAndFactorsReceiveNothing) {
  run(setup(), [&](Rank& rank) {
    rank.engine.begin_step({});
    rank.add_constant(kA, 3);
    rank.add_constant(kC, 2);
    rank.engine.gradient_norm(kA);
    EXPECT_EQ(received_by(rank,
                          [&] {
                            for (const ParameterId p : {kA, kC}) {
                              rank.engine.multiply_gradient(p, 0.5);
                              const auto n = static_cast<double>(rank.elements(p));
                              EXPECT_NEAR(rank.engine.gradient_norm(p), (p == kA ? 1.5 : 1.0) * std::sqrt(n),
                                          1e-6 * n);
                            }
                          }),
              0u);
    rank.engine.step(Rank::settings());
  });
}

// The others come to their next step(), and have all of their gradients as before.
TEST_P(Scattered, OneRankAloneReadsKeptGradients) {
  run(setup(3), [&](Rank& rank) {
    for (int step = 0; step < 3; ++step) {
      rank.engine.begin_step({});
      if (step == 0) rank.add_all(0);
      rank.engine.step(Rank::settings(0, true));
      if (step != rank.rank()) continue;
      double squares = 0;
      for (const float value : rank.read(kC)) squares += static_cast<double>(value) * value;
      EXPECT_NEAR(rank.engine.gradient_norm(kC), std::sqrt(squares), 1e-6 * std::sqrt(squares));
    }
    rank.engine.begin_step({});
    rank.engine.step(Rank::settings());
  });
}

// While one adds to kept gradients in an order of its own, others are in step(), or add to others.
TEST_P(Scattered, RanksAddToKeptGradientsInAnyOrder) {
  run(setup(3), [&](Rank& rank) {
    rank.engine.begin_step({});
    for (const ParameterId p : {kA, kB, kC}) rank.add_constant(p, 1 + 2 * static_cast<float>(rank.rank()));
    rank.engine.step(Rank::settings(0, true));
    rank.engine.begin_step({});
    if (rank.rank() == 0)
      for (const ParameterId p : {kC, kA}) rank.add_constant(p, 3);
    if (rank.rank() == 1)
      for (const ParameterId p : {kA, kC}) rank.add_constant(p, 6);
    if (rank.rank() == 2) rank.add_constant(kB, 3);
    EXPECT_EQ(rank.read(kA), std::vector<float>(rank.elements(kA), 6.0f));
    EXPECT_EQ(rank.read(kB), std::vector<float>(rank.elements(kB), 4.0f));
    EXPECT_EQ(rank.read(kC), std::vector<float>(rank.elements(kC), 6.0f));
    rank.engine.step(Rank::settings());
  });
}

TEST_P(Scattered, AGradientThatAnotherRankHasDroppedIsRefusedWhereItHasToBeGathered) {
  run(setup(), [&](Rank& rank) {
    const bool first = rank.rank() == 0;
    rank.engine.begin_step({});
    rank.add_constant(kA, 1);
    rank.engine.step(Rank::settings(0, true));
    if (!first) rank.engine.drop_gradient(kA);
    const auto refused = [&](const std::function<void()>& action) {
      EXPECT_THAT(refusal_of(action), AllOf(HasSubstr("'a'"), HasSubstr("dropped on rank 1")));
    };
    if (first && stage() > 0) refused([&] { rank.read(kA); });
    rank.engine.begin_step({});
    if (!first && stage() > 0) refused([&] { rank.engine.step(Rank::settings()); });
    if (first) rank.engine.drop_gradient(kA);
    rank.add_constant(kA, 2);
    EXPECT_EQ(rank.read(kA)[0], 2.0f);
    rank.engine.step(Rank::settings());
  });
}

}  // namespace sluice::engine::wrapped::scattered_gradients_test
