#include "offload/disk_folders.h"

#include "offload/support.h"
#include "testing.h"
#include "thrown.h"

// Disk folders that lie on one file system lend no more together than it has.
namespace sluice::offload::disk_folders_test {

class DiskFolders : public ::testing::Test {
 protected:
  DiskFolders() {
    for (const std::string& path : {first_, second_}) std::filesystem::create_directory(path);
  }
  const offload::testing::DirectFolder folder_;
  const std::string first_ = folder_.file("first"), second_ = folder_.file("second");
  const std::uint64_t free_ = free_disk_bytes(folder_.path());
};

TEST_F(DiskFolders, DivideWhatIsFree) {
  std::vector<DiskFolder> alone = {{first_, kWholeDisk}},
                          both = {{first_, kWholeDisk}, {second_, kWholeDisk}};
  resolve_disk(alone, "", 0);
  resolve_disk(both, "", 0);
  const auto near = [](std::uint64_t found, std::uint64_t expected) {  // others write here, too
    return found > expected * 8 / 10 && found < expected * 12 / 10;
  };
  EXPECT_TRUE(near(alone[0].limit, free_));
  for (const DiskFolder& each : both) EXPECT_TRUE(near(each.limit, free_ / 2)) << each.limit;
  EXPECT_LE(usable_disk(both), free_ * 12 / 10);
}

TEST_F(DiskFolders, WithoutALimitTakeWhatTheOthersAndCheckpointsLeave) {
  std::vector<DiskFolder> disk = {{first_, kWholeDisk}, {second_, free_ / 2}};
  resolve_disk(disk, "", 0);
  EXPECT_EQ(disk[1].limit, free_ / 2);
  EXPECT_LT(disk[0].limit, free_ * 6 / 10);
  disk[0].limit = kWholeDisk;
  resolve_disk(disk, folder_.file("out"), free_ / 4);
  EXPECT_LT(disk[0].limit, free_ * 3 / 10);
}

TEST_F(DiskFolders, CannotBePromisedMoreTogetherThanIsFree) {
  std::vector<DiskFolder> disk = {{first_, free_ / 10 * 6}, {second_, free_ / 10 * 6}};
  expect_error(ErrorCode::kBudget, {"'" + second_ + "'", "same file system", "are missing"},
               [&] { resolve_disk(disk, "", 0); });
}

TEST(ParseDiskTest, TellsFoldersFromSizes) {
  EXPECT_EQ(parse_disk("/a:b").path, "/a:b");
  EXPECT_EQ(parse_disk("/a:1/b").path, "/a:1/b");
  EXPECT_EQ(parse_disk("/a:1/").path, "/a:1/");
  EXPECT_EQ(parse_disk("/a:1/").limit, kWholeDisk);
  EXPECT_EQ(parse_disk("/a:b:2MiB").path, "/a:b");
  EXPECT_EQ(parse_disk("/a:b:2MiB").limit, 2097152u);
  for (const char* bad : {"/a:12XB", "/a:", ":1GiB", "/a:0"}) EXPECT_THROW(parse_disk(bad), Error) << bad;
}

}  // namespace sluice::offload::disk_folders_test
