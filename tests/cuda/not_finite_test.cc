#include "cuda/engine_fixture.h"
#include "thrown.h"

// Gradients that are not finite, where updates follow them on a GPU.
namespace sluice::engine::twins::not_finite_test {

// Where updates follow gradients, nobody waits to learn whether these are finite: who updates leaves out the
// unit whose gradient is not, and the caller learns of it at the step. Without a GPU it is refused at once;
// what is left is the same.
TEST_F(DeviceEngineTest, AGradientThatIsNotFiniteChangesNothingOfItsUnit) {
  struct Spoiled {
    ParameterId parameter;
    std::optional<allocator::Tier> updates;
    std::array<std::optional<allocator::Tier>, kParts> places;
    const char* optimizer = "adamw";
    bool abandons = false;
  };
  const std::vector<Spoiled> all = {
      {0, kDevice, {kHost, kHost, kHost}},
      {4, kDevice, {kHost, kHost, kHost}, "adamw", true},
      {0, kHost, {kHost, kHost, kHost}},
      {4, kHost, {kDisk, kHost, kDisk}},  // parameters are only written, from a slot
      {4, kHost, {kDevice, kHost, kDisk}, "adamw", true},
      {4, std::nullopt, {kHost, kHost, kDisk}, "adafactor"},
      {4, std::nullopt, {kDisk, kHost, kHost}, "muon"},
  };
  for (std::size_t i = 0; i < all.size(); ++i) {
    SCOPED_TRACE(i);
    Case setup{
        .dtype = Dtype::kBf16, .clip = false, .spoiled = all[i].parameter, .abandons = all[i].abandons};
    setup.optimizer.name = all[i].optimizer;
    const Outcome expected = train_on_cpu(setup);
    EXPECT_EQ(std::ranges::count(expected.norms, -1.0), 1);
    setup.updates = all[i].updates;
    setup.places = all[i].places;
    if (fake() != nullptr) begin(Schedule::kRandom, i);
    expect_twin(setup, expected);
  }
}

// Nor does it count as an update, or pass unnoticed, where the client then drops the gradient, or loads the
// unit anew.
TEST_F(DeviceEngineTest, AnUpdateThatIsLeftOutIsToldWhateverComesBeforeTheStep) {
  constexpr UnitId kUnit = 1;
  Case setup;
  setup.clip = false;
  const std::array<std::function<void(OnGpu&, ParameterId)>, 4> all = {
      [](OnGpu& gpu, ParameterId p) { gpu.engine.drop_gradient(p); },
      [](OnGpu& gpu, ParameterId) { gpu.client.load(); },
      [](OnGpu& gpu, ParameterId) { gpu.client.save(); },
      [](OnGpu& gpu, ParameterId p) { gpu.engine.set_steps(p, 0); },
  };
  for (const auto updates : {kDevice, kHost})
    for (std::size_t i = 0; i < all.size(); ++i) {
      SCOPED_TRACE(fmt::format("{} {}", name_of(updates), i));
      if (fake() != nullptr) begin(Schedule::kLate, 1);
      setup.updates = updates;
      OnGpu gpu(setup, *device_);
      gpu.client.load();
      const ParameterId p = gpu.engine.layout().first_parameter(kUnit);
      const std::size_t n = gpu.engine.layout().location(p).elements;
      StepSettings settings;
      settings.groups = {{0.02, 0.1}, {0.02, 0}};
      const auto add = [&](const ConstArray& gradient) {
        gpu.engine.begin_step(settings);
        gpu.engine.acquire(kUnit, Hold::kGradient);
        gpu.engine.add_gradient(p, gradient);
        gpu.engine.release(kUnit);
      };
      add(gpu.hands.nan(n));
      all[i](gpu, p);
      expect_error(ErrorCode::kNotFinite, {"'" + gpu.engine.layout().spec(p).name + "'"},
                   [&] { gpu.engine.step(settings); });
      EXPECT_EQ(gpu.engine.steps(p), 0u);
      const auto before = gpu.client.save().values;
      add(gpu.hands.noise_of(p, n));
      gpu.engine.step(settings);
      EXPECT_EQ(gpu.engine.steps(p), 1u);
      EXPECT_NE(gpu.client.save().values, before);
    }
}

// A factor is known at once.
TEST_F(DeviceEngineTest, AFactorThatIsNotFiniteIsRefusedWhereTheUnitIsReleased) {
  Case setup;
  setup.clip = false;
  const auto trained_with_one = [](AnyOrderEngine& engine, Client& client, Hands& hands) {
    const Layout& layout = engine.layout();
    StepSettings settings;
    settings.groups = {{0.02, 0.1}, {0.02, 0}};
    client.load();
    engine.begin_step(settings);
    for (const UnitId unit : {1U, 2U}) {
      const ParameterId p = layout.first_parameter(unit);
      engine.acquire(unit, Hold::kGradient);
      engine.add_gradient(p, hands.noise_of(p, layout.location(p).elements));
      if (unit == 2) engine.multiply_gradient(p, std::numeric_limits<double>::infinity());
      if (unit == 2)
        expect_error(ErrorCode::kNotFinite, {"'" + layout.spec(p).name + "'"}, [&] { engine.release(unit); });
      else
        engine.release(unit);
    }
    engine.step(settings);
    return client.save();
  };
  Made on_cpu(setup, nullptr);
  HandsOnCpu hands;
  Client client(setup, *on_cpu.engine, hands);
  const Outcome expected = trained_with_one(*on_cpu.engine, client, hands);
  setup.places = {kHost, kHost, kHost};
  for (const auto by : {kDevice, kHost}) {
    setup.updates = by;
    OnGpu gpu(setup, *device_);
    EXPECT_TRUE(trained_with_one(gpu.engine, gpu.client, gpu.hands) == expected) << name_of(by);
  }
}

}  // namespace sluice::engine::twins::not_finite_test
