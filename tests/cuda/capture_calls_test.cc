#include "cuda/capture.h"
#include "cuda/engine_fixture.h"
#include "thrown.h"

// An engine while its client captures a stream. tests/bindings/c/device_calls_test.cc makes each of its
// calls.
namespace sluice::engine::twins::capture_calls_test {

using CallsTest = DeviceEngineTest;

// Clients capture on a stream of their own, which they name first.
TEST_F(CallsTest, AStreamThatIsCapturedCannotBeNamed) {
  Case setup;
  OnGpu gpu(setup, *device_);
  const Device::Stream captured = device_->make_stream(false);
  Capture capture(captured.get());
  expect_error(ErrorCode::kState, {"another stream is named", "captured into a graph"},
               [&] { gpu.engine.use_stream(captured.get()); });
  EXPECT_EQ(capture.end(), std::optional<std::size_t>(0));
}

// An engine may end at any time, as when a garbage collector finds it. What the client has queued with it
// before is waited for, and the capture goes on.
TEST_F(CallsTest, AnEngineMayEndWhileTheClientCaptures) {
  Case setup;
  const auto ends = [&](allocator::Tier place, bool switches, bool is_default) {
    SCOPED_TRACE(fmt::format("{} {} {}", name_of(place), switches, is_default));
    setup.places = {place, place, place};
    if (fake() != nullptr) begin(Schedule::kLate, 0);
    const BlockingStream blocking;
    const Device::Stream own = device_->make_stream(false), other = device_->make_stream(false);
    CUstream_st* const stream = is_default ? default_stream() : own.get();
    CUstream_st* const used = switches ? other.get() : stream;
    std::optional<Capture> capture;
    {
      OnGpu gpu(setup, *device_);
      gpu.client.load();
      gpu.engine.use_stream(used);
      HostMemory seen(*device_, 4096);
      for (UnitId unit = 0; unit < gpu.engine.layout().units().size(); ++unit) {
        gpu.engine.acquire(unit, Hold::kRead);
        const void* const values = gpu.engine.parameter(gpu.engine.layout().first_parameter(unit)).data;
        device_->copy_out(used, seen.data(), reinterpret_cast<DeviceAddress>(values), 16);
        gpu.engine.release(unit);
      }
      gpu.engine.use_stream(stream);
      capture.emplace(is_default ? blocking.get() : stream);
      gpu.made.engine.reset();
    }
    EXPECT_EQ(capture->end(), std::optional<std::size_t>(0));
  };
  for (const bool is_default : {false, true}) {
    for (const auto place : {kDevice, kHost, kDisk}) ends(place, false, is_default);
    ends(kDevice, true, is_default);
  }
}

}  // namespace sluice::engine::twins::capture_calls_test
