#include <gtest/gtest.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "kernels/targets.h"

// The main() of each room's tests. Suites that are instantiated as "Long" show by many cases what others show
// by a few. They run where SLUICE_LONG_TESTS is set, as scripts/test.sh --all does, or where --gtest_filter
// names them.
namespace sluice::test {
namespace {

// Every room's tests run on no wider vectors than SLUICE_MAX_TARGET says. A word that it does not know fails
// them.
class LimitTargets : public ::testing::Environment {
 public:
  void SetUp() override { kernels::limit_targets(); }
};

}  // namespace
}  // namespace sluice::test

int main(int count, char** words) {
  // A shell lets what it starts in the background ignore SIGINT, and so would programs that tests interrupt.
  std::signal(SIGINT, SIG_DFL);
  constexpr const char* kWithoutLong = "-Long/*";
  if (GTEST_FLAG_GET(filter) == "*" && std::getenv("SLUICE_LONG_TESTS") == nullptr)
    GTEST_FLAG_SET(filter, kWithoutLong);
  ::testing::InitGoogleTest(&count, words);
  ::testing::AddGlobalTestEnvironment(new sluice::test::LimitTargets);
  const int result = RUN_ALL_TESTS();
  int left_out = 0;
  const auto& tests = *::testing::UnitTest::GetInstance();
  for (int i = 0; i < tests.total_test_suite_count(); ++i)
    if (std::string_view(tests.GetTestSuite(i)->name()).starts_with("Long/"))
      left_out += tests.GetTestSuite(i)->total_test_count();
  if (GTEST_FLAG_GET(filter) == kWithoutLong && left_out > 0)
    std::printf("%d tests named Long/* were left out; with SLUICE_LONG_TESTS=1 they run, too.\n", left_out);
  return result;
}
