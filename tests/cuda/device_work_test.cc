#include "engine/memory/device_work.h"

#include <algorithm>

#include "allocator/device_memory.h"
#include "core/bytes.h"
#include "cuda/gpu.h"
#include "thrown.h"

// Who waits for whom in what an engine queues. On the fake each test runs in several orders.
namespace sluice::engine {
namespace device_work_test {

class DeviceWorkTest : public GpuTest, public testing::WithParamInterface<std::uint64_t> {
 protected:
  using Memory = DeviceWork::Memory;
  using Use = DeviceWork::Use;
  void SetUp() override {
    if (fake() != nullptr)
      fake()->begin({.schedule = GetParam() == 0 ? Schedule::kLate : Schedule::kRandom, .seed = GetParam()});
    device_ = open_device(0);
    work_.emplace(*device_);
    memory_.emplace(ledger_, *device_, allocator::Purpose::kParameter, 2 * kPart);
    host_.emplace(*device_, 4 * kPart);
    for (std::size_t i = 0; i < 4; ++i) work_->add({host(i), kPart}, kPart);
    work_->add({gpu(0), 2 * kPart}, kPart);
  }
  void TearDown() override {
    work_->finish();
    host_.reset();
    memory_.reset();
    work_.reset();
    device_.reset();
    GpuTest::TearDown();
  }
  std::byte* host(std::size_t part) { return host_->data() + part * kPart; }
  std::byte* gpu(std::size_t part) { return reinterpret_cast<std::byte*>(memory_->address() + part * kPart); }
  void fill(std::size_t part, int value) { std::fill_n(host(part), kPart, static_cast<std::byte>(value)); }
  bool is(std::size_t part, int value) {
    return std::all_of(host(part), host(part) + kPart,
                       [&](std::byte b) { return b == static_cast<std::byte>(value); });
  }
  static constexpr std::size_t kPart = kHugePage;
  allocator::Ledger ledger_;
  std::unique_ptr<Device> device_;
  std::optional<DeviceWork> work_;
  std::optional<allocator::DeviceRegion> memory_;
  std::optional<HostMemory> host_;
};

TEST_P(DeviceWorkTest, ReadersWaitForTheWriterAndWritersForAllReaders) {
  fill(0, 1), fill(1, 2);
  work_->copy_in(gpu(0), {host(0), kPart});   // written on one stream
  work_->copy_out(host(2), {gpu(0), kPart});  // read on another
  const Memory read{gpu(0), kPart}, written{gpu(1), kPart};
  work_->queue(work_->updates(), {&read, 1}, {&written, 1}, [&] {  // and on a third one
    device_->copy(work_->updates(), memory_->address() + kPart, memory_->address(), kPart);
  });
  work_->copy_in(gpu(0), {host(1), kPart});
  work_->copy_out(host(3), {gpu(1), kPart});
  work_->wait({host(2), 2 * kPart}, Use::kRead);
  EXPECT_TRUE(is(2, 1));
  EXPECT_TRUE(is(3, 1));
  work_->copy_out(host(2), {gpu(0), kPart});
  work_->wait({host(2), kPart}, Use::kRead);
  EXPECT_TRUE(is(2, 2));
}

TEST_P(DeviceWorkTest, TheCallerMayWriteWhenAllHaveRead) {
  fill(0, 1);
  work_->copy_in(gpu(0), {host(0), kPart});
  work_->wait({host(0), kPart}, Use::kWrite);
  fill(0, 7);
  work_->copy_out(host(1), {gpu(0), kPart});
  work_->wait({host(1), kPart}, Use::kRead);
  EXPECT_TRUE(is(1, 1));
}

// Who has the memory next waits for what was done with it, and for nothing that was queued later.
TEST_P(DeviceWorkTest, WhatIsGivenUpLeavesTheEndsOfItsLastUses) {
  const Memory memory{gpu(0), kPart};
  EXPECT_TRUE(work_->give_up(memory).empty());
  work_->copy_in(gpu(0), {host(0), kPart});
  work_->copy_out(host(1), {gpu(0), 16});  // a piece is used where any byte of it is
  work_->begin(work_->client(), memory, Use::kRead);
  work_->end(work_->client(), memory, Use::kRead);
  EXPECT_TRUE(work_->give_up({gpu(1), kPart}).empty());
  const std::vector<Device::SharedEvent> last = work_->give_up(memory);
  EXPECT_EQ(last.size(), 3u);
  EXPECT_TRUE(work_->is_done(memory, Use::kWrite));
  EXPECT_TRUE(work_->give_up(memory).empty());
  const Device::Event later = device_->make_event(false);
  device_->fill(work_->client(), memory_->address() + kPart, std::byte{1}, kPart);
  device_->record(later.get(), work_->client());
  for (const Device::SharedEvent& event : last) device_->synchronize(event.get());
  if (GetParam() == 0 && fake() != nullptr) {
    EXPECT_FALSE(device_->is_done(later.get()));
  }
  work_->copy_in(gpu(0), {host(0), kPart});
  EXPECT_EQ(work_->give_up(memory).size(), 1u);
}

// What is queued together ends with one event, and nobody waits for what it has waited for.
TEST_P(DeviceWorkTest, AUseCostsAsFewCallsAsItMay) {
  if (fake() == nullptr) GTEST_SKIP() << "only the fake counts calls";
  const auto calls = [&](const char* function) { return fake()->counts().calls[function]; };
  const Memory both{gpu(0), 2 * kPart}, kept{host(0), 2 * kPart};
  work_->copy_in(gpu(0), kept);
  const std::uint64_t records = calls("cuEventRecord"), waits = calls("cuStreamWaitEvent"),
                      made = calls("cuEventCreate");
  for (int times = 0; times < 5; ++times) work_->queue(work_->updates(), {&both, 1}, {}, [] {});
  EXPECT_EQ(calls("cuEventRecord"), records + 5);
  EXPECT_EQ(calls("cuStreamWaitEvent"), waits + 1);
  work_->copy_in(gpu(0), kept);  // it waits for the last of these alone
  EXPECT_EQ(calls("cuStreamWaitEvent"), waits + 2);
  EXPECT_LE(calls("cuEventCreate"), made + 2);  // places that nobody needs any more lend their events
}

TEST_P(DeviceWorkTest, AStreamAtTheAddressOfAnotherOneWaitsAgain) {
  CUstream_st* const own = work_->client();
  const Device::Stream others[] = {device_->make_stream(false), device_->make_stream(false)};
  fill(0, 1);
  const Memory memory{gpu(0), kPart};
  work_->copy_in(gpu(0), {host(0), kPart});
  for (const auto* stream : {&others[0], &others[1], &others[0]}) {
    work_->set_client(stream->get());
    work_->begin(stream->get(), memory, Use::kRead);
    device_->copy_out(stream->get(), host(1), memory_->address(), kPart);
    work_->end(stream->get(), memory, Use::kRead);
    device_->synchronize(stream->get());
    EXPECT_TRUE(is(1, 1));
  }
  work_->set_client(own);
}

TEST_P(DeviceWorkTest, WaitingForAllIsForEveryStream) {
  for (CUstream_st* const stream : {work_->in(), work_->out(), work_->updates(), work_->client()}) {
    const Device::Event event = device_->make_event(false);
    const Memory memory{gpu(0), kPart};
    work_->wait_for_all();
    device_->copy_in(stream, memory_->address(), host(0), kPart);
    device_->record(event.get(), stream);
    work_->wait_for_all();
    EXPECT_TRUE(device_->is_done(event.get()));
  }
}

TEST_P(DeviceWorkTest, MemoryThatItDoesNotKnowIsAnError) {
  const std::vector<std::byte> other(16);
  for (const Memory& memory : {Memory{other}, Memory{gpu(1), 2 * kPart}})
    expect_error(ErrorCode::kInternal, {"does not have"},
                 [&] { work_->begin(work_->in(), memory, Use::kRead); });
}

INSTANTIATE_TEST_SUITE_P(Orders, DeviceWorkTest, testing::Range<std::uint64_t>(0, 6));

}  // namespace device_work_test
}  // namespace sluice::engine
