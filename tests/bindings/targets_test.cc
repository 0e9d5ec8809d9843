#include "bindings/sluice_process.h"
#include "testing.h"

namespace sluice::cli::targets_test {

TEST(TargetsTest, AnotherWordIsRefused) {
  for (const char* word : {"avx", "AVX2", "avx512,avx2"}) {
    const Variable limit("SLUICE_MAX_TARGET", word);
    const Outcome outcome = run_sluice({"doctor"});
    EXPECT_EQ(outcome.status, 2) << word;
    EXPECT_THAT(outcome.error, HasSubstr(std::string("SLUICE_MAX_TARGET is '") + word + "'; it may be "));
    EXPECT_THAT(outcome.error, HasSubstr("scalar"));
  }
}

}  // namespace sluice::cli::targets_test
