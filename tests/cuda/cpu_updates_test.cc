#include "cuda/engine_fixture.h"
#include "engine/planner/planner.h"

// A GPU computes, and the CPU updates.
namespace sluice::engine::twins::cpu_updates_test {

using CpuUpdatesTest = DeviceEngineTest;

// The CPU has what it updates in registered memory, in its own, or on disk.
TEST_F(CpuUpdatesTest, ItHasThemWhereTheCpuUpdates) {
  Case setup;
  const Outcome expected = train_on_cpu(setup);
  setup.updates = kHost;
  for (const auto parameters : {kDevice, kHost, kDisk})
    for (const auto gradients : {kDevice, kHost, kDisk})
      for (const auto state : {kHost, kDisk}) {
        // Each two tiers meet in each two parts.
        if ((parameters == kHost) != ((gradients == kHost) == (state == kHost))) continue;
        SCOPED_TRACE(fmt::format("{} {} {}", name_of(parameters), name_of(gradients), name_of(state)));
        setup.places = {parameters, gradients, state};
        expect_twin(setup, expected);
      }
}

TEST_F(CpuUpdatesTest, EachOptimizerHasThemWhereTheCpuUpdates) {
  std::vector<Case> cases(6);  // those of one pass are alike: it is the CPU that updates
  cases[0].optimizer.name = "adafactor";
  cases[1].optimizer = optimizer_of("muon", Dtype::kF32, true), cases[1].dtype = Dtype::kBf16;
  cases[2].optimizer = optimizer_of("lion", Dtype::kF32, true), cases[2].dtype = Dtype::kF16;
  cases[2].clip = false;
  cases[3].edits = true, cases[3].dtype = Dtype::kBf16;
  cases[4].edits = cases[4].keeps = true;
  cases[5].optimizer = optimizer_of("adamw", Dtype::kU8, false), cases[5].dtype = Dtype::kBf16;
  for (std::size_t i = 0; i < cases.size(); ++i) {
    Case setup = cases[i];
    setup.steps = setup.keeps ? 4 : setup.edits ? 3 : 2;  // the last one keeps nothing
    const Outcome expected = train_on_cpu(setup);
    const bool has_rounds = i < 2;  // it reads chunks several times, and is the CPU's in any case
    if (!has_rounds) setup.updates = kHost;
    const auto place = i % 2 == 0 ? kHost : kDevice;
    SCOPED_TRACE(fmt::format("{} {}", i, name_of(place)));
    if (fake() != nullptr) begin(Schedule::kRandom, i);
    setup.places = {place, place, has_rounds && place == kHost ? kDisk : kHost};
    expect_twin(setup, expected);
  }
}

// The CPU updates, with the least memory beside which the smallest unit is on the GPU, and others are on
// disk.
Case with_parameters_on_the_gpu_and_on_disk() {
  Case setup{.places = {kDisk, kHost, kHost}, .updates = kHost, .blocks = 5, .rows = 528};
  const Plan on_disk = plan_of(setup);
  setup.device = on_disk.device_bytes, setup.memory = on_disk.peak_memory;
  setup.places = {std::nullopt, kHost, kHost};
  const auto on_disk_now = [&] {
    return std::ranges::count(plan_of(setup).units, kDisk,
                              [](const UnitPlan& unit) { return unit.tier(Part::kParameters); });
  };
  while (on_disk_now() < 3) setup.memory -= kMiB;
  EXPECT_EQ(plan_of(setup).units[0].tier(Part::kParameters), kDevice);
  return setup;
}

// A slot may still hold chunks that go to the GPU when the disk could bring the next chunk there.
TEST_F(CpuUpdatesTest, WhatTheDiskBringsWaitsForWhatStillGoesToTheGpu) {
  Case setup = with_parameters_on_the_gpu_and_on_disk();
  setup.steps = 2;
  const Outcome expected = train_on_cpu(setup);
  if (fake() != nullptr) begin(Schedule::kLate, 0);
  expect_twin(setup, expected);
}

// Host memory through which state passes to the GPU is also where what the CPU updates comes from the disk.
TEST_F(CpuUpdatesTest, StateFromTheDiskWaitsForStateThatStillGoesToTheGpu) {
  if (fake() != nullptr) begin(Schedule::kLate, 0);
  Case setup{.dtype = Dtype::kBf16, .blocks = 6, .rows = 528};
  setup.rates.gpu = {Source::kMeasured, 1e9, 1e9, 2e9, 1e-15};
  setup.rates.memory_bandwidth = 1000e9;
  setup.rates.disk_read = setup.rates.disk_write = 3e9;
  setup.memory = 60 * kMiB;
  std::optional<UnitId> by_gpu, by_cpu;
  for (setup.device = 8 * kMiB; (!by_gpu || !by_cpu) && setup.device < 256 * kMiB; setup.device += 2 * kMiB)
    try {
      by_gpu = by_cpu = std::nullopt;
      const Plan plan = plan_of(setup);
      for (UnitId unit = 1; unit < setup.blocks; ++unit)
        if (!plan.units[unit].updated_by_cpu() && plan.units[unit].tier(Part::kState) == kDevice)
          by_gpu = unit;
        else if (plan.units[unit].updated_by_cpu() && plan.units[unit].tier(Part::kState) == kDisk)
          by_cpu = unit;
    } catch (const Error&) {
    }
  setup.device -= 2 * kMiB;
  ASSERT_TRUE(by_gpu && by_cpu);
  Made made(setup, device_.get());
  UnitSource source;
  source.values = [](ParameterId p, std::size_t first, std::span<float> out) {
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = noise(p, first + i, 0);
  };
  for (UnitId unit = 0; unit < made.engine->layout().units().size(); ++unit)
    if (unit != *by_gpu && unit != *by_cpu) made.engine->load(unit, source);
  for (const UnitId unit : {*by_cpu, *by_gpu}) made.engine->load(unit, source);
  std::size_t wrong = 0;
  UnitSink sink;
  sink.master = [&](ParameterId p, std::size_t first, std::span<const float> values) {
    for (std::size_t i = 0; i < values.size(); ++i) wrong += values[i] != noise(p, first + i, 0) ? 1 : 0;
  };
  for (const UnitId unit : {*by_cpu, *by_gpu}) made.engine->save(unit, sink);
  EXPECT_EQ(wrong, 0u);
}

// Holds up the CPU's updates until somebody opens it. Where nobody does so for a minute, somebody waits for
// who waits here: then it opens, and the test has failed.
class Gate {
 public:
  void pass() {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, std::chrono::minutes(1), [&] { return is_open_; })) is_forced_ = true;
    is_open_ |= is_forced_;
  }
  void set_open(bool open) {
    const std::lock_guard lock(mutex_);
    is_open_ = open;
    changed_.notify_all();
  }
  bool is_forced() const {
    const std::lock_guard lock(mutex_);
    return is_forced_;
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool is_open_ = false, is_forced_ = false;
};

class GatedProducts final : public kernels::F32Products {
 public:
  explicit GatedProducts(Gate& gate) : gate_(gate) {}
  void multiply_f32(const kernels::Product& product) override {
    gate_.pass();
    library_->multiply_f32(product);
  }
  std::size_t hidden_bytes(const kernels::Product& product) const override {
    return library_->hidden_bytes(product);
  }

 private:
  Gate& gate_;
  const std::unique_ptr<kernels::F32Products> library_ = kernels::load_matrix_library(2);
};

// Threads of which those of the CPU's updates pass the gate.
struct GatedThreads {
  static inline Gate* gate = nullptr;
  static inline std::thread::id caller;
  static void team(void (*work)(void*), void* data, unsigned /*threads*/, unsigned /*flags*/) {
    if (std::this_thread::get_id() != caller) gate->pass();
    work(data);
  }
  explicit GatedThreads(Gate& of) {
    gate = &of;
    caller = std::this_thread::get_id();
  }
};

TEST_F(CpuUpdatesTest, TheGpuGoesOnWithItsOwnMeanwhile) {
  SLUICE_NEEDS_THE_FAKE();
  Case setup{.blocks = 6, .steps = 1};
  const Outcome expected = train_on_cpu(setup);
  setup.places = {kHost, kHost, kHost};
  setup.rates.gpu = {Source::kMeasured, 10e9, 10e9, 20e9, 1e-15};
  setup.rates.memory_bandwidth = 20e9;
  setup.team = GatedThreads::team;
  Gate gate;
  const GatedThreads threads(gate);
  gate.set_open(true);
  OnGpu gpu(setup, *device_);
  const auto by_cpu = std::ranges::count_if(gpu.made.plan.units, &UnitPlan::updated_by_cpu);
  ASSERT_GT(by_cpu, 2);  // more than may be under way where the model is computed
  ASSERT_LT(by_cpu, 7);
  gpu.client.load();
  gate.set_open(false);
  const std::vector<double> norms = {gpu.client.step(0)};
  EXPECT_FALSE(gate.is_forced());
  const auto updates = [&] { return fake()->counts().calls["cuLaunchKernel"]; };
  const std::uint64_t begun = updates();
  gate.set_open(true);
  gpu.engine.settle();
  EXPECT_EQ(updates(), begun) << "updates that the GPU was given late";
  Outcome found = gpu.client.save();
  found.norms = norms;
  EXPECT_TRUE(found == expected);
}

// Updates are at the step, and in backward.
TEST_F(CpuUpdatesTest, TheCallerWaitsForTheNormAlone) {
  SLUICE_NEEDS_THE_FAKE();
  Case setup{.places = {kHost, kHost, kHost}, .updates = kHost, .steps = 6};
  for (const bool clip : {true, false}) {
    SCOPED_TRACE(clip);
    setup.clip = clip;
    begin(Schedule::kLate, 0);
    OnGpu gpu(setup, *device_);
    gpu.client.load();
    const auto waits = [] { return fake()->counts().waits[std::this_thread::get_id()]; };
    for (int step = 0; step < setup.steps; ++step) {
      const std::uint64_t before = waits();
      gpu.client.step(step);
      // In the first steps memory is mapped.
      if (step >= 3) {
        EXPECT_EQ(waits(), before + 1) << step;
      }
    }
  }
}

// The bytes that the link saves, and the time that both processors take, decide which of them updates.
TEST_F(CpuUpdatesTest, ThePlanChoosesWhatTheCpuUpdates) {
  Case setup{.places = {kHost, kHost, kHost}, .blocks = 6};
  const auto by_cpu = [&](double link, double memory, double gpu_update = 1e-15) {
    setup.rates.gpu = {Source::kMeasured, link, link, 2 * link, gpu_update};
    setup.rates.memory_bandwidth = memory;
    const Plan plan = plan_of(setup);
    const std::string text = to_text(plan, profile_of(setup), budget_of(setup));
    EXPECT_THAT(text, testing::HasSubstr(plan.updates_because));
    EXPECT_THAT(text, testing::HasSubstr("all of it is measured"));
    return std::ranges::count_if(plan.units, &UnitPlan::updated_by_cpu);
  };
  EXPECT_EQ(by_cpu(100e9, 1e9), 0);
  EXPECT_GE(by_cpu(1e9, 1000e9), 6);  // all but what is frozen; of the smallest one it makes no difference
  const auto some = by_cpu(10e9, 20e9);
  EXPECT_GT(some, 0);
  EXPECT_LT(some, 7);
  EXPECT_LE(by_cpu(10e9, 16e9), some);
  EXPECT_LE(some, by_cpu(10e9, 24e9));
  EXPECT_GT(by_cpu(100e9, 40e9, 1e-6), by_cpu(100e9, 40e9));  // a GPU that updates slowly has help
  setup.rates = {};
  EXPECT_THAT(to_text(plan_of(setup), profile_of(setup), budget_of(setup)),
              testing::HasSubstr("copies of 25 GB/s to the GPU, 25 from it and 50 both ways"));
  for (const auto forced : {kDevice, kHost}) {
    setup.updates = forced;
    const Plan plan = plan_of(setup);
    EXPECT_THAT(plan.updates_because, testing::HasSubstr("as asked"));
    for (const UnitPlan& unit : plan.units) EXPECT_EQ(unit.updated_on, forced);
  }
}

}  // namespace sluice::engine::twins::cpu_updates_test
