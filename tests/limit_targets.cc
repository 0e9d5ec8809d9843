#include <gtest/gtest.h>

#include "kernels/targets.h"

namespace sluice::test {
namespace {

// Every room's tests run on vectors no wider than SLUICE_MAX_TARGET says; what it cannot say fails them.
class LimitTargets : public ::testing::Environment {
 public:
  void SetUp() override { kernels::limit_targets(); }
};

const ::testing::Environment* const limit_targets = ::testing::AddGlobalTestEnvironment(new LimitTargets);

}  // namespace
}  // namespace sluice::test
