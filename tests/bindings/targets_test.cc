#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "bindings/sluice_process.h"

namespace sluice::cli {
namespace targets_test {

using ::testing::HasSubstr;

TEST(TargetsTest, AnotherWordIsRefused) {
  for (const char* word : {"avx", "AVX2", "avx512,avx2"}) {
    const Variable limit("SLUICE_MAX_TARGET", word);
    const Outcome outcome = run_sluice({"doctor"});
    EXPECT_EQ(outcome.status, 2) << word;
    EXPECT_THAT(outcome.error, HasSubstr(std::string("SLUICE_MAX_TARGET is '") + word + "'; it may be "));
    EXPECT_THAT(outcome.error, HasSubstr("scalar"));
  }
}

}  // namespace targets_test
}  // namespace sluice::cli
