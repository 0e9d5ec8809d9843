#include <gmock/gmock.h>

#include "cuda/engine_fixture.h"

// The slots through which the GPU's updates are streamed.
namespace sluice::engine::twins {
namespace staging_slots_test {

using StagingSlotsTest = DeviceEngineTest;

// All work on a slot is queued before the caller looks for the next one. If chunks went through one slot
// again and again, each would come in only when the one before has gone out.
TEST_F(StagingSlotsTest, ChunksTakeTurnsAtAllSlots) {
  SLUICE_NEEDS_THE_FAKE();
  Case setup;
  setup.device = 128 * kMiB;
  setup.updates = kDevice;
  setup.places = {kDevice, kDevice, kHost};
  OnGpu gpu(setup, *device_);
  gpu.client.load();
  const auto before = fake()->counts().copied_to;
  for (int step = 0; step < 3; ++step) gpu.client.step(step);
  auto after = fake()->counts().copied_to;
  after.erase(reinterpret_cast<DeviceAddress>(gpu.hands.noise_of(0, 1).data));  // the client's own
  std::vector<std::uint64_t> chunks;                                            // of each slot
  for (const auto& [address, copies] : after) {
    const auto found = before.find(address);
    const std::uint64_t more = copies - (found == before.end() ? 0 : found->second);
    if (more > 0) chunks.push_back(more);
  }
  EXPECT_GT(gpu.made.plan.staging_slots, 2U);
  ASSERT_EQ(chunks.size(), gpu.made.plan.staging_slots);
  EXPECT_LE(std::ranges::max(chunks), std::ranges::min(chunks) + 1);
  EXPECT_GT(std::ranges::min(chunks), 1U);
}

}  // namespace staging_slots_test
}  // namespace sluice::engine::twins
