#include "models/run/training_setup.h"

#include "core/support.h"
#include "testing.h"
#include "thrown.h"

namespace sluice::models::training_setup_test {

TEST(CheckpointRoom, IsThatOfTheKeptOnesAndOfTheOneThatIsWritten) {
  TrainSettings settings;
  settings.keep = 3;
  EXPECT_EQ(most_checkpoints(settings), 4u);
  settings.eval_every = 10;
  EXPECT_EQ(most_checkpoints(settings), 5u) << "with validation the best one is kept, too";
  settings.keep = UINT64_MAX;
  EXPECT_EQ(most_checkpoints(settings), UINT64_MAX);
}

// Other ranks write beside rank 0's files, where none of them may be.
TEST(Outputs, AreNoFilesOfOtherRanks) {
  const TemporaryFolder folder;
  const auto refusal = [](const TrainSettings& settings) {
    return message_of([&] { check_outputs(settings); });
  };
  TrainSettings s;
  s.metrics = folder.path("run.jsonl");
  s.trace = folder.path("run.rank2.jsonl");
  s.ranks = {0, 3};
  EXPECT_THAT(refusal(s),
              AllOf(HasSubstr("--metrics of rank 2 and --trace name one file"), HasSubstr(s.trace)));
  std::swap(s.metrics, s.trace);
  EXPECT_THAT(refusal(s), HasSubstr("--trace of rank 2 and --metrics name one file"));
  s.ranks.size = 2;
  EXPECT_NO_THROW(check_outputs(s)) << "there is no rank 2";
  s.ranks.size = 3;
  s.profile = folder.path("run.html");
  s.metrics = folder.path("run.rank1.html");
  s.trace = "";
  EXPECT_THAT(refusal(s), HasSubstr("--profile of rank 1 and --metrics name one file"));
  s.metrics = folder.path("run.rank1.jsonl");
  EXPECT_NO_THROW(check_outputs(s));
}

}  // namespace sluice::models::training_setup_test
