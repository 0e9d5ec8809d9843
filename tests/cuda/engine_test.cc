#include "cuda/engine_fixture.h"
#include "engine/planner/planner.h"
#include "testing.h"
#include "thrown.h"

namespace sluice::engine::twins::engine_test {

TEST_F(DeviceEngineTest, ItHasTheBitsOfTheCpuWhereverItsPartsAre) {
  Case setup;
  const Outcome expected = train_on_cpu(setup);
  for (const auto parameters : {kDevice, kHost, kDisk})
    for (const auto gradients : {kDevice, kHost, kDisk})
      for (const auto state : {kDevice, kHost, kDisk}) {
        // Each two tiers meet in each two parts.
        if ((static_cast<int>(parameters) + static_cast<int>(gradients) + static_cast<int>(state)) % 3 != 0)
          continue;
        SCOPED_TRACE(fmt::format("{} {} {}", name_of(parameters), name_of(gradients), name_of(state)));
        setup.places = {parameters, gradients, state};
        expect_twin(setup, expected);
      }
  // Of a chunk one part comes from memory, and another one from the disk.
  setup.places = {kHost, kHost, kDisk};
  expect_twin(setup, expected);
}

// Each of several tests has some of the orders, so that they can run side by side.
class DeviceEngineOrdersTest : public DeviceEngineTest, public testing::WithParamInterface<std::uint64_t> {
 public:
  static constexpr std::uint64_t kTests = 5;
};

// A real GPU has an order of its own.
TEST_P(DeviceEngineOrdersTest, ItHasThemInWhateverOrderTheGpuWorks) {
  Case setup;
  setup.micro_batches = 2, setup.steps = 2;
  const Outcome expected = train_on_cpu(setup);
  for (const std::uint64_t seed : seeds(GetParam(), kTests)) {
    SCOPED_TRACE(seed);
    const auto place = seed % 5 == 1 ? kDisk : kHost;
    setup.places = {place, seed % 5 == 2 ? kDisk : place, place};
    setup.updates = seed % 5 < 3 ? kDevice : kHost;
    if (seed % 5 == 4) setup.places = {kDevice, kHost, kDisk};
    if (fake() != nullptr) begin(seed == 0 ? Schedule::kLate : Schedule::kRandom, seed);
    expect_twin(setup, expected);
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, DeviceEngineOrdersTest,
                         testing::Range<std::uint64_t>(0, DeviceEngineOrdersTest::kTests));

// The engine chooses for itself, from the least device memory on.
TEST_F(DeviceEngineTest, ItHasThemInAnyBudget) {
  Case setup;
  setup.rows = 528, setup.steps = 2;  // so that the least device memory is not that which all of it takes
  const Outcome expected = train_on_cpu(setup);
  setup.device = 1;
  std::size_t least = 0;
  expect_error(ErrorCode::kBudget, {"device memory", "device_memory="}, [&] { Made(setup, device_.get()); });
  for (setup.device = kMiB; least == 0; setup.device += kMiB) try {
      least = plan_of(setup).device_bytes;
    } catch (const Error&) {
    }
  std::set<std::size_t> taken;
  for (std::size_t more = 0; more <= 32 * kMiB; more += 32 * kMiB) {
    SCOPED_TRACE(more);
    setup.device = least + more;
    const Outcome found = train_on_gpu(setup, *device_, [&](Made& made) {
      check_memory(made);
      taken.insert(made.plan.device_bytes);
      EXPECT_LE(made.plan.device_bytes, setup.device);
      EXPECT_THAT(to_text(made.plan, made.profile, budget_of(setup)), testing::HasSubstr("on the GPU"));
      EXPECT_EQ(to_json(made.plan, made.profile, budget_of(setup)).at("device"), made.plan.device_bytes);
    });
    EXPECT_TRUE(found == expected);
  }
  EXPECT_GT(taken.size(), 1u);
  // Memory that is too small for what is not on the GPU: the rest is on disk.
  Case larger = setup;
  larger.device = 64 * kMiB;
  larger.places = {kDisk, kDisk, kDisk};
  larger.memory = plan_of(larger).peak_memory;
  larger.places = {};
  const Outcome found = train_on_gpu(larger, *device_, [&](Made& made) {
    check_memory(made);
    EXPECT_TRUE(made.plan.uses_disk());
  });
  EXPECT_TRUE(found == train_on_cpu(larger));
  setup.device = least;
  setup.memory = kMiB;
  expect_error(ErrorCode::kBudget, {"beside", "on disk that can be"}, [&] { Made(setup, device_.get()); });
  setup.memory = kGiB;
  setup.device = least - 1;
  expect_error(ErrorCode::kBudget, {"short by 1 B", "device_memory="}, [&] { Made(setup, device_.get()); });
}

TEST_F(DeviceEngineTest, EachOptimizerAndTypeHasThem) {
  // update_test.cc has the others, without an engine.
  std::vector<Case> cases(6);
  cases[0].optimizer = optimizer_of("adamw", Dtype::kBf16, true), cases[0].dtype = Dtype::kBf16;
  cases[1].optimizer = optimizer_of("adamw", Dtype::kU8, false), cases[1].dtype = Dtype::kBf16;
  cases[2].optimizer = optimizer_of("lion", Dtype::kF32, true), cases[2].dtype = Dtype::kF16;
  cases[3].clip = false, cases[3].holds = true;
  cases[4].edits = true, cases[4].dtype = Dtype::kBf16;
  cases[5].edits = cases[5].keeps = true;
  for (std::size_t i = 0; i < cases.size(); ++i) {
    SCOPED_TRACE(i);
    Case setup = cases[i];
    setup.steps = setup.keeps ? 4 : setup.edits ? 3 : 2;  // the last one keeps nothing
    const Outcome expected = train_on_cpu(setup);
    if (fake() != nullptr) begin(Schedule::kRandom, i);
    setup.places = {kHost, kHost, kHost};
    expect_twin(setup, expected);
  }
}

// A gradient that is the only one stays in the type in which it came, wherever it waits.
TEST_F(DeviceEngineTest, GradientsThatComeOnceHaveThemInTheirType) {
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kF16})
    for (const bool clip : {true, false}) {
      Case setup;
      setup.optimizer = optimizer_of("adamw", Dtype::kF32, true);
      setup.dtype = dtype;
      setup.clip = clip;
      setup.measures = clip;
      setup.once = true;
      const Outcome expected = train_on_cpu(setup);
      for (const auto updates : {kDevice, kHost})
        for (const auto gradients : {kDevice, kHost, kDisk}) {
          const bool is_first = dtype == Dtype::kBf16;
          // Each two of type, clipping, updates and gradients are together.
          if ((is_first == clip) != ((updates == kHost) == (gradients == kHost))) continue;
          const auto rest = (gradients == kHost) == (clip == is_first) ? kDevice : kHost;
          SCOPED_TRACE(fmt::format("{} clip {} by {}, {} {}", name_of(dtype), clip, name_of(updates),
                                   name_of(gradients), name_of(rest)));
          setup.updates = updates;
          setup.places = {rest, gradients, updates == kHost ? kHost : rest};
          if (fake() != nullptr) begin(Schedule::kRandom, 5);
          expect_twin(setup, expected);
        }
    }
}

// Of more units than there are frames for each gets its own in two steps, and the caller waits for the norm
// alone.
TEST_F(DeviceEngineTest, ASteadyOrderMapsNothingAndWaitsForTheNormAlone) {
  SLUICE_NEEDS_THE_FAKE();
  Case setup{.places = {kHost, kHost, kHost}, .updates = kDevice, .blocks = 14, .steps = 5};
  const auto count = [](const std::vector<const char*>& functions) {
    auto calls = fake()->counts().calls;
    std::uint64_t sum = 0;
    for (const char* function : functions) sum += calls[function];
    return sum;
  };
  const auto mapping = [&] {
    return count({"cuMemMap", "cuMemUnmap", "cuMemSetAccess", "cuMemCreate", "cuMemAddressReserve"});
  };
  const auto waits = [&] { return count({"cuEventSynchronize", "cuStreamSynchronize"}); };
  // The client's own clipping by norm waits once, too, and step() does not wait again.
  for (const auto& [clip, measures] : {std::pair(true, true), {false, false}}) {
    SCOPED_TRACE(fmt::format("{} {}", clip, measures));
    setup.clip = clip;
    setup.measures = measures;
    begin(Schedule::kLate, 1);
    OnGpu gpu(setup, *device_);
    gpu.client.load();
    for (int step = 0; step < 2; ++step) gpu.client.step(step);
    std::set<std::uint64_t> moved;
    for (int step = 2; step < 4; ++step) {
      const std::uint64_t mapped = mapping(), waited = waits();
      const auto before = fake()->counts();
      gpu.client.step(step);
      const auto after = fake()->counts();
      moved.insert(after.bytes_in - before.bytes_in + after.bytes_out - before.bytes_out);
      EXPECT_LE(after.bytes_in - before.bytes_in, gpu.made.plan.step_bytes_in + gpu.own_bytes() / 2);
      EXPECT_EQ(mapping(), mapped);
      EXPECT_EQ(waits(), waited + 1);
    }
    EXPECT_GT(mapping(), 0u);
    EXPECT_EQ(moved.size(), 1u);
    EXPECT_LE(*moved.begin(), gpu.made.plan.step_bytes_in + gpu.made.plan.step_bytes_out + gpu.own_bytes());
    EXPECT_GT(fake()->counts().bytes_in, std::uint64_t{3} * kMiB);
  }
}

// Masters hold the values of narrow parameters, which an update only overwrites. The first unit alone comes
// once more: it is fetched ahead of its next use, before its update.
TEST_F(DeviceEngineTest, WhatAnUpdateOverwritesIsNotBroughtForIt) {
  SLUICE_NEEDS_THE_FAKE();
  Case setup{.optimizer = optimizer_of("adamw", Dtype::kF32, true), .dtype = Dtype::kBf16};
  setup.places = {kHost, kDevice, kDevice}, setup.updates = kDevice;
  setup.once = setup.cycles = true;  // the client copies nothing to the GPU
  setup.blocks = 14, setup.steps = 3;
  begin(Schedule::kLate, 1);
  OnGpu gpu(setup, *device_);
  gpu.client.load();
  for (int step = 0; step < 2; ++step) gpu.client.step(step);
  const std::uint64_t before = fake()->counts().bytes_in;
  gpu.client.step(2);
  const std::uint64_t of_first = gpu.engine.layout().unit_bytes(0);
  EXPECT_EQ(fake()->counts().bytes_in - before, gpu.made.plan.step_bytes_in + of_first);
  EXPECT_EQ(gpu.made.plan.step_bytes_in, gpu.own_bytes() / 2) << "each unit comes once";
}

// The plan counts gradients that stay in frames from one micro-batch to the next one as if they moved.
TEST_F(DeviceEngineTest, GradientsThatWaitInTheHostMoveWithEachMicroBatchAsPlanned) {
  SLUICE_NEEDS_THE_FAKE();
  Case setup{.places = {kDevice, kHost, kDevice}, .updates = kDevice};
  setup.ends = setup.once = true;  // the client copies what it has on the GPU
  setup.blocks = 9, setup.micro_batches = 3, setup.steps = 2;
  begin(Schedule::kRandom, 1);
  OnGpu gpu(setup, *device_);
  gpu.client.load();
  gpu.client.step(0);
  device_->synchronize(gpu.stream.get());
  const auto before = fake()->counts();
  gpu.client.step(1);
  device_->synchronize(gpu.stream.get());
  const auto after = fake()->counts();
  const std::uint64_t in = gpu.made.plan.step_bytes_in, out = gpu.made.plan.step_bytes_out;
  const std::uint64_t looked = setup.micro_batches * gpu.own_bytes();  // at most
  EXPECT_LE(after.bytes_in - before.bytes_in, in);
  EXPECT_GT(after.bytes_in - before.bytes_in, in * 3 / 4);
  EXPECT_LE(after.bytes_out - before.bytes_out, out + looked);
  EXPECT_GT(after.bytes_out - before.bytes_out, out * 3 / 4);
}

// An error of the driver, wherever it is, ends the training with its words, and leaves nothing behind.
class DeviceEngineFailuresTest
    : public DeviceEngineTest,
      public testing::WithParamInterface<std::tuple<allocator::Tier, fake_cuda::Schedule>> {};

TEST_P(DeviceEngineFailuresTest, EachCallThatFailsIsAnErrorAndNothingIsLeft) {
  SLUICE_NEEDS_THE_FAKE();
  Case setup;
  const auto [updates, schedule] = GetParam();
  setup.updates = updates;
  setup.places = {kHost, kHost, kHost};
  setup.blocks = 1, setup.steps = 1;
  std::map<std::string, std::uint64_t> calls;
  // A call that fails when the engine ends is reported to nobody.
  const auto scenario = [&] {
    train_on_gpu(setup, *device_, [&](Made&) { calls = fake()->counts().calls; });
  };
  begin(schedule, 0);
  auto before = fake()->counts().calls;
  scenario();
  const auto all = calls;
  int failures = 0;
  for (const char* function :
       {"cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess", "cuMemHostRegister",
        "cuStreamCreateWithPriority", "cuEventCreate", "cuEventRecord", "cuStreamWaitEvent", "cuEventQuery",
        "cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuStreamSynchronize", "cuMemGetInfo", "cuLaunchKernel",
        "cuModuleGetFunction", "cuModuleLoadData"}) {
    const std::uint64_t count = all.at(function) - before[function];
    EXPECT_GT(count, 0u) << function;
    for (std::uint64_t n = 0; n < count; n += std::max<std::uint64_t>(1, count / 3), ++failures) {
      SCOPED_TRACE(fmt::format("{} {}", function, n));
      begin(schedule, 0);
      fake()->fail(function, n, 719);
      try {
        scenario();
        ADD_FAILURE() << "no error";
      } catch (const Error& error) {
        EXPECT_THAT(std::string(error.what()), testing::HasSubstr(function));
      }
      device_.reset();
      EXPECT_EQ(fake()->alive(), std::vector<std::string>{});
      EXPECT_EQ(fake()->memory_taken(), 0u);
      EXPECT_EQ(fake()->take_misuses(), std::vector<std::string>{});
    }
  }
  EXPECT_GT(failures, 40);
}

INSTANTIATE_TEST_SUITE_P(Updates, DeviceEngineFailuresTest,
                         testing::Values(std::tuple(kDevice, fake_cuda::Schedule::kLate),
                                         std::tuple(kHost, fake_cuda::Schedule::kEarly)));

// Bad input is refused before anything is taken, with what to do about it.
TEST_F(DeviceEngineTest, WhatAGpuDoesNotHaveIsRefused) {
  Case setup;
  setup.device = 64 * kMiB;
  const auto planned = [&](const auto& change) {
    Profile profile = profile_of(setup);
    PlanRequest request = request_of(setup);
    optim::OptimizerSettings optimizer;
    change(profile, request, optimizer);
    return make_plan(profile, *optim::make_optimizer(optimizer), budget_of(setup), request, {});
  };
  using optim::OptimizerSettings;
  expect_error(ErrorCode::kInvalidArgument, {"stage 3", "let the CPU", "stage 1"}, [&] {
    planned([](Profile&, PlanRequest& request, OptimizerSettings&) {
      request.ranks = {0, 2};
      request.stage = 3;
      request.updates = kDevice;
    });
  });
  expect_error(ErrorCode::kInvalidArgument, {"reproducible"}, [&] {
    planned([](Profile&, PlanRequest& request, OptimizerSettings&) { request.reproducible = true; });
  });
  expect_error(ErrorCode::kInvalidArgument, {"native model"}, [&] {
    planned([](Profile& profile, PlanRequest&, OptimizerSettings&) { profile.any_order = false; });
  });
  setup.optimizer.name = "adafactor";
  setup.updates = kDevice;
  expect_error(ErrorCode::kInvalidArgument, {"adafactor", "adamw"}, [&] { Made(setup, device_.get()); });
  setup.updates = {};
  setup.places[index(Part::kState)] = kDevice;
  expect_error(ErrorCode::kInvalidArgument, {"state on the GPU", "the CPU updates"},
               [&] { Made(setup, device_.get()); });
  setup.places = {};
  setup.optimizer = {};
  Made made(setup, device_.get());
  expect_error(ErrorCode::kInvalidArgument, {"given none"}, [&] {
    AnyOrderEngine(made.profile, made.plan, *made.optimizer, {made.threads, made.ledger});
  });
  Plan other = made.plan;
  other.extent_bytes *= 2;
  for (const Plan* const plan : {&made.plan, &other})
    expect_error(ErrorCode::kState, {"keeps its plan"}, [&] { made.engine->replan(*plan); });
  EXPECT_EQ(made.engine->failure(), "");
  expect_error(ErrorCode::kState, {"save them"},
               [&] { made.engine->leave(false, [](UnitId, allocator::FormerHome) {}); });
  Made on_cpu(setup, nullptr);
  expect_error(ErrorCode::kState, {"on the CPU"}, [&] { on_cpu.engine->use_stream(nullptr); });
}

TEST_F(DeviceEngineTest, AStreamMayEndWhenAnotherHasTakenItsPlace) {
  Case setup;
  setup.places = {kHost, kHost, kHost};
  if (fake() != nullptr) begin(Schedule::kLate, 1);
  std::array<Device::Stream, 2> streams = {device_->make_stream(false), device_->make_stream(false)};
  Made made(setup, device_.get());
  HostMemory seen(*device_, 16);
  UnitSource source;
  source.values = [](ParameterId, std::size_t, std::span<float> out) { std::ranges::fill(out, 1.0f); };
  made.engine->load_all(source);
  for (Device::Stream& stream : streams) {
    made.engine->use_stream(stream.get());
    if (&stream != &streams[0]) streams[0].reset();
    for (UnitId unit = 0; unit < made.engine->layout().units().size(); ++unit) {
      made.engine->acquire(unit, Hold::kRead);
      const void* const values = made.engine->parameter(made.engine->layout().first_parameter(unit)).data;
      device_->copy_out(stream.get(), seen.data(), reinterpret_cast<DeviceAddress>(values), seen.size());
      made.engine->release(unit);
    }
  }
  made.engine.reset();
  EXPECT_EQ(fake() == nullptr ? std::vector<std::string>{} : fake()->take_misuses(),
            std::vector<std::string>{});
}

TEST_F(DeviceEngineTest, WhatIsBeingEditedIsSavedAsItIs) {
  if (fake() != nullptr) begin(Schedule::kLate, 1);
  Case setup;
  const Device::Stream stream = device_->make_stream(false);
  Made made(setup, device_.get());
  made.engine->use_stream(stream.get());
  UnitSource source;
  source.values = [](ParameterId, std::size_t, std::span<float> out) { std::ranges::fill(out, 1.0f); };
  made.engine->load_all(source);
  made.engine->acquire(0, Hold::kEdit);
  device_->fill(stream.get(), reinterpret_cast<DeviceAddress>(made.engine->parameter(0).data),
                std::byte{0x3c}, 280);
  float found = 0;
  UnitSink sink;
  sink.parameter = [&](ParameterId p, std::size_t, std::size_t, ConstArray values) {
    if (p == 0) found = values.f32()[0];
  };
  made.engine->save(0, sink);
  EXPECT_EQ(found, std::bit_cast<float>(0x3c3c3c3c));
  made.engine->release(0);
  made.engine.reset();
}

TEST_F(DeviceEngineTest, MoreThanIsFreeIsRefused) {
  SLUICE_NEEDS_THE_FAKE();
  Case setup;
  setup.device = 64 * kMiB;
  const std::size_t needed = Made(setup, device_.get()).plan.device_bytes;
  for (const std::size_t memory : {needed - 2 * kMiB, needed}) {
    device_.reset();
    fake()->begin({.memory = memory});
    device_ = open_device(0);
    if (memory < needed)
      expect_error(ErrorCode::kBudget, {"are free", "less device memory"},
                   [&] { Made(setup, device_.get()); });
    else
      Made(setup, device_.get());
  }
}

}  // namespace sluice::engine::twins::engine_test
