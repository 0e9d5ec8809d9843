#include "engine/steps/state_server.h"

#include <future>

#include "engine/ranks_client.h"
#include "testing.h"

// Tests of rank 0 that takes the optimizer's state alone, while the other ranks go on.
namespace sluice::engine::wrapped::state_server_test {

// A rank whose state is served between its client's calls.
class Client {
 public:
  explicit Client(Rank& rank) : rank_(rank) {
    if (rank.rank() > 0) server_.emplace(rank.engine, turns_);
  }
  template <class Call>
  void call(Call&& action) {
    const std::lock_guard turn(turns_);
    action(rank_);
  }
  void train(int step) {
    call([](Rank& rank) { rank.engine.begin_step({}); });
    for (ParameterId p = static_cast<ParameterId>(rank_.layout().parameters()); p-- > 0;)
      if (rank_.layout().trainable(rank_.layout().location(p).unit))
        call([&](Rank& rank) { rank.add(p, step); });
    call([](Rank& rank) { rank.engine.step(Rank::settings()); });
  }
  // REQUIRES: rank 0.
  toy::Outcome state() {
    toy::Outcome outcome;
    for (UnitId unit = 0; unit < rank_.layout().units().size(); ++unit)
      call(
          [&](Rank& rank) { rank.engine.save_alone(unit, toy::collect(outcome, rank.optimizer().state())); });
    return outcome;
  }

 private:
  Rank& rank_;
  std::mutex turns_;
  std::optional<StateServer> server_;
};

constexpr int kSteps = 2;

// Returns rank 0's values and state after each step, where all ranks take the state together.
std::vector<toy::Outcome> taken_together(const Case& setup) {
  std::vector<toy::Outcome> taken;
  run(setup, [&](Rank& rank) {
    Client client(rank);
    for (int step = 0; step < kSteps; ++step) {
      client.train(step);
      client.call([&](Rank&) {
        toy::Outcome outcome = rank.save();
        if (rank.rank() == 0) taken.push_back(std::move(outcome));
      });
    }
  });
  return taken;
}

class StateIsTaken : public testing::TestWithParam<std::tuple<std::size_t, const char*, Kind>> {
 protected:
  static Case setup() {
    Case setup = case_of(std::get<2>(GetParam()));
    setup.ranks = 3, setup.stage = std::get<0>(GetParam()), setup.place = std::get<1>(GetParam());
    return setup;
  }
};
constexpr Kind kPlain = {"adamw", Dtype::kF32, Dtype::kF32};
constexpr Kind kFactored = {"adafactor", Dtype::kBf16, Dtype::kF32};  // has arrays of whole parameters
INSTANTIATE_TEST_SUITE_P(Places, StateIsTaken,
                         testing::Values(std::tuple(1, "memory", kPlain), std::tuple(1, "disk", kFactored),
                                         std::tuple(3, "memory", kFactored), std::tuple(3, "disk", kPlain)));

// The others begin the next step meanwhile, and some ask whether rank 0 has the state.
TEST_P(StateIsTaken, ByRank0AloneAsByAllTogether) {
  const std::vector<toy::Outcome> together = taken_together(setup());
  run(setup(), [&](Rank& rank) {
    Client client(rank);
    for (int step = 0; step < kSteps; ++step) {
      client.train(step);
      if (rank.rank() == 0) {
        EXPECT_TRUE(client.state() == together[static_cast<std::size_t>(step)]) << "step " << step;
      }
      if (rank.rank() == 0 || (step + rank.rank()) % 2 == 0)
        client.call([](Rank& of) { of.engine.state_is_taken(""); });
    }
    rank.communicator()->barrier(2, "rank 0 has the state");
  });
}

// Updates bring state to the memory from which it is sent, so that they wait for that.
TEST(StateFromDisk, StaysWhereItIsUntilItIsSent) {
  Case setup;
  setup.stage = 1, setup.place = "disk";
  run(setup, [&](Rank& rank) {
    const auto step = [&](int number) {
      rank.engine.begin_step({});
      rank.add_constant(kC, static_cast<float>(number));
      rank.engine.step(Rank::settings());
    };
    step(1);
    std::promise<void> stepped;
    std::vector<std::byte> at_once, late;
    std::thread transport;
    const auto serve = [&](const comm::Answer& answer) {
      const StateRead read = {.unit = kFirst};
      rank.engine.state_reads()->ask({.key = read.key(), .version = 1}, answer);
      rank.engine.serve_state();
    };
    if (rank.rank() == 1) {
      serve([&](std::span<const std::byte> bytes, const std::exception_ptr&, const Done& sent) {
        at_once.assign(bytes.begin(), bytes.end());
        sent(nullptr);
      });
      serve([&](std::span<const std::byte> bytes, const std::exception_ptr&, const Done& sent) {
        transport = std::thread([&, bytes, sent] {
          stepped.get_future().wait_for(std::chrono::milliseconds(500));
          late.assign(bytes.begin(), bytes.end());
          sent(nullptr);
        });
      });
    }
    step(2);
    stepped.set_value();
    if (transport.joinable()) transport.join();
    EXPECT_EQ(at_once.empty(), rank.rank() == 0);
    EXPECT_TRUE(late == at_once);
  });
}

}  // namespace sluice::engine::wrapped::state_server_test
