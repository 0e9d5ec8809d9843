#include "cuda/capture.h"

#include "cuda/kernel_test.h"
#include "thrown.h"

// A client's capture goes on whatever is called of a Device meanwhile, on its thread or on others.
namespace sluice::capture_test {

class CaptureTest : public KernelTest, public testing::WithParamInterface<CUstreamCaptureMode> {
 protected:
  // Everything that Device does, on streams that are not captured.
  static void do_all(Device& device) {
    const auto another = open_device(0);
    (void)device_count();
    (void)device.measure_context();
    (void)device.free_memory();
    HostMemory host(device, 4096);
    MappedMemory memory(device, 2);
    const Device::Extent shared = device.create_shared_extent(memory.bytes());
    device.release_extent(device.import_extent(device.export_extent(shared)));
    device.release_extent(shared);
    const auto stream = device.make_stream(true);
    const auto event = device.make_event(true), later = device.make_event(true);
    device.copy_in(stream.get(), memory.address(), host.data(), 4096);
    device.record(event.get(), stream.get());
    device.wait(stream.get(), event.get());
    device.copy(stream.get(), memory.address() + 4096, memory.address(), 4096);
    device.fill(stream.get(), memory.address(), std::byte{0}, 4096);
    device.copy_out(stream.get(), host.data(), memory.address(), 4096);
    device.call(
        stream.get(), [](void*) {}, nullptr);
    device.record(later.get(), stream.get());
    (void)another->kernel("sluice_finite_check");
    while (!device.is_done(event.get())) std::this_thread::yield();
    device.synchronize(later.get());
    device.synchronize(stream.get());
    (void)device.seconds_between(event.get(), later.get());
  }
  static void on_another_thread(const std::function<void()>& work) { std::thread(work).join(); }
};

TEST_P(CaptureTest, ItGoesOnWhateverOtherThreadsCall) {
  const auto stream = device_->make_stream(false);
  Capture capture(stream.get(), GetParam());
  on_another_thread([&] { at_the_end([&] { do_all(*device_); }); });
  EXPECT_TRUE(device_->is_capturing(stream.get()));
  EXPECT_EQ(capture.end(), std::optional<std::size_t>(0));
  EXPECT_FALSE(device_->is_capturing(stream.get()));
}

TEST_P(CaptureTest, ItGoesOnWhateverItsOwnThreadCalls) {
  const auto stream = device_->make_stream(false);
  Capture capture(stream.get(), GetParam());
  do_all(*device_);
  EXPECT_EQ(capture.end(), std::optional<std::size_t>(0));
}

// A caller may rely on its mode, as on its context.
TEST_P(CaptureTest, AThreadHasItsModeAfterEachCall) {
  const CUstreamCaptureMode before = exchange_capture_mode(GetParam());
  do_all(*device_);
  EXPECT_EQ(exchange_capture_mode(before), GetParam());
}

// The rule that makes all this needed: who asks whether an event is done, in the mode that every thread has
// at first, ends captures of other threads that are global.
TEST_P(CaptureTest, AnUnsafeCallInTheDefaultModeEndsGlobalCapturesOfOthers) {
  const auto stream = device_->make_stream(false);
  const auto event = device_->make_event(false);
  for (const auto own :
       {CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, CU_STREAM_CAPTURE_MODE_RELAXED}) {
    const bool is_ended = own == CU_STREAM_CAPTURE_MODE_GLOBAL && GetParam() == own;
    Capture capture(stream.get(), GetParam());
    on_another_thread([&] {
      const ClientContext context;
      exchange_capture_mode(own);
      const CUresult result = SLUICE_OF_DRIVER(cuEventQuery)(event.get());
      EXPECT_EQ(result, is_ended ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS);
    });
    EXPECT_EQ(capture.end().has_value(), !is_ended);
    if (fake() != nullptr) {
      EXPECT_EQ(fake()->take_misuses().size(), is_ended ? 1U : 0U);
    }
  }
}

// The same of its own thread, whose mode is of no matter unless it is relaxed.
TEST_P(CaptureTest, AnUnsafeCallOfItsOwnThreadEndsItUnlessOneIsRelaxed) {
  const auto stream = device_->make_stream(false);
  const auto event = device_->make_event(false);
  for (const auto own :
       {CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, CU_STREAM_CAPTURE_MODE_RELAXED}) {
    const bool is_ended =
        own != CU_STREAM_CAPTURE_MODE_RELAXED && GetParam() != CU_STREAM_CAPTURE_MODE_RELAXED;
    Capture capture(stream.get(), GetParam());
    const CUstreamCaptureMode before = exchange_capture_mode(own);
    (void)SLUICE_OF_DRIVER(cuEventQuery)(event.get());
    exchange_capture_mode(before);
    EXPECT_EQ(capture.end().has_value(), !is_ended);
    if (fake() != nullptr) (void)fake()->take_misuses();
  }
}

// CUDA then refuses even to say whether the default stream is.
TEST_P(CaptureTest, TheDefaultStreamIsCapturedWhileABlockingOneIs) {
  const BlockingStream blocking;
  const auto other = device_->make_stream(false);
  {
    Capture capture(other.get(), GetParam());
    EXPECT_FALSE(device_->is_capturing(default_stream()));
  }
  Capture capture(blocking.get(), GetParam());
  const auto look = [&] {
    EXPECT_TRUE(device_->is_capturing(default_stream()));
    EXPECT_TRUE(device_->is_capturing(blocking.get()));
    EXPECT_FALSE(device_->is_capturing(other.get()));
  };
  look();
  on_another_thread([&] { at_the_end(look); });
  EXPECT_EQ(capture.end(), std::optional<std::size_t>(0));
  EXPECT_FALSE(device_->is_capturing(default_stream()));
}

TEST_P(CaptureTest, WhoUsesTheDefaultStreamEndsTheCaptureOfABlockingOne) {
  const BlockingStream blocking;
  MappedMemory memory(*device_, 1);
  Capture capture(blocking.get(), GetParam());
  on_another_thread([&] {
    expect_error(ErrorCode::kIo, {"cuMemsetD8Async"},
                 [&] { device_->fill(default_stream(), memory.address(), std::byte{0}, 4096); });
  });
  EXPECT_EQ(capture.end(), std::nullopt);
  if (fake() != nullptr) {
    EXPECT_EQ(fake()->take_misuses().size(), 1U);
  }
}

// A mutant: a Device that leaves the mode of its threads as it is. Each kind of call that may be
// unsafe is found by itself.
TEST_F(GpuTest, AModeThatIsNotRelaxedIsFound) {
  SLUICE_NEEDS_THE_FAKE();
  const auto device = open_device(0);
  const auto stream = device->make_stream(false), other = device->make_stream(false);
  const auto event = device->make_event(true);
  MappedMemory memory(*device, 1);
  HostMemory host(*device, 4096);
  const Device::Extent shared = device->create_shared_extent(memory.bytes());
  const Descriptor exported = device->export_extent(shared);
  device->record(event.get(), other.get());
  device->synchronize(event.get());
  const std::vector<std::function<void()>> calls = {
      [&] { (void)device->is_done(event.get()); },
      [&] { device->synchronize(event.get()); },
      [&] { device->synchronize(other.get()); },
      [&] { (void)device->free_memory(); },
      [&] { (void)device->make_event(false); },
      [&] { (void)device->make_stream(false); },
      [&] { (void)device->create_extent(memory.bytes()); },
      [&] { (void)device->reserve_addresses(memory.bytes()); },
      [&] { device->unmap(memory.address(), memory.bytes()); },
      [&] { (void)device->create_shared_extent(memory.bytes()); },
      [&] { (void)device->export_extent(shared); },
      [&] { (void)device->import_extent(exported); },
      [&] { device->unregister_host(host.data()); },
      [&] { (void)device->kernel("sluice_finite_check"); },
      [&] { (void)device->measure_context(); },
      [&] { (void)open_device(0); },
  };
  for (std::size_t i = 0; i < calls.size(); ++i) {
    fake()->leave_out({"cuThreadExchangeStreamCaptureMode"});
    Capture capture(stream.get());
    std::thread([&] { expect_error(ErrorCode::kIo, {"GPU 0"}, calls[i]); }).join();
    EXPECT_EQ(capture.end(), std::nullopt) << i;
    EXPECT_GE(fake()->take_misuses().size(), 1U) << i;
    fake()->leave_out({});
  }
  device->release_extent(shared);
}

TEST_P(CaptureTest, AThreadHasItsModeAgainWhereThatFailsOnce) {
  SLUICE_NEEDS_THE_FAKE();
  const CUstreamCaptureMode before = exchange_capture_mode(GetParam());
  fake()->fail("cuThreadExchangeStreamCaptureMode", 1, CUDA_ERROR_LAUNCH_FAILED);
  (void)device_->free_memory();
  EXPECT_EQ(exchange_capture_mode(GetParam()), GetParam());
  exchange_capture_mode(before);
}

std::string mode_name(const testing::TestParamInfo<CUstreamCaptureMode>& info) {
  const char* const names[] = {"Global", "ThreadLocal", "Relaxed"};
  return names[info.param];
}
INSTANTIATE_TEST_SUITE_P(Modes, CaptureTest,
                         testing::Values(CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
                                         CU_STREAM_CAPTURE_MODE_RELAXED),
                         mode_name);

}  // namespace sluice::capture_test
