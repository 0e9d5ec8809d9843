#include "cuda/engine_fixture.h"

// Units that are given values where a GPU computes.
namespace sluice::engine::twins::loading_test {

class LoadingTest : public DeviceEngineTest {
 protected:
  // State of zeros is what a unit has at first, and again where it is given values anew.
  static Outcome trained_anew(Client& client) {
    std::vector<double> norms;
    client.load();
    for (int step = 0; step < 2; ++step) norms.push_back(client.step(step));
    client.load();
    norms.push_back(client.step(2));
    Outcome outcome = client.save();
    outcome.norms = norms;
    return outcome;
  }
  static Outcome on_cpu(const Case& setup) {
    Made made(setup, nullptr);
    HandsOnCpu hands;
    Client client(setup, *made.engine, hands);
    return trained_anew(client);
  }
};

TEST_F(LoadingTest, AUnitThatIsGivenValuesAnewHasStateOfZeros) {
  for (const Dtype state : {Dtype::kF32, Dtype::kU8}) {
    Case setup{.optimizer = optimizer_of("adamw", state, true), .dtype = Dtype::kBf16, .blocks = 1};
    const Outcome expected = on_cpu(setup);
    for (const auto updates : {kHost, kDevice})
      for (const auto place : {kDevice, kHost, kDisk}) {
        SCOPED_TRACE(fmt::format("updated on {}, state on {}", name_of(updates), name_of(place)));
        if (updates == kHost && place == kDevice) continue;
        setup.updates = updates;
        setup.places = {kHost, kHost, place};
        OnGpu gpu(setup, *device_);
        EXPECT_TRUE(trained_anew(gpu.client) == expected);
      }
  }
}

// Nothing but parameters crosses the link: state that is in the host's memory is filled in there.
TEST_F(LoadingTest, StateInTheHostsMemoryStaysThere) {
  SLUICE_NEEDS_THE_FAKE();
  for (const auto updates : {kHost, kDevice}) {
    Case setup{.optimizer = optimizer_of("adamw", Dtype::kF32, true),
               .dtype = Dtype::kBf16,
               .places = {kDevice, kDevice, kHost},
               .updates = updates,
               .blocks = 1};
    OnGpu gpu(setup, *device_);
    const auto before = fake()->counts();
    gpu.client.load();
    const auto after = fake()->counts();
    std::uint64_t bytes = 0;
    for (UnitId unit = 0; unit < gpu.engine.layout().units().size(); ++unit)
      bytes += gpu.engine.layout().unit_bytes(unit);
    EXPECT_EQ(after.bytes_in - before.bytes_in, bytes);
    EXPECT_EQ(after.bytes_out - before.bytes_out, 0u);
  }
}

}  // namespace sluice::engine::twins::loading_test
