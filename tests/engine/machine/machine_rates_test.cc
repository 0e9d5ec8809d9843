#include "engine/machine/machine_rates.h"

#include <gtest/gtest.h>

namespace sluice::engine {
namespace {

// Two disks are as fast as twice the slower one.
TEST(AddDisk, GivesEachOfTheRanksThatShareItTheirPart) {
  offload::DiskKnowledge slow, fast;
  slow.rates = {1e9, 2e9, 1.5e9};
  fast.rates = {4e9, 4e9, 4e9};
  MachineRates alone, shared;
  add_disk({slow, fast}, 1, alone);
  add_disk({slow, fast}, 4, shared);
  EXPECT_EQ(alone.disk_read, 2e9);
  EXPECT_EQ(alone.disk_write, 4e9);
  EXPECT_EQ(alone.disk_together, 3e9);
  EXPECT_EQ(shared.disk_read, 0.5e9);
  EXPECT_EQ(shared.disk_write, 1e9);
  EXPECT_EQ(shared.disk_together, 0.75e9);
  // What is under way for one rank keeps the disk as busy as before.
  EXPECT_EQ(shared.disk_in_flight, alone.disk_in_flight);
}

}  // namespace
}  // namespace sluice::engine
