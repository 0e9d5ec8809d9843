#include <sys/wait.h>
#include <unistd.h>

#include "cuda/gpu.h"
#include "thrown.h"
#include "variable.h"

// How a device is opened, and refused.
namespace sluice::opening_test {

using OpeningTest = GpuTest;

TEST_F(OpeningTest, SaysWhatTheDeviceIs) {
  const auto device = open_device(0);
  const DeviceInfo& info = device->info();
  EXPECT_EQ(info.index, 0);
  EXPECT_NE(info.name, "");
  EXPECT_EQ(info.pci_address.size(), std::string("0000:00:00.0").size());
  if (fake() != nullptr) {
    EXPECT_EQ(info.pci_address, "0000:1b:00.0");
  }
  EXPECT_GE(info.major, 8);
  EXPECT_GE(info.driver, 13000);
  EXPECT_GT(info.multiprocessors, 0);
  EXPECT_GT(info.copy_engines, 0);
  EXPECT_EQ(info.extent_bytes % 4096, 0U);
  EXPECT_GT(info.memory, info.extent_bytes);
  EXPECT_LE(device->free_memory(), info.memory);
  // scripts/gpu_check.sh reads them.
  RecordProperty("gpu", info.name);
  RecordProperty("capability", fmt::format("{}.{}", info.major, info.minor));
  RecordProperty("cuda_of_driver", info.driver);
  RecordProperty("memory", std::to_string(info.memory));
  RecordProperty("is_fake", fake() != nullptr ? 1 : 0);
}

TEST_F(OpeningTest, DevicesAreCounted) {
  EXPECT_GE(device_count(), 1);
  SLUICE_NEEDS_THE_FAKE();
  fake()->begin({.devices = 3, .major = 7});  // also those that are unfit
  EXPECT_EQ(device_count(), 3);
}

TEST_F(OpeningTest, MissingDriversAreNamedWithTheRemedy) {
  (void)fake();
  const Variable elsewhere("SLUICE_CUDA_DRIVER", "/nowhere/libcuda.so.1");
  expect_error(ErrorCode::kNotFound, {"/nowhere/libcuda.so.1", "580", "without a GPU"},
               [] { open_device(0); });
}

TEST_F(OpeningTest, FailuresOfTheDriverAreReportedAndNothingIsLeft) {
  SLUICE_NEEDS_THE_FAKE();
  for (const char* function :
       {"cuInit", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetName", "cuDeviceGetPCIBusId",
        "cuDeviceGetAttribute", "cuDeviceTotalMem", "cuDevicePrimaryCtxRetain",
        "cuMemGetAllocationGranularity", "cuThreadExchangeStreamCaptureMode"}) {
    fake()->begin({});
    fake()->fail(function, 0, 999);
    const std::string name = function == std::string("cuInit") ? "the GPU's driver: " : "GPU 0";
    expect_error(ErrorCode::kIo, {name, function, "CUDA_ERROR_UNKNOWN"}, [] { open_device(0); });
    EXPECT_EQ(fake()->alive(), std::vector<std::string>{}) << function;
  }
}

TEST_F(OpeningTest, DriversThatAreNotReadyHaveARemedy) {
  SLUICE_NEEDS_THE_FAKE();
  constexpr int kNotReady = 802, kMismatch = 803;  // as CUresult
  fake()->fail("cuInit", 0, kNotReady);
  expect_error(ErrorCode::kIo, {"is not ready", "802", "fabric manager", "nvidia-fabricmanager"},
               [] { open_device(0); });
  fake()->fail("cuInit", 0, kMismatch);
  expect_error(ErrorCode::kIo, {"different versions", "803", "restart the machine"}, [] { open_device(0); });
}

TEST_F(OpeningTest, ThreadsNeedNoContextOfTheirOwn) {
  const auto device = open_device(0);
  std::thread([&] { EXPECT_GT(device->free_memory(), 0U); }).join();
}

TEST_F(OpeningTest, AForkedChildIsToldThatItHasNoDriver) {
  const auto device = open_device(0);
  const pid_t child = ::fork();
  if (child == 0) {
    try {
      (void)device->free_memory();
    } catch (const Error& error) {
      ::_exit(std::string(error.what()).find("NOT_INITIALIZED") != std::string::npos ? 0 : 2);
    }
    ::_exit(1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

}  // namespace sluice::opening_test
