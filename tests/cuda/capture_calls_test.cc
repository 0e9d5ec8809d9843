#include "cuda/capture.h"
#include "cuda/engine_fixture.h"
#include "thrown.h"

// Each public call of an engine while its client captures the stream on which it computes: refused, or
// harmless. In both cases the capture goes on, and has nothing of the engine's.
namespace sluice::engine::twins {
namespace capture_calls_test {

constexpr const char* kHarmless = nullptr;
constexpr const char* kCaptured = "captured into a graph";

// A step of a client that calls everything while it captures, or never captures, and then makes the calls
// that would have been refused.
class CallsTest : public DeviceEngineTest {
 protected:
  struct Caller {
    OnGpu& gpu;
    CUstream_st* captured;  // null: it never captures

    // refusal: what it says; kHarmless: the call does what it does without a capture.
    void call(const char* refusal, const std::string& what, const std::function<void()>& body) const {
      if (captured == nullptr) {
        if (refusal == kHarmless) body();
        return;
      }
      SCOPED_TRACE(what);
      Capture capture(captured);
      if (refusal == kHarmless)
        body();
      else
        expect_error(ErrorCode::kState, {what, refusal}, body);
      EXPECT_EQ(capture.end(), std::optional<std::size_t>(0));
    }
    void harmless(const std::string& what, const std::function<void()>& body) const {
      call(kHarmless, what, body);
    }
    void refused(const std::string& what, const std::function<void()>& body) const {
      call(kCaptured, what, body);
    }
  };

  static void call_outside_of_a_step(const Caller& client) {
    AnyOrderEngine& engine = client.gpu.engine;
    const std::string first = "unit '" + engine.layout().units()[0].name + "' is ";
    UnitSource source;
    source.values = [](ParameterId, std::size_t, std::span<float> out) { std::ranges::fill(out, 9.0f); };
    client.refused(first + "loaded", [&] { engine.load(0, source); });
    client.refused(first + "loaded", [&] { engine.load_all(source); });
    client.refused(first + "saved", [&] { engine.save(0, {}); });
    const auto all = [](ElementRange) { return true; };
    client.refused(first + "saved", [&] { engine.save_own(0, {}, {all, all}); });
    client.refused("progress() is called", [&] { engine.progress(); });
    client.refused("serve_ranks() is called", [&] { engine.serve_ranks(); });
    client.refused("settle() is called", [&] { engine.settle(); });
    client.refused(first + "acquired", [&] { engine.acquire(0, Hold::kRead); });
    client.refused(first + "touched", [&] { engine.touch(0, false); });
    client.harmless("release_touched", [&] { engine.release_touched(); });  // none is
    client.refused("another stream is named", [&] { engine.use_stream(default_stream()); });
    client.harmless("set_steps", [&] { engine.set_steps(4); });
    client.harmless("set_steps", [&] { engine.set_steps(ParameterId{1}, 5); });
    // Refused on a GPU in any case.
    client.call("keeps its plan", "an engine", [&] { engine.replan(client.gpu.made.plan); });
    client.call("cannot leave", "parameters",
                [&] { engine.leave(true, [](UnitId, allocator::FormerHome) {}); });
    client.harmless("growth_of_leaving", [&] { (void)engine.growth_of_leaving(); });
    ask(client);
  }

  static void ask(const Caller& client) {
    AnyOrderEngine& engine = client.gpu.engine;
    client.harmless("questions", [&] {
      (void)engine.in_step();
      (void)engine.steps();
      (void)engine.steps(ParameterId{0});
      (void)engine.failure();
      (void)engine.counters();
      (void)engine.partition(0);
      (void)engine.holds(0);
      (void)engine.held_units();
      (void)engine.has_gradient(0);
      (void)engine.left();
      const ConstArray home = engine.parameter(0);
      EXPECT_EQ(engine.unit_at(static_cast<const std::byte*>(home.data)), std::optional<UnitId>(0));
    });
  }

  static void call_in_a_step(const Caller& client, const StepSettings& settings) {
    AnyOrderEngine& engine = client.gpu.engine;
    const bool clips = client.gpu.made.plan.clip;
    client.harmless("begin_step", [&] { engine.begin_step(clips ? StepSettings{} : settings); });
    for (UnitId unit = 0; unit + 1 < engine.layout().units().size(); ++unit) {
      const std::string name = "unit '" + engine.layout().units()[unit].name + "' is ";
      const ParameterId p = engine.layout().first_parameter(unit);
      client.refused(name + "acquired", [&] { engine.acquire(unit, Hold::kGradient); });
      engine.acquire(unit, Hold::kGradient);
      const ConstArray gradient = engine.parameter(p);
      client.harmless("drop_gradient", [&] { engine.drop_gradient(p); });  // there is none
      client.refused(name + "given a gradient", [&] { engine.add_gradient(p, gradient); });
      engine.add_gradient(p, gradient);
      ask(client);
      client.harmless("multiply_gradient", [&] { engine.multiply_gradient(p, 0.5); });
      client.refused(name + "asked to drop a gradient", [&] { engine.drop_gradient(p); });
      client.refused(name + "released", [&] { engine.release(unit); });
      engine.release(unit);
      if (!clips) {
        client.refused("it is asked which", [&] { engine.set_steps(p, engine.steps(p)); });
        continue;
      }
      client.refused(name + "asked for a gradient", [&] { engine.read_gradient(p, {nullptr, Dtype::kF32}); });
      client.refused(name + "asked for a norm", [&] { (void)engine.gradient_norm(p); });
    }
    // Where ranks train together these sum gradients; ranks and GPUs do not go together yet.
    client.call("without a number of micro-batches", "gradients end", [&] { engine.end_gradients(0); });
    client.call("without a number of micro-batches", "a micro-batch ends", [&] { engine.end_micro_batch(); });
    client.refused("abandon_step() is called", [&] { engine.abandon_step(); });
    client.refused("step() is called", [&] { engine.step(settings); });
    engine.step(settings);
  }

  // What the client computes on, and what it captures: that very stream, or a blocking one, beside which the
  // default one can do nothing.
  enum class Captured { kNone, kOwn, kBlocking };
  // What the engine has when all was called.
  Outcome called(const Case& setup, Captured captured) {
    const BlockingStream blocking;
    OnGpu gpu(setup, *device_);
    gpu.client.load();
    if (captured == Captured::kBlocking) gpu.engine.use_stream(default_stream());
    const Caller client{gpu, captured == Captured::kNone  ? nullptr
                             : captured == Captured::kOwn ? gpu.stream.get()
                                                          : blocking.get()};
    StepSettings settings;
    settings.groups = {{0.1, 0.1}, {0.02, 0}};
    for (int step = 0; step < 2; ++step) {
      call_in_a_step(client, settings);
      call_outside_of_a_step(client);
    }
    return gpu.client.save();
  }
};

TEST_F(CallsTest, EachIsRefusedOrHarmlessWhileTheClientCaptures) {
  Case setup;
  setup.device = 128 * kMiB;
  for (const auto by : {kDevice, kHost})
    for (const auto place : {kDevice, kHost, kDisk}) {
      setup.clip = (by == kHost) == (place == kHost);
      SCOPED_TRACE(fmt::format("{} {} {}", name_of(by), name_of(place), setup.clip));
      setup.updates = by;
      setup.places = {place, place, by == kHost && place == kDevice ? kHost : place};
      if (fake() != nullptr) begin(Schedule::kLate, 0);
      const Outcome expected = called(setup, Captured::kNone);
      EXPECT_TRUE(called(setup, Captured::kOwn) == expected);
      EXPECT_TRUE(called(setup, Captured::kBlocking) == expected);
    }
}

// Clients capture on a stream of their own, which they name first.
TEST_F(CallsTest, AStreamThatIsCapturedCannotBeNamed) {
  Case setup;
  setup.device = 128 * kMiB;
  OnGpu gpu(setup, *device_);
  const Device::Stream captured = device_->make_stream(false);
  Capture capture(captured.get());
  expect_error(ErrorCode::kState, {"another stream is named", kCaptured},
               [&] { gpu.engine.use_stream(captured.get()); });
  EXPECT_EQ(capture.end(), std::optional<std::size_t>(0));
}

// An engine may end at any time, as when a garbage collector finds it. What the client has queued with it
// before is waited for, and the capture goes on.
TEST_F(CallsTest, AnEngineMayEndWhileTheClientCaptures) {
  Case setup;
  setup.device = 128 * kMiB;
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

}  // namespace capture_calls_test
}  // namespace sluice::engine::twins
