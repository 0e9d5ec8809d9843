#include "tests/bindings/c/fake_gpu.h"

// Tests that what a GPU cannot do is an error that says what to do, after which nothing is left, and that
// nothing is ever computed on the CPU instead.
namespace sluice_c_test::device_input_test {

constexpr uint64_t kMiB = uint64_t{1} << 20;

class DeviceInputTest : public FakeGpuTest {
 protected:
  using Change = void (*)(sluice_engine_options&);
  sluice_status made(Change change = nullptr) {
    const ModelHandle model = make_model();
    const std::string path = folder_.path();
    const sluice_folder disk = {path.c_str(), 0};
    Choice setup;
    setup.device_memory = 128 * kMiB;
    sluice_engine_options options = options_of(setup, &disk);
    if (change != nullptr) change(options);
    sluice_engine* engine = nullptr;
    const sluice_status status = sluice_engine_create(model.get(), &options, &engine);
    EXPECT_EQ(engine == nullptr, status != SLUICE_OK);
    sluice_engine_destroy(engine);
    EXPECT_EQ(fake().alive(), std::vector<std::string>{});
    return status;
  }
  void refused(const fake_cuda::Settings& settings, sluice_status status,
               const std::vector<std::string>& parts, Change change = nullptr) {
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
          [](sluice_engine_options& options) { options.device = 7; });
  refused({.major = 7}, SLUICE_NOT_FOUND, {"capability 7.0", "8.0", "another GPU"});
  refused({.has_virtual_memory = false}, SLUICE_NOT_FOUND, {"cannot map memory", "whole GPU"});
  refused({.compute_mode = 2}, SLUICE_NOT_FOUND, {"prohibited", "nvidia-smi -c DEFAULT"});
  refused({.is_busy = true}, SLUICE_IO, {"is busy", "another GPU"});
}

TEST_F(DeviceInputTest, BudgetsThatTheGpuDoesNotHave) {
  refused({.memory = 100 * kMiB}, SLUICE_BUDGET,
          {"device_memory is 128 MiB", "fake GPU", "100 MiB", "state less"});
  refused({}, SLUICE_BUDGET, {"short by", "device_memory="},
          [](sluice_engine_options& options) { options.device_memory = kMiB; });
  refused({}, SLUICE_BUDGET, {"reserved of the GPU's memory", "state more"},
          [](sluice_engine_options& options) { options.device_reserved = options.device_memory; });
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
  refused({}, SLUICE_INVALID_ARGUMENT, {"options.device is 1", "the CPU computes", "state how much"},
          [](sluice_engine_options& options) { options.device = 1, options.device_memory = 0; });
  refused({}, SLUICE_INVALID_ARGUMENT, {"serve_touches", "cannot be served", "acquire"},
          [](sluice_engine_options& options) { options.serve_touches = 1; });
  refused({}, SLUICE_INVALID_ARGUMENT, {"reproducible"},
          [](sluice_engine_options& options) { options.reproducible = options.micro_batches = 1; });
  refused({}, SLUICE_INVALID_ARGUMENT, {"options.links is 'nvlink'", "'gpus' or 'host'"},
          [](sluice_engine_options& options) { options.links = "nvlink"; });
  refused({}, SLUICE_INVALID_ARGUMENT, {"options.links is 'gpus'", "device_memory is 0"},
          [](sluice_engine_options& options) { options.links = "gpus", options.device_memory = 0; });
  refused({}, SLUICE_INVALID_ARGUMENT, {"'elsewhere'", "device"},
          [](sluice_engine_options& options) { options.place_state = "elsewhere"; });
}

TEST_F(DeviceInputTest, UpdatesThatCannotBe) {
  refused({}, SLUICE_INVALID_ARGUMENT, {"options.updates is 'tpu'", "'gpu' or 'cpu'"},
          [](sluice_engine_options& options) { options.updates = "tpu"; });
  refused({}, SLUICE_INVALID_ARGUMENT, {"options.updates is 'cpu'", "device_memory is 0"},
          [](sluice_engine_options& options) { options.updates = "cpu", options.device_memory = 0; });
  refused({}, SLUICE_INVALID_ARGUMENT, {"updates on the GPU", "adafactor", "let the CPU update"},
          [](sluice_engine_options& options) { options.updates = "gpu", options.optimizer = "adafactor"; });
  refused({}, SLUICE_INVALID_ARGUMENT, {"state on the GPU", "the CPU updates"},
          [](sluice_engine_options& options) { options.updates = "cpu", options.place_state = "device"; });
}

TEST_F(DeviceInputTest, FactsThatCannotBe) {
  refused({}, SLUICE_INVALID_ARGUMENT, {"options.device_facts.both_ways is 0", "leave out"},
          [](sluice_engine_options& options) {
            static sluice_device_facts facts = SLUICE_INIT(sluice_device_facts);
            facts.to_gpu = facts.from_gpu = 1;
            options.device_facts = &facts;
          });
  refused({}, SLUICE_INVALID_ARGUMENT, {"options.device_facts.computing is -1", "0 or more"},
          [](sluice_engine_options& options) {
            static sluice_device_facts facts = SLUICE_INIT(sluice_device_facts);
            facts.to_gpu = facts.from_gpu = facts.both_ways = facts.gpu_updates = facts.cpu_memory = 1e9;
            facts.computing = -1;
            options.device_facts = &facts;
          });
  refused({}, SLUICE_INVALID_ARGUMENT, {"options.device_facts.between_gpus is -1", "or 0"},
          [](sluice_engine_options& options) {
            static sluice_device_facts facts = SLUICE_INIT(sluice_device_facts);
            facts.to_gpu = facts.from_gpu = facts.both_ways = facts.gpu_updates = facts.cpu_memory = 1e9;
            facts.between_gpus = -1;
            options.device_facts = &facts;
          });
  refused({}, SLUICE_INVALID_ARGUMENT, {"device_facts are given", "device_memory is 0"},
          [](sluice_engine_options& options) {
            static const sluice_device_facts facts = SLUICE_INIT(sluice_device_facts);
            options.device_facts = &facts;
            options.device_memory = 0;
          });
  refused({}, SLUICE_BUDGET, {"short by", "1.00 GiB of it for CUDA and the client"},
          [](sluice_engine_options& options) {
            static sluice_device_facts facts = SLUICE_INIT(sluice_device_facts);
            facts.to_gpu = facts.from_gpu = facts.both_ways = facts.gpu_updates = facts.cpu_memory = 1e9;
            facts.base = 1024 * kMiB;
            options.device_facts = &facts;
          });
}

// A place on a GPU is not the host's memory where the CPU computes.
TEST_F(DeviceInputTest, PlacesThatOnlyAGpuHas) {
  refused({}, SLUICE_INVALID_ARGUMENT, {"place is 'device'", "state it"}, [](sluice_engine_options& options) {
    options.device_memory = 0;
    options.place_parameters = "device";
  });
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
