#include <cuda.h>

#include <nlohmann/json.hpp>

#include "tests/bindings/c/fake_gpu.h"

// Tests that an engine on a GPU has the bits of the CPU's, as a caller of the C ABI sees them.
namespace sluice_c_test::device_test {

using Json = nlohmann::json;

constexpr uint64_t kMiB = uint64_t{1} << 20;

using DeviceTest = FakeGpuEngineTest;

// A plan measures no rate that is stated, and takes measured rates where a caller states them.
TEST_F(DeviceTest, WhatAPlanIsMadeByIsMeasuredOrStated) {
  fake().begin(
      {.memory = 1024 * kMiB, .context_memory = 10 * kMiB, .module_memory = 2 * kMiB, .shares_memory = true});
  const Choice setup{.place = "memory", .device_memory = 128 * kMiB};
  const ModelHandle model = make_model();
  sluice_engine_options options = options_of(setup, nullptr);
  options.device_reserved = 4 * kMiB;
  options.device_facts = nullptr;
  const auto json_of = [](const auto& ask) {
    char* text = nullptr;
    EXPECT_OK(ask(&text));
    return Json::parse(taken(text));
  };
  const auto made = [&] {
    const EngineHandle engine = engine_of(model.get(), options);
    const auto plan = json_of([&](char** text) { return sluice_engine_plan(engine.get(), text); });
    auto facts = json_of([&](char** text) { return sluice_engine_device(engine.get(), text); }).at("facts");
    EXPECT_EQ(plan.at("bytes").at("device").at("base"), 4 * kMiB + facts.at("base").get<uint64_t>());
    for (const char* no_rate : {"base", "computing"}) facts.erase(no_rate);
    EXPECT_EQ(plan.at("rates"), facts);
    return plan;
  };
  const auto measured = made();
  EXPECT_EQ(measured.at("rates").at("known"), "measured");
  EXPECT_TRUE(measured.at("step").at("compute_seconds").is_null());
  EXPECT_EQ(measured.at("bytes").at("device").at("base"), 16 * kMiB);
  // Where the GPU allows no second context, as much as on large ones is assumed.
  fake().fail("cuCtxCreate", 0, CUDA_ERROR_DEVICE_UNAVAILABLE);
  options.device_memory = 700 * kMiB;
  EXPECT_EQ(made().at("bytes").at("device").at("base"), 516 * kMiB);
  options.device_memory = 128 * kMiB;
  sluice_device_facts facts = SLUICE_INIT(sluice_device_facts);
  facts.to_gpu = 1e9, facts.from_gpu = 2e9, facts.both_ways = 3e9, facts.gpu_updates = 0x1p32,
  facts.cpu_memory = 5e9;
  facts.base = 20 * kMiB;
  facts.computing = 3;
  options.device_facts = &facts;
  const uint64_t before = fake().counts().calls["cuCtxCreate"];
  const auto stated = made();
  EXPECT_EQ(fake().counts().calls["cuCtxCreate"], before);
  const Json expected = {{"to_gpu", 1e9},         {"from_gpu", 2e9},   {"both_ways", 3e9},
                         {"gpu_updates", 0x1p32}, {"cpu_memory", 5e9}, {"between_gpus", 0.0},
                         {"known", "stated"}};
  EXPECT_EQ(stated.at("rates"), expected);
  EXPECT_EQ(stated.at("step").at("compute_seconds"), 3);
  EXPECT_GE(stated.at("step").at("seconds"), 3);
  EXPECT_EQ(stated.at("bytes").at("device").at("base"), 24 * kMiB);
  const auto planned = json_of([&](char** text) { return sluice_plan(model.get(), &options, text); });
  EXPECT_EQ(planned.at("rates"), expected);
  EXPECT_EQ(planned.at("step"), stated.at("step"));
  options.device_facts = nullptr;
  options.device_memory = 1024 * kMiB;
  const auto assumed = json_of([&](char** text) { return sluice_plan(model.get(), &options, text); });
  EXPECT_EQ(assumed.at("rates").at("known"), "assumed");
  EXPECT_EQ(assumed.at("bytes").at("device").at("base"), 516 * kMiB);
}

TEST_F(DeviceTest, AStepIsPredictedByWhatComputingTakes) {
  fake().begin({.shares_memory = true});
  const EngineHandle engine = make_engine({.place = "device", .device_memory = 128 * kMiB}, folder_.path());
  char* text = nullptr;
  ASSERT_OK(sluice_engine_predict(engine.get(), 100, &text));
  const Json step = Json::parse(taken(text)).at("step");
  EXPECT_EQ(step.at("compute_seconds"), 100);
  EXPECT_GE(step.at("seconds"), 100);
  EXPECT_EQ(step.at("bound"), "computing");
  EXPECT_EQ(sluice_engine_predict(engine.get(), -1, &text), SLUICE_INVALID_ARGUMENT);
}

TEST_F(DeviceTest, OnTheCpuReportsHaveNone) {
  const EngineHandle engine = make_engine({.place = "memory"}, "");
  char* text = const_cast<char*>("");
  ASSERT_OK(sluice_engine_device(engine.get(), &text));
  EXPECT_EQ(text, nullptr);
  std::array<sluice_ledger_line, 64> lines;
  size_t count = 0;
  ASSERT_OK(sluice_engine_ledger(engine.get(), lines.data(), lines.size(), &count));
  for (size_t i = 0; i < count; ++i) EXPECT_NE(std::string(lines[i].tier), "device");
  expect_error(sluice_engine_use_stream(engine.get(), nullptr), SLUICE_STATE, {"on the CPU"});
}

// A function of the driver's library, by the name that cuda.h gives it.
#define SLUICE_TEXT(name) #name
#define SLUICE_NAME(name) SLUICE_TEXT(name)
#define EXPECT_CUDA(function, ...)                                                                          \
  EXPECT_EQ(reinterpret_cast<decltype(&::function)>(::dlsym(library_, SLUICE_NAME(function)))(__VA_ARGS__), \
            CUDA_SUCCESS)

// A caller with a stream of its own, on which it copies what it sees. It waits for nothing.
class Caller {
 public:
  Caller(void* library, std::size_t bytes) : library_(library), seen_(bytes) {
    EXPECT_CUDA(cuDevicePrimaryCtxRetain, &context_, 0);
    EXPECT_CUDA(cuCtxPushCurrent, context_);
    EXPECT_CUDA(cuStreamCreateWithPriority, &stream_, CU_STREAM_NON_BLOCKING, 0);
    EXPECT_CUDA(cuMemHostRegister, seen_.data(), bytes, 0);
  }
  ~Caller() {
    EXPECT_CUDA(cuMemHostUnregister, seen_.data());
    EXPECT_CUDA(cuStreamDestroy, stream_);
    EXPECT_CUDA(cuCtxPopCurrent, &context_);
    EXPECT_CUDA(cuDevicePrimaryCtxRelease, 0);
  }
  Caller(const Caller&) = delete;
  Caller& operator=(const Caller&) = delete;
  CUstream stream() const { return stream_; }
  void look(const void* data, std::size_t bytes) {
    EXPECT_CUDA(cuMemcpyDtoHAsync, seen_.data() + at_, reinterpret_cast<CUdeviceptr>(data), bytes, stream_);
    at_ += bytes;
  }
  std::vector<std::byte> seen() {
    EXPECT_CUDA(cuStreamSynchronize, stream_);
    return {seen_.begin(), seen_.begin() + static_cast<std::ptrdiff_t>(at_)};
  }

 private:
  void* library_;
  CUcontext context_ = nullptr;
  CUstream stream_ = nullptr;
  std::vector<std::byte> seen_;
  std::size_t at_ = 0;
};

// Each unit's gradient is its parameters, which lie in the GPU's memory.
template <class Look>
Values pulled_to_zero(const Choice& setup, sluice_engine* engine, const Look& look) {
  set_start_values(engine);
  for (int step = 0; step < 2; ++step) {
    EXPECT_OK(sluice_engine_begin_step(engine, nullptr));
    for (uint32_t unit = 0; unit < kUnits; ++unit) {
      EXPECT_OK(sluice_engine_acquire(engine, unit, SLUICE_GRADIENT));
      for (uint32_t p = 0; p < parameters().size(); ++p) {
        if (parameters()[p].unit != unit) continue;
        const void* data = nullptr;
        EXPECT_OK(sluice_engine_parameter(engine, p, &data));
        look(data, parameters()[p].elements() * (setup.dtype == SLUICE_F32 ? 4 : 2));
        EXPECT_OK(sluice_engine_add_gradient(engine, p, data, setup.dtype));
      }
      EXPECT_OK(sluice_engine_release(engine, unit));
    }
    EXPECT_OK(apply(engine));
  }
  return values_of(engine);
}

TEST_F(DeviceTest, TheSameBitsOnTheCallersStreamInAnyOrderOfTheGpu) {
  Choice setup{.place = "memory", .dtype = SLUICE_BF16};
  std::vector<std::byte> expected_bytes;
  const Values expected = [&] {
    const EngineHandle engine = make_engine(setup, "");
    return pulled_to_zero(setup, engine.get(), [&](const void* data, std::size_t bytes) {
      const auto* const begin = static_cast<const std::byte*>(data);
      expected_bytes.insert(expected_bytes.end(), begin, begin + bytes);
    });
  }();
  setup.device_memory = 128 * kMiB;
  for (const auto& [schedule, place] :
       {std::pair(fake_cuda::Schedule::kLate, "memory"), std::pair(fake_cuda::Schedule::kRandom, "disk")}) {
    fake().begin({.schedule = schedule, .seed = 3});
    setup.place = place;
    EngineHandle engine = make_engine(setup, folder_.path());
    Caller caller(library(), expected_bytes.size());
    EXPECT_OK(sluice_engine_use_stream(engine.get(), caller.stream()));
    const Values found = pulled_to_zero(
        setup, engine.get(), [&](const void* data, std::size_t bytes) { caller.look(data, bytes); });
    EXPECT_TRUE(found == expected) << place;
    EXPECT_TRUE(caller.seen() == expected_bytes) << place;
    engine.reset();
  }
}

}  // namespace sluice_c_test::device_test
