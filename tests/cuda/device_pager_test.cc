#include "cuda/gpu.h"
#include "engine/memory/host_records.h"
#include "engine/memory/pager.h"

// A pager whose frames are a GPU's.
namespace sluice::engine::device_pager_test {

class DevicePagerTest : public GpuTest {
 protected:
  using Use = DeviceWork::Use;
  static constexpr std::size_t kBytes = kHugePage;
  void SetUp() override {
    if (fake() != nullptr) fake()->begin({.schedule = Schedule::kLate});
    device_ = open_device(0);
    gpu_.emplace(*device_);
    records_.emplace(ledger_, *gpu_);
    backings_ = make_backings(nullptr, nullptr, &*records_);
    pager_.emplace(ledger_, *backings_, waits_, &*gpu_);
  }
  void TearDown() override {
    gpu_->finish();
    pager_.reset();
    backings_.reset();
    records_.reset();
    gpu_.reset();
    device_.reset();
    GpuTest::TearDown();
  }
  HoldingId define(const char* name) {
    HoldingSpec spec{.name = name, .bytes = kBytes, .tier = allocator::Tier::kHost};
    return pager_->define(spec);
  }
  void start(std::size_t extents) {
    backings_->allocate();
    pager_->start(kHugePage, extents);
  }
  // Queues work of a client that holds the unit.
  void fill(HoldingId holding, int value) {
    std::byte* const data = pager_->acquire(holding, Pager::Use::kModify);
    const DeviceWork::Memory memory{data, kBytes};
    gpu_->queue(gpu_->client(), {}, {&memory, 1}, [&] {
      device_->fill(gpu_->client(), reinterpret_cast<DeviceAddress>(data), static_cast<std::byte>(value),
                    kBytes);
    });
    pager_->written(holding, kBytes);
    pager_->release(holding);
  }
  std::byte* record_of(HoldingId holding) { return pager_->backing(holding).for_cpu().data; }
  bool is(const std::byte* memory, int value) {
    gpu_->wait({memory, kBytes}, Use::kRead);
    return std::all_of(memory, memory + kBytes,
                       [&](std::byte b) { return b == static_cast<std::byte>(value); });
  }

  allocator::Ledger ledger_;
  std::unique_ptr<Device> device_;
  std::optional<DeviceWork> gpu_;
  std::optional<HostRecords> records_;
  std::unique_ptr<Backings> backings_;
  Waits waits_{nullptr};
  std::optional<Pager> pager_;
};

// The second has no contents that come in, and so only its frames to wait for: the first leaves them late.
TEST_F(DevicePagerTest, WhoGetsFramesWithoutContentsWaitsForThoseWhoHadThem) {
  const HoldingId first = define("first"), second = define("second");
  start(1);
  fill(first, 1);
  fill(second, 2);  // takes the only frame, of which the first is still to be copied
  device_->synchronize(gpu_->client());
  EXPECT_TRUE(is(record_of(first), 1));
  pager_->acquire(first, Pager::Use::kRead);
  pager_->release(first);
  EXPECT_TRUE(is(record_of(second), 2));
}

}  // namespace sluice::engine::device_pager_test
