#include "core/device_array.h"

#include "testing.h"
#include "thrown.h"

namespace sluice::device_array_test {

// CUDA's grids have at most 2^31 - 1 blocks.
TEST(DeviceArrayTest, ALaunchOfTooManyBlocksIsRefused) {
  constexpr std::size_t kMost = INT32_MAX, kOfBlock = 256;
  EXPECT_EQ(launch_blocks(0, kOfBlock), 0U);
  EXPECT_EQ(launch_blocks(kOfBlock + 1, kOfBlock), 2U);
  EXPECT_EQ(launch_blocks(kMost * kOfBlock, kOfBlock), kMost);
  expect_error(ErrorCode::kInternal, {"549755813633 elements", "256 in each block"},
               [] { launch_blocks(kMost * kOfBlock + 1, kOfBlock); });
}

}  // namespace sluice::device_array_test
