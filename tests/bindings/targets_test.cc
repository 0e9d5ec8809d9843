#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "bindings/sluice_process.h"

namespace sluice::cli {
namespace {

using ::testing::HasSubstr;

// The environment of processes that are started while it lives.
class Limit {
 public:
  explicit Limit(const char* word) { ::setenv(kName, word, 1); }
  ~Limit() {
    if (before_ == nullptr)
      ::unsetenv(kName);
    else
      ::setenv(kName, text_.c_str(), 1);
  }
  Limit(const Limit&) = delete;
  Limit& operator=(const Limit&) = delete;

 private:
  static constexpr const char* kName = "SLUICE_MAX_TARGET";
  const char* const before_ = std::getenv(kName);
  const std::string text_ = before_ == nullptr ? "" : before_;
};

TEST(TargetsTest, LoopsRunOnNoWiderVectorsThanTheEnvironmentSays) {
  const Limit limit("scalar");
  EXPECT_THAT(run_sluice({"doctor"}).out, HasSubstr("loops run on scalar"));
}

TEST(TargetsTest, AnotherWordIsRefused) {
  for (const char* word : {"avx", "AVX2", "avx512,avx2"}) {
    const Limit limit(word);
    const Outcome outcome = run_sluice({"doctor"});
    EXPECT_EQ(outcome.status, 2) << word;
    EXPECT_THAT(outcome.error, HasSubstr(std::string("SLUICE_MAX_TARGET is '") + word + "'; it may be "));
    EXPECT_THAT(outcome.error, HasSubstr("scalar"));
  }
}

}  // namespace
}  // namespace sluice::cli
