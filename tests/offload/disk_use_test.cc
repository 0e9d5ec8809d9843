#include "offload/disk_use.h"

#include "offload/support.h"
#include "testing.h"

namespace sluice::offload::disk_use_test {
using namespace sluice::offload::testing;

TEST(DiskUse, IsFoundByEachService) {
  const DirectFolder folder;
  if (!folder.found()) GTEST_SKIP() << kNoDirectFolder;
  for (const IoWay way : {IoWay::kThreads, IoWay::kUring}) {
    if (way == IoWay::kUring && !uring_available(nullptr)) continue;
    IoOptions io;
    io.way = way;
    const DiskUse use = use_disk(folder.path(), 8 * kMiB + kDiskBlock, io);
    EXPECT_GT(use.rates.read, 0);
    EXPECT_GT(use.rates.write, 0);
    EXPECT_GT(use.rates.together, 0);
    EXPECT_GT(use.processor_seconds, 0);
  }
}

TEST(DiskUse, AMissingFolderIsRefused) { EXPECT_THROW(use_disk("/nowhere/at/all", kMiB, {}), Error); }

}  // namespace sluice::offload::disk_use_test
