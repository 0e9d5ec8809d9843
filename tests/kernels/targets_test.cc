#include "kernels/targets.h"
#include "kernels/harness.h"

namespace sluice::test::targets_test {

// Each SameBits test runs on every target that has a test here. Those that this CPU lacks are skipped, with
// the reason.
TEST(Targets, Scalar) {
  const auto list = targets();
  EXPECT_NE(
      std::count(list.begin(), list.end(), HWY_SCALAR) + std::count(list.begin(), list.end(), HWY_EMU128), 0);
}

TEST(Targets, Avx2) {
#if HWY_ARCH_X86
  const auto list = targets();
  if (std::count(list.begin(), list.end(), HWY_AVX2) == 0)
    GTEST_SKIP() << "this CPU has no AVX2 with FMA, or SLUICE_MAX_TARGET leaves it out";
#else
  GTEST_SKIP() << "this CPU is not an x86";
#endif
}

TEST(Targets, Avx512) {
#if HWY_ARCH_X86
  const auto list = targets();
  if (std::count(list.begin(), list.end(), HWY_AVX3) == 0)
    GTEST_SKIP()
        << "this CPU has no AVX-512, or SLUICE_MAX_TARGET leaves it out; the kernels' AVX-512 code was built "
           "and not run";
#else
  GTEST_SKIP() << "this CPU is not an x86";
#endif
}

TEST(Targets, TheWidestIsChosenAndNamed) {
  EXPECT_EQ(kernels::chosen_target() == "avx512", hwy::SupportedTargets() % (2 * HWY_AVX3) >= HWY_AVX3);
  const OnTarget scope(targets().back());
  EXPECT_EQ(kernels::chosen_target(), "scalar");
}

}  // namespace sluice::test::targets_test
