#include "engine/machine/process.h"

#include "core/bytes.h"
#include "testing.h"
#include "tests/thrown.h"

namespace sluice::engine::process_test {

TEST(GroupLimit, SaysThatMemoryIsNotThereForAllRanks) {
  expect_error(ErrorCode::kBudget,
               {"--memory is 300 MiB", "each of the 2 ranks", "may have 70.0 MiB", "at most 35.0 MiB"},
               [] { check_group_limit(300 * kMiB, 2, "--memory is", std::size_t{70} * kMiB); });
  expect_error(ErrorCode::kBudget, {},
               [] { check_group_limit(kMiB + 1, 1, "--memory is", std::size_t{kMiB}); });
}

TEST(GroupLimit, LeavesWhatIsThere) {
  EXPECT_NO_THROW(check_group_limit(35 * kMiB, 2, "", std::size_t{70} * kMiB));
  EXPECT_NO_THROW(check_group_limit(300 * kGiB, 64, "", std::nullopt));
}

TEST(MachineMemory, SaysThatAPlanCannotBeHeld) {
  expect_error(ErrorCode::kBudget,
               {"takes 300 MiB", "each of the 2 ranks", "has 70.0 MiB", "at most 35.0 MiB"},
               [] { check_machine_memory(300 * kMiB, 2, std::size_t{70} * kMiB); });
  EXPECT_NO_THROW(check_machine_memory(35 * kMiB, 2, std::size_t{70} * kMiB));
  EXPECT_NO_THROW(check_machine_memory(300 * kGiB, 64, std::nullopt));
}

}  // namespace sluice::engine::process_test
