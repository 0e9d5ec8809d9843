#include "engine/machine/gpu_rates.h"

#include "core/bytes.h"
#include "cuda/kernel_test.h"
#include "testing.h"
#include "thrown.h"

// The rates that a plan for a GPU is made by are measured on that GPU, and the measurement leaves nothing.
// The fake's speed says nothing.
namespace sluice::engine::gpu_rates_test {

class GpuRatesTest : public KernelTest {
 protected:
  MachineRates measured(std::uint64_t device_bytes, std::uint64_t host_bytes, bool wanted = true,
                        const char* optimizer = "adamw") {
    MachineRates rates;
    const auto made = optim::make_optimizer({.name = optimizer});
    GpuWork work{*device_, threads_, *made, Dtype::kBf16, nullptr, device_bytes, host_bytes};
    phases_ = 0;
    work.begin_phase = [&] { ++phases_; };
    EXPECT_EQ(measure_gpu(work, rates), wanted);
    return rates;
  }
  Threads threads_{2};
  int phases_ = 0;
};

TEST_F(GpuRatesTest, AreFoundAndLeaveNothing) {
  const MachineRates rates = measured(32 * kMiB, kGiB);
  EXPECT_EQ(rates.gpu.source, Source::kMeasured);
  for (const double rate : {rates.gpu.in, rates.gpu.out, rates.gpu.both, rates.gpu.update_seconds}) {
    EXPECT_GT(rate, 0);
    EXPECT_TRUE(std::isfinite(rate));
  }
  const MachineRates assumed;
  EXPECT_NE(rates.gpu.in, assumed.gpu.in);
  EXPECT_NE(rates.gpu.update_seconds, assumed.gpu.update_seconds);
  EXPECT_NE(rates.memory_bandwidth, assumed.memory_bandwidth);
  EXPECT_GT(rates.update_seconds.value_or(0), 0);
  EXPECT_EQ(phases_, 6) << "three ways of copies, updates by either, and those beside copies";
  if (fake() != nullptr) {
    EXPECT_EQ(fake()->memory_taken(), 0u);
    // Each chunk is queued as the engine does it, so that others can wait for it.
    auto calls = fake()->counts().calls;
    EXPECT_GE(calls["cuEventRecord"], calls["cuLaunchKernel"]);
    // Five runs to the GPU alone, five both ways, and copies beside each of five runs of the CPU's loops.
    EXPECT_GE(calls["cuMemcpyHtoDAsync"], 15u);
    EXPECT_EQ(calls["cuMemcpyHtoDAsync"], calls["cuMemcpyDtoHAsync"]);
  }
}

// The GPU has no more than was allowed for it, in which the measurement would else not fit.
TEST_F(GpuRatesTest, TakeNoMoreMemoryThanTheyMay) {
  SLUICE_NEEDS_THE_FAKE();
  device_.reset();
  fake()->begin({.memory = 20 * kMiB});
  device_ = open_device(0);
  EXPECT_EQ(measured(20 * kMiB, kGiB).gpu.source, Source::kMeasured);
  expect_error(ErrorCode::kBudget, {"20.0 MiB are free"}, [&] { measured(24 * kMiB, kGiB); });
}

TEST_F(GpuRatesTest, WithoutMemoryNothingIsKnown) {
  EXPECT_EQ(measured(4 * kMiB - 1, kGiB, false).gpu, GpuRates());
  EXPECT_EQ(measured(kGiB, 128 * kMiB - 1, false).gpu, GpuRates());
}

TEST_F(GpuRatesTest, AnOptimizerWithoutStateHasARateToo) {
  EXPECT_NE(measured(8 * kMiB, kGiB, true, "sgd").gpu.update_seconds, GpuRates().update_seconds);
}

// An optimizer that a GPU does not update has no rate there.
TEST_F(GpuRatesTest, AnOptimizerOfTheCpuAloneKeepsTheGpusRate) {
  const MachineRates rates = measured(8 * kMiB, kGiB, true, "adafactor");
  EXPECT_EQ(rates.gpu.source, Source::kMeasured);
  EXPECT_EQ(rates.gpu.update_seconds, GpuRates().update_seconds);
}

TEST_F(GpuRatesTest, EachCallThatFailsIsAnErrorAndNothingIsLeft) {
  SLUICE_NEEDS_THE_FAKE();
  for (const char* function :
       {"cuMemCreate", "cuMemMap", "cuMemHostRegister", "cuStreamCreateWithPriority", "cuMemcpyHtoDAsync",
        "cuMemcpyDtoHAsync", "cuStreamSynchronize", "cuMemsetD8Async", "cuModuleLoadData", "cuLaunchKernel",
        "cuEventCreate", "cuEventRecord"}) {
    SCOPED_TRACE(function);
    device_.reset();
    fake()->begin({.schedule = Schedule::kLate});
    device_ = open_device(0);
    fake()->fail(function, 0, 719);
    expect_error(ErrorCode::kIo, {function}, [&] { measured(8 * kMiB, kGiB); });
    device_.reset();
    EXPECT_EQ(fake()->alive(), std::vector<std::string>{});
    EXPECT_EQ(fake()->take_misuses(), std::vector<std::string>{});
  }
}

TEST_F(GpuRatesTest, AFileOfKernelsThatTheDriverRefusesIsNamedWithTheRemedy) {
  SLUICE_NEEDS_THE_FAKE();
  constexpr int kInvalidImage = 200, kNoBinary = 209, kInvalidPtx = 218, kNewerPtx = 222;  // as CUresult
  for (const int refused : {kInvalidImage, kNoBinary, kInvalidPtx, kNewerPtx}) {
    const std::vector<std::string> parts = {fmt::format("libsluice_kernels.fatbin: error {};", refused),
                                            "install the wheel again", "scripts/kernels.sh", "newer driver"};
    fake()->fail("cuModuleLoadData", 0, refused);
    expect_error(ErrorCode::kNotFound, parts, [&] { device_->measure_context(); });
    fake()->fail("cuModuleLoadData", 0, refused);
    expect_error(ErrorCode::kNotFound, parts, [&] { (void)device_->kernel("sluice_sum"); });
  }
}

}  // namespace sluice::engine::gpu_rates_test
