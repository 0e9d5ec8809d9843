#include "models/run/training_setup.h"

#include <gtest/gtest.h>

namespace sluice::models {
namespace {

TEST(CheckpointRoom, IsThatOfTheKeptOnesAndOfTheOneThatIsWritten) {
  TrainSettings settings;
  settings.keep = 3;
  EXPECT_EQ(most_checkpoints(settings), 4u);
  settings.eval_every = 10;
  EXPECT_EQ(most_checkpoints(settings), 5u) << "with validation the best one is kept, too";
  settings.keep = UINT64_MAX;
  EXPECT_EQ(most_checkpoints(settings), UINT64_MAX);
}

}  // namespace
}  // namespace sluice::models
