#include "cuda/kernel_test.h"
#include "kernels/device_sum.h"
#include "thrown.h"

// Streams, events, and the order of what is queued. On the fake each test runs in every schedule.
namespace sluice::work_test {

struct Order {
  fake_cuda::Schedule schedule;
  std::uint64_t seed;
};

class WorkTest : public GpuTest, public testing::WithParamInterface<Order> {
 protected:
  void SetUp() override {
    if (fake() != nullptr) fake()->begin({.schedule = GetParam().schedule, .seed = GetParam().seed});
    if (fake() == nullptr && GetParam().seed > 0) GTEST_SKIP() << "a real GPU has no seed";
    device_ = open_device(0);
  }
  void TearDown() override {
    device_.reset();
    GpuTest::TearDown();
  }
  std::unique_ptr<Device> device_;
};

TEST_P(WorkTest, AStreamWaitsForAnEventOfAnother) {
  constexpr std::size_t kBytes = 1 << 20;
  HostMemory from(*device_, kBytes), to(*device_, kBytes);
  MappedMemory memory(*device_, 1);
  const auto in = device_->make_stream(false), out = device_->make_stream(true);
  const auto written = device_->make_event(), read = device_->make_event();
  for (int turn = 1; turn <= 5; ++turn) {
    std::fill_n(from.data(), kBytes, static_cast<std::byte>(turn));
    device_->wait(in.get(), read.get());  // in the first turn it was never recorded, and holds up nothing
    device_->copy_in(in.get(), memory.address(), from.data(), kBytes);
    device_->record(written.get(), in.get());
    device_->wait(out.get(), written.get());
    device_->copy_out(out.get(), to.data(), memory.address(), kBytes);
    device_->record(read.get(), out.get());
    device_->synchronize(read.get());
    ASSERT_EQ(to.values(), std::vector<std::byte>(kBytes, static_cast<std::byte>(turn)));
  }
}

TEST_P(WorkTest, AnEventMeansThePlaceWhereItWasRecordedLast) {
  HostMemory from(*device_, 1), to(*device_, 1);
  MappedMemory memory(*device_, 1);
  const auto in = device_->make_stream(false), out = device_->make_stream(false);
  const auto event = device_->make_event();
  from[0] = std::byte{1};
  device_->record(event.get(), in.get());
  device_->copy_in(in.get(), memory.address(), from.data(), 1);
  device_->record(event.get(), in.get());
  device_->wait(out.get(), event.get());
  device_->copy_out(out.get(), to.data(), memory.address(), 1);
  device_->synchronize(out.get());
  EXPECT_EQ(to[0], std::byte{1});
}

// A wait is for the place that the event had then, also where it is recorded elsewhere before that is
// reached: the second place comes after the wait, and so waiting for it would never end.
TEST_P(WorkTest, AWaitIsForThePlaceThatTheEventHadThen) {
  HostMemory from(*device_, 2), to(*device_, 1);
  MappedMemory memory(*device_, 1);
  const auto first = device_->make_stream(false), second = device_->make_stream(false);
  const auto event = device_->make_event();
  from[0] = std::byte{1}, from[1] = std::byte{2};
  device_->copy_in(first.get(), memory.address(), from.data(), 1);
  device_->record(event.get(), first.get());
  device_->wait(second.get(), event.get());
  device_->copy_in(second.get(), memory.address(), from.data() + 1, 1);
  device_->record(event.get(), second.get());
  device_->wait(first.get(), event.get());
  device_->copy_out(first.get(), to.data(), memory.address(), 1);
  device_->synchronize(first.get());
  EXPECT_EQ(to[0], std::byte{2});
}

TEST_P(WorkTest, QueuedWorkOutlivesItsStreamAndItsEvent) {
  HostMemory from(*device_, 1), to(*device_, 1);
  MappedMemory memory(*device_, 1);
  const auto out = device_->make_stream(false);
  from[0] = std::byte{7};
  {
    const auto in = device_->make_stream(false);
    const auto event = device_->make_event();
    device_->copy_in(in.get(), memory.address(), from.data(), 1);
    device_->record(event.get(), in.get());
    device_->wait(out.get(), event.get());
  }
  device_->copy_out(out.get(), to.data(), memory.address(), 1);
  device_->synchronize(out.get());
  EXPECT_EQ(to[0], std::byte{7});
}

TEST_P(WorkTest, AQuestionIsAnsweredWithYesInTheEnd) {
  MappedMemory memory(*device_, 1);
  const auto stream = device_->make_stream(false);
  const auto event = device_->make_event();
  EXPECT_TRUE(device_->is_done(event.get()));
  device_->fill(stream.get(), memory.address(), std::byte{0}, memory.bytes());
  device_->record(event.get(), stream.get());
  while (!device_->is_done(event.get())) std::this_thread::yield();
}

TEST_P(WorkTest, FunctionsOfTheHostRunInOrder) {
  HostMemory from(*device_, 1), to(*device_, 1);
  MappedMemory memory(*device_, 1);
  const auto stream = device_->make_stream(false);
  std::atomic<int> calls{0};
  from[0] = std::byte{4};
  device_->call(
      stream.get(), [](void* of) { *static_cast<std::atomic<int>*>(of) += 1; }, &calls);
  device_->copy_in(stream.get(), memory.address(), from.data(), 1);
  device_->copy_out(stream.get(), to.data(), memory.address(), 1);
  struct Seen {
    std::atomic<int>& calls;
    HostMemory& to;
    int value = 0;
  } seen{calls, to};
  device_->call(
      stream.get(),
      [](void* argument) {
        auto& s = *static_cast<Seen*>(argument);
        s.value = 10 * s.calls + static_cast<int>(s.to[0]);
      },
      &seen);
  device_->synchronize(stream.get());
  EXPECT_EQ(seen.value, 14);
}

TEST_P(WorkTest, TimedEventsHaveATimeBetweenThem) {
  MappedMemory memory(*device_, 4);
  const auto stream = device_->make_stream(false);
  const auto first = device_->make_event(true), second = device_->make_event(true);
  device_->record(first.get(), stream.get());
  device_->fill(stream.get(), memory.address(), std::byte{1}, memory.bytes());
  device_->record(second.get(), stream.get());
  device_->synchronize(second.get());
  EXPECT_GT(device_->seconds_between(first.get(), second.get()), 0);
}

// A defect of a program must show on the fake: where a wait is left out, some schedule gives other bytes.
TEST_F(GpuTest, AWaitThatIsLeftOutShows) {
  SLUICE_NEEDS_THE_FAKE();
  const auto reads_what_was_written = [&](Order order) {
    fake()->begin({.schedule = order.schedule, .seed = order.seed});
    const auto device = open_device(0);
    HostMemory from(*device, 1), to(*device, 1);
    MappedMemory memory(*device, 1);
    const auto in = device->make_stream(false), out = device->make_stream(false);
    from[0] = std::byte{1};
    device->copy_in(in.get(), memory.address(), from.data(), 1);
    device->copy_out(out.get(), to.data(), memory.address(), 1);
    device->synchronize(out.get());
    device->synchronize(in.get());
    return to[0] == std::byte{1};
  };
  EXPECT_FALSE(reads_what_was_written({Schedule::kLate, 0}));
  int wrong = 0;
  for (std::uint64_t seed = 0; seed < 20; ++seed)
    wrong += reads_what_was_written({Schedule::kRandom, seed}) ? 0 : 1;
  EXPECT_GE(wrong, 3);
  EXPECT_LE(wrong, 17);
}

TEST_F(GpuTest, MemoryThatQueuedWorkUsesCannotGo) {
  SLUICE_NEEDS_THE_FAKE();
  fake()->begin({.schedule = Schedule::kLate});
  const auto device = open_device(0);
  HostMemory host(*device, 4096);
  MappedMemory memory(*device, 1);
  const auto stream = device->make_stream(false);
  device->copy_in(stream.get(), memory.address(), host.data(), host.size());
  expect_error(ErrorCode::kIo, {"cuMemUnmap"}, [&] { device->unmap(memory.address(), memory.bytes()); });
  expect_error(ErrorCode::kIo, {"cuMemHostUnregister"}, [&] { device->unregister_host(host.data()); });
  EXPECT_EQ(fake()->take_misuses().size(), 2U);
  device->synchronize(stream.get());
}

// A kernel uses what its arguments point at, and nothing of others, as of another engine of the process.
TEST_F(KernelTest, MemoryThatAQueuedKernelUsesCannotGo) {
  SLUICE_NEEDS_THE_FAKE();
  device_.reset();
  fake()->begin({.schedule = Schedule::kLate});
  device_ = open_device(0);
  const auto other = std::make_unique<MappedMemory>(*device_, 1);
  MappedMemory from(*device_, 2), to(*device_, 1);
  const auto stream = device_->make_stream(false);
  kernels::DeviceSum sum(*device_);
  sum.copy(stream.get(), 8, {reinterpret_cast<const float*>(from.address() + from.bytes() / 2), Dtype::kF32},
           2, {reinterpret_cast<float*>(to.address() + 64), Dtype::kF32});
  for (const MappedMemory* used : {&from, &to})
    expect_error(ErrorCode::kIo, {"cuMemUnmap"},
                 [&] { device_->unmap(used->address(), device_->info().extent_bytes); });
  EXPECT_EQ(fake()->take_misuses().size(), 2U);
  device_->unmap(other->address(), other->bytes());
  device_->map(other->address(), other->bytes(), other->extent(0));
  device_->synchronize(stream.get());
}

TEST_F(GpuTest, AFunctionOfTheHostMustNotCallCuda) {
  SLUICE_NEEDS_THE_FAKE();
  const auto device = open_device(0);
  const auto stream = device->make_stream(false);
  struct Call {
    Device& device;
    std::string error;
  } call{*device, {}};
  // The fake's calls are one at a time, so that this one is refused only if it does not wait for the lock.
  device->call(
      stream.get(),
      [](void* argument) {
        auto& c = *static_cast<Call*>(argument);
        try {
          (void)c.device.free_memory();
        } catch (const Error& error) {
          c.error = error.what();
        }
      },
      &call);
  device->synchronize(stream.get());
  EXPECT_NE(call.error, "");
  EXPECT_EQ(fake()->take_misuses().size(), 1U);
}

TEST_F(GpuTest, EachCallThatFailsIsReportedAndLeavesNothing) {
  SLUICE_NEEDS_THE_FAKE();
  const auto scenario = [] {
    const auto device = open_device(0);
    HostMemory host(*device, 4096);
    MappedMemory memory(*device, 2);
    const auto stream = device->make_stream(true);
    const auto event = device->make_event(true), later = device->make_event(true);
    device->copy_in(stream.get(), memory.address(), host.data(), 4096);
    device->record(event.get(), stream.get());
    device->wait(stream.get(), event.get());
    device->copy(stream.get(), memory.address() + 4096, memory.address(), 4096);
    device->fill(stream.get(), memory.address(), std::byte{0}, 4096);
    device->copy_out(stream.get(), host.data(), memory.address(), 4096);
    device->call(
        stream.get(), [](void*) {}, nullptr);
    device->record(later.get(), stream.get());
    while (!device->is_done(event.get())) std::this_thread::yield();
    device->synchronize(event.get());
    device->synchronize(stream.get());
    (void)device->seconds_between(event.get(), later.get());
    (void)device->is_capturing(stream.get());
    (void)device->free_memory();
  };
  fake()->begin({});
  scenario();
  // Calls that end something are left out: where such a call fails, the thing is not ended.
  const auto ends = [](const std::string& name) {
    for (const char* word : {"Unmap", "Release", "Free", "Destroy", "Unregister", "Pop"})
      if (name.find(word) != std::string::npos) return true;
    return false;
  };
  int failures = 0;
  for (const auto& [function, calls] : fake()->counts().calls)
    for (std::uint64_t n = 0; n < calls && !ends(function); ++n) {
      fake()->begin({});
      fake()->fail(function, n, 719);
      // The driver's contexts are pushed and found by every call, also by those that end something, and modes
      // exchanged.
      if (function == "cuCtxGetCurrent" || function == "cuCtxPushCurrent" ||
          function == "cuThreadExchangeStreamCaptureMode")
        continue;
      expect_error(ErrorCode::kIo, {function}, scenario);
      EXPECT_EQ(fake()->alive(), std::vector<std::string>{}) << function << " " << n;
      ++failures;
    }
  EXPECT_GT(failures, 30);
}

std::string order_name(const testing::TestParamInfo<Order>& info) {
  const char* const names[] = {"Early", "Late", "Random"};
  return names[static_cast<int>(info.param.schedule)] + std::to_string(info.param.seed);
}
INSTANTIATE_TEST_SUITE_P(Orders, WorkTest,
                         testing::Values(Order{fake_cuda::Schedule::kEarly, 0},
                                         Order{fake_cuda::Schedule::kLate, 1},
                                         Order{fake_cuda::Schedule::kRandom, 1},
                                         Order{fake_cuda::Schedule::kRandom, 2},
                                         Order{fake_cuda::Schedule::kRandom, 3}),
                         order_name);

}  // namespace sluice::work_test
