#include "cuda/engine_fixture.h"

// An engine on a GPU takes norms of all its gradients.
namespace sluice::engine::twins::norm_test {

// One number comes of 2^20 elements, and a few more where a parameter does not end with so many.
TEST_F(DeviceEngineTest, ANormBringsOneNumberOfAMillionElements) {
  SLUICE_NEEDS_THE_FAKE();
  Case setup{.places = {kDevice, kDevice, kDevice}, .device = 256 * kMiB, .rows = 600, .steps = 1};
  device_.reset();
  fake()->begin({.memory = 512 * kMiB});
  device_ = open_device(0);
  OnGpu gpu(setup, *device_);
  gpu.client.load();
  gpu.engine.begin_step({});
  std::size_t most = 0;
  const Layout& layout = gpu.engine.layout();
  for (UnitId unit = 0; unit < layout.units().size(); ++unit) {
    if (!layout.trainable(unit)) continue;
    gpu.engine.acquire(unit, Hold::kGradient);
    for (ParameterId p = layout.first_parameter(unit); p < layout.end_parameter(unit); ++p)
      gpu.engine.add_gradient(p, gpu.hands.noise_of(p, layout.location(p).elements));
    gpu.engine.release(unit);
  }
  for (ParameterId p = 0; p < layout.parameters(); ++p)
    most += sizeof(double) * (layout.location(p).elements / (1 << 20) + 10);
  const std::uint64_t before = fake()->counts().bytes_out;
  EXPECT_GT(gpu.engine.gradient_norm(0), 0);
  const std::uint64_t fetched = fake()->counts().bytes_out - before;
  EXPECT_GT(fetched, 0u);
  EXPECT_LE(fetched, most);
  EXPECT_GT(gpu.engine.gradient_norm(layout.parameters() / 2), 0);
  EXPECT_EQ(fake()->counts().bytes_out - before, fetched) << "a second norm brings nothing";
  gpu.engine.abandon_step();
}

// A parameter has more elements than the GPU puts together in one number.
TEST_F(DeviceEngineTest, NormsOfLargeParametersHaveTheBitsOfTheCpu) {
  Case setup;
  setup.rows = 300, setup.steps = 1, setup.measures = true;
  const Outcome expected = train_on_cpu(setup);
  expect_twin(setup, expected);
}

}  // namespace sluice::engine::twins::norm_test
