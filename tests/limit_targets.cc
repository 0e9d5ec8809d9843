#include <gtest/gtest.h>

#include "kernels/targets.h"

namespace sluice::test {
namespace {

// Every room's tests run on no wider vectors than SLUICE_MAX_TARGET says. A word that it does not know fails
// them.
class LimitTargets : public ::testing::Environment {
 public:
  void SetUp() override { kernels::limit_targets(); }
};

const ::testing::Environment* const limit_targets = ::testing::AddGlobalTestEnvironment(new LimitTargets);

}  // namespace
}  // namespace sluice::test
