#include "engine/machine/machine_rates.h"
#include "testing.h"

namespace sluice::engine::machine_rates_test {

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
  // One rank keeps as many transfers under way as before, so that the disk is as busy.
  EXPECT_EQ(shared.disk_in_flight, alone.disk_in_flight);
}

TEST(ShareCores, GivesEachOfTheRanksTheirPartWhereThreadsTakeTurns) {
  MachineRates alone;
  alone.products = {{{}, 6e9}};
  alone.flops = 8e9;
  alone.attention = 2e9;
  alone.memory_bandwidth = 4e9;
  alone.update_seconds = 1e-9;
  MachineRates enough = alone, crowded = alone, crowded_alone = alone, few = alone;
  share_cores(2, 2, 2, 4, enough);
  EXPECT_EQ(enough.flops, alone.flops);
  share_cores(4, 2, 2, 4, crowded);
  EXPECT_EQ(crowded.flops, 4e9);
  EXPECT_EQ(crowded.memory_bandwidth, 2e9);
  EXPECT_EQ(crowded.attention, 1e9);
  EXPECT_EQ(crowded.update_seconds, 2e-9);
  EXPECT_EQ(crowded.products.front().flops, 3e9);
  share_cores(2, 8, 8, 4, crowded_alone);  // one of eight threads had four cores, and now has two
  EXPECT_EQ(crowded_alone.flops, 4e9);
  share_cores(1, 1, 4, 4, few);  // it does not use three of the four cores
  EXPECT_EQ(few.flops, 2e9);
}

TEST(RankProcessorSeconds, AreNoneWhereEachRankHasACoreForThem) {
  EXPECT_EQ(rank_processor_seconds(2, 3, 8, false, 1e10), 0);
  const double on_one_host = rank_processor_seconds(2, 3, 7, true, 1e10);
  EXPECT_GT(on_one_host, 0);
  EXPECT_GT(rank_processor_seconds(2, 3, 7, false, 1e10), on_one_host);
}

// One thread copies 10 GB/s, or a core's part of the memory's bandwidth where that is more, and never more
// than all cores.
TEST(MachineRates, KnowWhatAThreadTakesForAReceivedByte) {
  MachineRates rates;
  rates.cores = 4;
  for (const auto& [all, one] : {std::pair(2e11, 5e10), {2e10, 1e10}, {5e9, 5e9}}) {
    rates.memory_bandwidth = all;
    EXPECT_DOUBLE_EQ(seconds_of_received_byte(true, rates), 4 / one);
    EXPECT_GT(seconds_of_received_byte(false, rates), 4 / one);
  }
}

}  // namespace sluice::engine::machine_rates_test
