#include "tests/bindings/c/fake_gpu.h"

// Tests that what a GPU cannot do is an error that says what to do, after which nothing is left, and that
// nothing is ever computed on the CPU instead.
namespace sluice_c_test::device_input_test {

constexpr uint64_t kMiB = uint64_t{1} << 20;

class DeviceInputTest : public FakeGpuTest {
 protected:
  using Options = sluice_engine_options;
  using Change = std::function<void(Options&)>;
  sluice_status made(const Change& change = {}) {
    const ModelHandle model = make_model();
    const std::string path = folder_.path();
    const sluice_folder disk = {path.c_str(), 0};
    Choice setup;
    setup.device_memory = 128 * kMiB;
    sluice_engine_options options = options_of(setup, &disk);
    if (change) change(options);
    sluice_engine* engine = nullptr;
    const sluice_status status = sluice_engine_create(model.get(), &options, &engine);
    EXPECT_EQ(engine == nullptr, status != SLUICE_OK);
    sluice_engine_destroy(engine);
    EXPECT_EQ(fake().alive(), std::vector<std::string>{});
    return status;
  }
  void refused(const fake_cuda::Settings& settings, sluice_status status,
               const std::vector<std::string>& parts, const Change& change = {}) {
    fake().begin(settings);
    expect_error(made(change), status, parts);
  }
};

TEST_F(DeviceInputTest, DriversThatAreMissingOrTooOld) {
  ::setenv("SLUICE_CUDA_DRIVER", "/nowhere/libcuda.so.1", 1);
  expect_error(made(), SLUICE_NOT_FOUND, {"/nowhere/libcuda.so.1", "580", "do without a GPU"});
  ::setenv("SLUICE_CUDA_DRIVER", "libm.so.6", 1);
  expect_error(made(), SLUICE_NOT_FOUND, {"libm.so.6", "no driver", "580"});
  ::setenv("SLUICE_CUDA_DRIVER", path().c_str(), 1);
  refused({.driver = 12080}, SLUICE_NOT_FOUND, {"CUDA 12.8", "13.0 is needed", "580"});
}

TEST_F(DeviceInputTest, GpusThatAreUnfit) {
  refused({.devices = 0}, SLUICE_NOT_FOUND, {"finds none", "CUDA_VISIBLE_DEVICES"});
  refused({.devices = 2}, SLUICE_NOT_FOUND, {"GPU 7 was asked for", "GPUs 0 to 1 alone"},
          [](Options& options) { options.device = 7; });
  refused({.major = 7}, SLUICE_NOT_FOUND, {"capability 7.0", "8.0", "another GPU"});
  refused({.has_virtual_memory = false}, SLUICE_NOT_FOUND, {"cannot map memory", "whole GPU"});
  refused({.compute_mode = 2}, SLUICE_NOT_FOUND, {"prohibited", "nvidia-smi -c DEFAULT"});
  refused({.is_busy = true}, SLUICE_IO, {"is busy", "another GPU"});
}

TEST_F(DeviceInputTest, BudgetsThatTheGpuDoesNotHave) {
  refused({.memory = 100 * kMiB}, SLUICE_BUDGET,
          {"device_memory is 128 MiB", "fake GPU", "100 MiB", "state less"});
  refused({}, SLUICE_BUDGET, {"short by", "device_memory="},
          [](Options& options) { options.device_memory = kMiB; });
  refused({}, SLUICE_BUDGET, {"reserved of the GPU's memory", "state more"},
          [](Options& options) { options.device_reserved = options.device_memory; });
}

TEST_F(DeviceInputTest, MemoryThatOthersHave) {
  Choice setup;
  setup.place = "device";
  setup.device_memory = 64 * kMiB;
  fake().begin({.memory = 64 * kMiB});
  const ModelHandle model = make_model();
  const sluice_engine_options options = options_of(setup, nullptr);
  sluice_engine *first = nullptr, *second = nullptr;
  ASSERT_OK(sluice_engine_create(model.get(), &options, &first));
  expect_error(sluice_engine_create(model.get(), &options, &second), SLUICE_BUDGET,
               {"are free", "end what else uses it", "less device memory"});
  EXPECT_EQ(second, nullptr);
  sluice_engine_destroy(first);
}

TEST_F(DeviceInputTest, HostMemoryThatTheDriverDoesNotRegister) {
  fake().fail("cuMemHostRegister", 0, 2);
  expect_error(made(), SLUICE_IO,
               {"refuses to register", "iB of host memory", "state less memory", "ulimit -l"});
}

TEST_F(DeviceInputTest, OptionsThatDoNotGoTogether) {
  const std::pair<std::vector<std::string>, Change> all[] = {
      {{"options.device is 1", "the CPU computes", "state how much"},
       [](Options& o) { o.device = 1, o.device_memory = 0; }},
      {{"serve_touches", "cannot be served", "acquire"}, [](Options& o) { o.serve_touches = 1; }},
      {{"reproducible"}, [](Options& o) { o.reproducible = o.micro_batches = 1; }},
      {{"options.links is 'nvlink'", "'gpus', 'nccl' or 'host'"}, [](Options& o) { o.links = "nvlink"; }},
      {{"options.links is 'gpus'", "device_memory is 0"},
       [](Options& o) { o.links = "gpus", o.device_memory = 0; }},
      {{"'elsewhere'", "device"}, [](Options& o) { o.place_state = "elsewhere"; }},
      {{"options.updates is 'tpu'", "'gpu' or 'cpu'"}, [](Options& o) { o.updates = "tpu"; }},
      {{"options.updates is 'cpu'", "device_memory is 0"},
       [](Options& o) { o.updates = "cpu", o.device_memory = 0; }},
      {{"updates on the GPU", "adafactor", "let the CPU update"},
       [](Options& o) { o.updates = "gpu", o.optimizer = "adafactor"; }},
      {{"state on the GPU", "the CPU updates"},
       [](Options& o) { o.updates = "cpu", o.place_state = "device"; }},
      // A place on a GPU is not the host's memory where the CPU computes.
      {{"place is 'device'", "state it"},
       [](Options& o) { o.device_memory = 0, o.place_parameters = "device"; }}};
  for (const auto& [parts, change] : all) refused({}, SLUICE_INVALID_ARGUMENT, parts, change);
}

TEST_F(DeviceInputTest, FactsThatCannotBe) {
  sluice_device_facts facts = SLUICE_INIT(sluice_device_facts);
  const auto refuse = [&](sluice_status status, const std::vector<std::string>& parts) {
    refused({}, status, parts, [&](Options& options) { options.device_facts = &facts; });
  };
  refused({}, SLUICE_INVALID_ARGUMENT, {"device_facts are given", "device_memory is 0"},
          [&](Options& options) { options.device_facts = &facts, options.device_memory = 0; });
  facts.to_gpu = facts.from_gpu = 1;
  refuse(SLUICE_INVALID_ARGUMENT, {"options.device_facts.both_ways is 0", "leave out"});
  facts.to_gpu = facts.from_gpu = facts.both_ways = facts.gpu_updates = facts.cpu_memory = 1e9;
  facts.computing = -1;
  refuse(SLUICE_INVALID_ARGUMENT, {"options.device_facts.computing is -1", "0 or more"});
  facts.computing = 0, facts.between_gpus = -1;
  refuse(SLUICE_INVALID_ARGUMENT, {"options.device_facts.between_gpus is -1", "or 0"});
  facts.between_gpus = 0, facts.base = 1024 * kMiB;
  refuse(SLUICE_BUDGET, {"short by", "1.00 GiB of it for CUDA and the client"});
}

TEST_F(DeviceInputTest, WhatAnEngineOnAGpuCannotDoYet) {
  Choice setup;
  setup.device_memory = 128 * kMiB;
  const EngineHandle engine = make_engine(setup, folder_.path());
  set_start_values(engine.get());
  expect_error(sluice_engine_replan(engine.get(), 0), SLUICE_STATE, {"keeps its plan", "another engine"});
  std::vector<sluice_home*> homes(kUnits, nullptr);
  expect_error(sluice_engine_leave(engine.get(), 1, 0, homes.data()), SLUICE_STATE, {"save them"});
  EXPECT_EQ(homes[0], nullptr);
}

}  // namespace sluice_c_test::device_input_test
