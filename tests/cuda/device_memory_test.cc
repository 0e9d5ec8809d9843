#include "allocator/device_memory.h"

#include "core/bytes.h"
#include "cuda/gpu.h"
#include "thrown.h"

// Regions of a device's memory, and frames under homes.
namespace sluice::allocator::device_memory_test {

class DeviceMemoryTest : public GpuTest {
 protected:
  static Ledger::Line held(const Ledger& ledger, Purpose purpose) {
    return ledger.snapshot()
        .lines[static_cast<std::size_t>(Tier::kDevice)][static_cast<std::size_t>(purpose)];
  }
};

TEST_F(DeviceMemoryTest, WhatABudgetRefusesIsNotTaken) {
  const auto device = open_device(0);
  Ledger ledger;
  ledger.set_budget(Tier::kDevice, 4 * kMiB);
  const std::size_t before = device->free_memory();
  expect_error(ErrorCode::kBudget, {"device"},
               [&] { DeviceRegion(ledger, *device, Purpose::kParameter, 5 * kMiB); });
  expect_error(ErrorCode::kBudget, {"device"}, [&] { DeviceFramePool(ledger, *device, 2 * kMiB, 3); });
  EXPECT_EQ(device->free_memory(), before);
  DeviceFramePool pool(ledger, *device, 2 * kMiB, 2);
  EXPECT_EQ(held(ledger, Purpose::kParameter).current, 4 * kMiB);
}

TEST_F(DeviceMemoryTest, WhatTheDeviceLacksIsChargedToNobody) {
  if (fake() != nullptr) fake()->begin({.memory = 64 * kMiB});
  const auto device = open_device(0);
  Ledger ledger;
  const std::size_t most = device->info().memory / (2 * kMiB);
  const DeviceRegion other(ledger, *device, Purpose::kStaging, 2 * kMiB);
  expect_error(ErrorCode::kBudget, {"asked of GPU 0", "are free"},
               [&] { DeviceFramePool(ledger, *device, 2 * kMiB, most); });
  expect_error(ErrorCode::kBudget, {}, [&] { DeviceFramePool(ledger, *device, 2 * kMiB, SIZE_MAX); });
  EXPECT_EQ(ledger.snapshot().total[static_cast<std::size_t>(Tier::kDevice)].current, 2 * kMiB);
}

TEST_F(DeviceMemoryTest, MisuseIsRefused) {
  const auto device = open_device(0);
  Ledger ledger;
  DeviceFramePool pool(ledger, *device, 2 * kMiB, 2), other(ledger, *device, 2 * kMiB, 2);
  const auto stream = device->make_stream(false);
  const std::array users{stream.get()};
  DeviceHome home(pool, "unit", 5 * kMiB), none;
  EXPECT_EQ(home.size(), 5 * kMiB);
  EXPECT_FALSE(pool.place(home, 5 * kMiB, Purpose::kParameter, stream.get()));
  EXPECT_EQ(pool.free_extents(), 2U);
  expect_error(ErrorCode::kInvalidArgument, {"do not fit", "'unit'"},
               [&] { pool.place(home, 6 * kMiB, Purpose::kParameter, stream.get()); });
  expect_error(ErrorCode::kState, {"of their pool"},
               [&] { other.place(home, 1, Purpose::kParameter, stream.get()); });
  expect_error(ErrorCode::kState, {"of their pool"},
               [&] { pool.place(none, 1, Purpose::kParameter, stream.get()); });
  ASSERT_TRUE(pool.place(home, 3 * kMiB, Purpose::kGradient, stream.get()));
  EXPECT_EQ(home.placed(), 4 * kMiB);
  EXPECT_EQ(held(ledger, Purpose::kGradient).current, 4 * kMiB);
  expect_error(ErrorCode::kState, {"'unit'", "already"},
               [&] { pool.place(home, 1, Purpose::kParameter, stream.get()); });
  pool.take_away(home, reached(*device, users));
  pool.take_away(home, reached(*device, users));
  EXPECT_EQ(held(ledger, Purpose::kGradient).current, 0U);
  EXPECT_EQ(pool.free_extents(), 2U);
}

TEST_F(DeviceMemoryTest, AHomeGetsWhatItWasAssigned) {
  const auto device = open_device(0);
  Ledger ledger;
  DeviceFramePool pool(ledger, *device, 2 * kMiB, 4);
  const auto stream = device->make_stream(false);
  const std::array users{stream.get()};
  DeviceHome one(pool, "one", 4 * kMiB), other(pool, "other", 4 * kMiB);
  const auto place = [&](DeviceHome& home) {
    ASSERT_TRUE(pool.place(home, home.size(), Purpose::kParameter, stream.get()));
  };
  pool.assign(one, {2, 3});
  pool.assign(other, {1, 2});
  place(one);
  EXPECT_EQ(pool.in_the_way(other), std::vector{one.address()});
  pool.take_away(one, reached(*device, users));
  EXPECT_TRUE(pool.in_the_way(other).empty());
  place(other);
  EXPECT_EQ(pool.in_the_way(one), std::vector{other.address()});
  EXPECT_EQ(pool.maps(), 4U);
  // It gets others where it must, which are its own from then on.
  place(one);
  EXPECT_EQ(pool.maps(), 5U);
  pool.take_away(other, reached(*device, users));
  pool.take_away(one, reached(*device, users));
  place(one);
  EXPECT_TRUE(pool.in_the_way(other).empty());
  place(other);
  EXPECT_EQ(pool.maps(), 5U);
  pool.take_away(one, reached(*device, users));
  pool.take_away(other, reached(*device, users));
  // Extents that are mapped already stay where they are.
  pool.assign(other, {2, 1});
  place(other);
  EXPECT_EQ(pool.maps(), 5U);
  pool.take_away(other, reached(*device, users));
}

// Homes that get more and less memory by turns have each extent once.
TEST_F(DeviceMemoryTest, FramesAreUnderOnePlaceOfAHomeAlone) {
  constexpr std::size_t kPiece = 2 * kMiB;
  const auto device = open_device(0);
  Ledger ledger;
  DeviceFramePool pool(ledger, *device, kPiece, 4);
  const auto stream = device->make_stream(false);
  HostMemory host(*device, 1);
  std::vector<DeviceHome> homes;
  for (int i = 0; i < 3; ++i) homes.emplace_back(pool, "unit", 3 * kPiece);
  std::mt19937_64 random(5);
  for (int turn = 0; turn < 300; ++turn) {
    DeviceHome& home = homes[random() % homes.size()];
    pool.take_away(home, {});
    if (!pool.place(home, (1 + random() % 3) * kPiece, Purpose::kParameter, stream.get())) continue;
    for (const DeviceHome& one : homes)
      for (std::size_t at = 0; at < one.placed(); at += kPiece) {
        const auto value =
            static_cast<std::byte>(1 + (&one - homes.data()) * 3 + static_cast<long>(at / kPiece));
        device->fill(stream.get(), one.address() + at, value, 1);
      }
    for (const DeviceHome& one : homes)
      for (std::size_t at = 0; at < one.placed(); at += kPiece) {
        device->copy_out(stream.get(), host.data(), one.address() + at, 1);
        device->synchronize(stream.get());
        ASSERT_EQ(static_cast<long>(host[0]), 1 + (&one - homes.data()) * 3 + static_cast<long>(at / kPiece))
            << turn;
      }
  }
}

// Else the memory under a home's other extents would be kept until the process ends. What could not be
// unmapped keeps its addresses, which others must not get, and the user is told of it.
TEST_F(DeviceMemoryTest, AHomeThatEndsUnmapsEachExtentThoughAnotherOneCannotBe) {
  SLUICE_NEEDS_THE_FAKE();
  constexpr std::uint64_t kExtents = 3;
  for (std::uint64_t fails = 0; fails < kExtents; ++fails) {
    fake()->begin({});
    {
      const auto device = open_device(0);
      Ledger ledger;
      DeviceFramePool pool(ledger, *device, 2 * kMiB, kExtents);
      const auto stream = device->make_stream(false);
      DeviceHome home(pool, "unit", kExtents * 2 * kMiB);
      ASSERT_TRUE(pool.place(home, home.size(), Purpose::kParameter, stream.get()));
      pool.take_away(home, {});
      fake()->fail("cuMemUnmap", fails, 719);
      testing::internal::CaptureStderr();
      home = DeviceHome();
      const std::string told = testing::internal::GetCapturedStderr();
      EXPECT_NE(told.find("could not be unmapped"), std::string::npos) << told;
      EXPECT_NE(told.find("cuMemUnmap"), std::string::npos) << told;
      EXPECT_EQ(fake()->counts().calls.at("cuMemUnmap"), kExtents) << fails;
    }
    EXPECT_EQ(fake()->alive(), (std::vector<std::string>{"1 reservations", "1 mappings"})) << fails;
    EXPECT_EQ(fake()->take_misuses(), std::vector<std::string>{}) << fails;
  }
  fake()->begin({});
}

// After a fault of the GPU no call succeeds.
TEST_F(DeviceMemoryTest, UnmappingThatFailsForEachHomeIsToldOnce) {
  SLUICE_NEEDS_THE_FAKE();
  {
    const auto device = open_device(0);
    Ledger ledger;
    DeviceFramePool pool(ledger, *device, 2 * kMiB, 4);
    const auto stream = device->make_stream(false);
    std::vector<DeviceHome> homes;
    for (int i = 0; i < 4; ++i) homes.emplace_back(pool, "unit", 2 * kMiB);
    for (DeviceHome& home : homes)
      ASSERT_TRUE(pool.place(home, home.size(), Purpose::kParameter, stream.get()));
    for (DeviceHome& home : homes) pool.take_away(home, {});
    pool.before_unmapping([] { fail(ErrorCode::kIo, "the GPU has had a fault"); });
    testing::internal::CaptureStderr();
    homes.clear();
    const std::string told = testing::internal::GetCapturedStderr();
    EXPECT_NE(told.find("could not be unmapped"), std::string::npos) << told;
    EXPECT_EQ(told.find("could not be unmapped"), told.rfind("could not be unmapped")) << told;
    EXPECT_EQ(fake()->counts().calls.count("cuMemAddressFree"), 0U);
  }
  EXPECT_EQ(fake()->alive(), (std::vector<std::string>{"4 reservations", "4 mappings"}));
  fake()->begin({});
}

TEST_F(DeviceMemoryTest, EachCallThatFailsIsReportedAndLeavesNothing) {
  SLUICE_NEEDS_THE_FAKE();
  const auto scenario = [] {
    const auto device = open_device(0);
    Ledger ledger;
    const DeviceRegion region(ledger, *device, Purpose::kStaging, 2 * kMiB);
    const DeviceRegion shared(ledger, *device, Purpose::kStaging, 2 * kMiB, true);
    const OthersDeviceRegion others(*device, shared.exported(), 2 * kMiB);
    DeviceFramePool pool(ledger, *device, 2 * kMiB, 2);
    const auto stream = device->make_stream(false);
    const std::array users{stream.get()};
    DeviceHome first(pool, "first", 3 * kMiB), second(pool, "second", 1 * kMiB);
    ASSERT_TRUE(pool.place(first, 3 * kMiB, Purpose::kParameter, stream.get()));
    pool.take_away(first, reached(*device, users));
    ASSERT_TRUE(pool.place(second, 1 * kMiB, Purpose::kParameter, stream.get()));
    pool.take_away(second, reached(*device, users));
  };
  fake()->begin({});
  scenario();
  int failures = 0;
  const auto counts = fake()->counts();
  for (const char* function :
       {"cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess", "cuEventCreate", "cuEventRecord",
        "cuStreamWaitEvent", "cuStreamCreateWithPriority"})
    for (std::uint64_t n = 0; n < counts.calls.at(function); ++n, ++failures) {
      fake()->begin({});
      fake()->fail(function, n, 719);
      expect_error(ErrorCode::kIo, {function}, scenario);
      EXPECT_EQ(fake()->alive(), std::vector<std::string>{}) << function << " " << n;
      EXPECT_EQ(fake()->take_misuses(), std::vector<std::string>{}) << function << " " << n;
    }
  EXPECT_GT(failures, 15);
}

}  // namespace sluice::allocator::device_memory_test
