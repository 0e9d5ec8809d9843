#include "cuda/engine_fixture.h"

// How often a GPU is asked to update.
namespace sluice::engine::twins {
namespace update_launches_test {

class UpdateLaunchesTest : public DeviceEngineTest {
 protected:
  // The kernels that are launched in a step.
  std::uint64_t launches(const Case& setup, std::size_t chunks) {
    begin(Schedule::kLate, 1);
    OnGpu gpu(setup, *device_);
    const Layout& layout = gpu.engine.layout();
    EXPECT_EQ(divide_up(layout.unit_elements(1), kChunkGrain), chunks);
    gpu.client.load();
    const std::uint64_t before = fake()->counts().calls["cuLaunchKernel"];
    gpu.client.step(0);
    return fake()->counts().calls["cuLaunchKernel"] - before;
  }
};

// The chunks of a unit's state are one launch where they are in the GPU's memory, and each is one where they
// pass through slots, whatever parameters they have.
TEST_F(UpdateLaunchesTest, OneIsForAllOfAUnitThatLiesTogether) {
  SLUICE_NEEDS_THE_FAKE();
  Case setup;
  setup.device = 128 * kMiB;
  setup.updates = kDevice;
  setup.blocks = 1;
  Case larger = setup;
  larger.rows = 1050;
  EXPECT_EQ(launches(larger, 3), launches(setup, 1));
  setup.places = larger.places = {kHost, kHost, kHost};
  EXPECT_EQ(launches(larger, 3), launches(setup, 1) + 2);
}

}  // namespace update_launches_test
}  // namespace sluice::engine::twins
