#include "bindings/cli/doctor.h"
#include "core/bytes.h"
#include "cuda/gpu.h"
#include "testing.h"

// `sluice doctor` describes GPUs, here on the fake driver. Each defect is a finding that says what to do
// about it.
namespace sluice::cli::doctor_gpu_test {

class DoctorGpuTest : public GpuTest {
 protected:
  void SetUp() override {
    SLUICE_NEEDS_THE_FAKE();
    GpuTest::SetUp();
  }
  static std::vector<Finding> found(const fake_cuda::Settings& settings) {
    fake()->begin(settings);
    std::vector<Finding> findings = gpu_findings();
    EXPECT_EQ(fake()->alive(), std::vector<std::string>{});
    return findings;
  }
  static Finding named(const std::vector<Finding>& findings, const std::string& name) {
    const auto at = std::ranges::find(findings, name, &Finding::name);
    if (at != findings.end()) return *at;
    ADD_FAILURE() << "there is no finding of " << name;
    return {};
  }
};

TEST_F(DoctorGpuTest, CardsAndKernelsAreNamed) {
  const auto findings = found({.memory = 64 * kMiB, .context_memory = 4 * kMiB, .devices = 2});
  EXPECT_EQ(named(findings, "GPU").value.at("count"), 2);
  for (const int index : {0, 1}) {
    const Finding card = named(findings, fmt::format("GPU {}", index));
    EXPECT_THAT(card.text, HasSubstr("fake GPU"));
    EXPECT_THAT(card.text,
                HasSubstr("compute capability 9.0, a driver of CUDA 13.0; 60.0 MiB free of 64.0 MiB"));
    EXPECT_EQ(card.remedy, "");
    EXPECT_EQ(card.value.at("free"), 60 * kMiB);
  }
  EXPECT_EQ(named(findings, "NCCL").value.at("version"), "2.28.9");
  const Finding old = named(found({.nccl = 21903}), "NCCL");
  EXPECT_THAT(old.text, HasSubstr("through host memory"));
  EXPECT_THAT(std::string(old.value.at("why")), HasSubstr("is NCCL 2.19.3"));
  EXPECT_EQ(old.remedy, "");
  const Finding kernels = named(findings, "GPU kernels");
  EXPECT_EQ(kernels.value.at("present"), kernels.remedy.empty());
  if (!kernels.remedy.empty()) {
    EXPECT_THAT(kernels.remedy, HasSubstr("scripts/kernels.sh"));
  }
}

TEST_F(DoctorGpuTest, CardsThatCannotBeUsedHaveARemedy) {
  const auto remedy = [&](const fake_cuda::Settings& settings, const char* name) {
    const Finding finding = named(found(settings), name);
    EXPECT_THAT(finding.text, HasSubstr("cannot be used"));
    return finding.remedy;
  };
  EXPECT_THAT(remedy({.major = 7}, "GPU 0"), HasSubstr("capability 7.0"));
  EXPECT_THAT(remedy({.has_virtual_memory = false}, "GPU 0"), HasSubstr("a whole GPU"));
  EXPECT_THAT(remedy({.is_busy = true}, "GPU 0"), HasSubstr("busy"));
  EXPECT_THAT(remedy({.driver = 12080}, "GPU"), HasSubstr("580 or later"));
  EXPECT_THAT(remedy({.devices = 0}, "GPU"), HasSubstr("CUDA_VISIBLE_DEVICES"));
  const Variable elsewhere("SLUICE_CUDA_DRIVER", "/nowhere/libcuda.so.1");
  EXPECT_THAT(remedy({}, "GPU"), HasSubstr("/nowhere/libcuda.so.1"));
}

// A machine of this kind runs CI.
TEST_F(DoctorGpuTest, WithoutASignOfAGpuNothingIsMissing) {
  const Variable none("SLUICE_CUDA_DRIVER", std::nullopt);
  for (const Finding& finding : gpu_findings())
    if (finding.name == "GPU" && finding.value.at("count").is_null() && finding.value.at("devices").empty()) {
      EXPECT_EQ(finding.remedy, "");
      EXPECT_THAT(finding.text, HasSubstr("Sluice computes on the CPU"));
    }
}

}  // namespace sluice::cli::doctor_gpu_test
