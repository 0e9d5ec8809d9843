#include <fmt/format.h>

#include "bindings/run_outputs.h"
#include "core/json.h"
#include "testing.h"

// Tests which checkpoints --keep leaves, with validation and without.
namespace sluice::cli::best_checkpoint_test {

class BestCheckpointTest : public ::testing::Test {
 protected:
  // The validation text does not occur in training: the more is learned, the larger its loss becomes.
  BestCheckpointTest() {
    std::ofstream(text_) << lesson();
    std::ofstream(other_) << std::string(3000, 'Q');
  }

  std::vector<std::string> words(const std::string& name, int steps,
                                 const std::vector<std::string>& more = {}) const {
    return tiny_training(text_, folder_ / name, steps,
                         {{"--threads", "1", "--save-every", "2", "--keep", "1"}, more});
  }
  std::vector<std::string> validated(const std::string& name, int steps,
                                     const std::vector<std::string>& more = {},
                                     const std::string& batches = "1") const {
    return with_flags(words(name, steps,
                            {"--valid", other_, "--eval-every", "3", "--eval-batches", batches, "--metrics",
                             folder_ / "m"}),
                      more);
  }
  static Outcome done(const std::vector<std::string>& all) {
    Outcome outcome = run_sluice(all);
    EXPECT_EQ(outcome.status, 0) << outcome.error << outcome.out;
    return outcome;
  }
  std::vector<int> steps(const std::string& name) const {
    std::vector<int> found;
    const Json run = inspected(name);
    for (const Json& each : run.at("checkpoints")) found.push_back(each.at("step"));
    return found;
  }
  Json inspected(const std::string& name) const {
    return Json::parse(done({"inspect", "--json", folder_ / name}).out);
  }
  std::map<int, double> validation_losses() const {
    std::map<int, double> found;
    for (const Json& row : rows_of(folder_ / "m"))
      if (row.contains("validation_loss")) found[row.at("step")] = row.at("validation_loss").get<double>();
    return found;
  }

  TemporaryFolder folder_;
  const std::string text_ = folder_ / "text.txt", other_ = folder_ / "other.txt";
};

TEST_F(BestCheckpointTest, WithoutValidationTheNewestStay) {
  const Outcome outcome = done(words("plain", 10));
  EXPECT_THAT(steps("plain"), ElementsAre(10));
  EXPECT_EQ(inspected("plain").at("best"), Json());
  EXPECT_THAT(outcome.out, HasSubstr("; --keep removed step-00000008\n"));
  expect_refusal({"generate", "--checkpoint", folder_ / "plain", "--best"}, 2, {"with a validation loss"});
}

TEST_F(BestCheckpointTest, TheBestStaysBesideTheNewestAlsoOverAResume) {
  done(validated("run", 12));
  const std::map<int, double> losses = validation_losses();
  std::vector<int> measured;
  int best = 2;
  for (const auto& [step, loss] : losses) {
    measured.push_back(step);
    if (step % 2 == 0 && loss < losses.at(best)) best = step;
  }
  EXPECT_THAT(measured, ElementsAre(2, 3, 4, 6, 8, 9, 10, 12)) << "every third, and before each checkpoint";
  ASSERT_LT(best, 10) << "the loss falls to the end: nothing is tried";
  EXPECT_THAT(steps("run"), ElementsAre(best, 12));

  const Outcome resumed = done(validated("run", 16, {"--resume"}));
  EXPECT_THAT(steps("run"), ElementsAre(best, 16));
  const std::string folder = folder_ / fmt::format("run/step-{:08}", best);
  EXPECT_EQ(inspected("run").at("best"),
            (Json{{"step", best}, {"path", folder}, {"validation_loss", losses.at(best)}}));
  EXPECT_THAT(resumed.out, HasSubstr(fmt::format("the best by validation is that of step {}\n", best)));
  EXPECT_THAT(resumed.out,
              HasSubstr(fmt::format("best by validation: {} (loss {:.4f})\n", folder, losses.at(best))));

  // The best one stays also where the run goes on without validation.
  done(words("run", 18, {"--resume", "--held-out", "0"}));
  EXPECT_THAT(steps("run"), ElementsAre(best, 18));
  const auto generated = [&](const std::string& checkpoint, const std::vector<std::string>& more) {
    std::vector<std::string> all = {
        "generate", "--checkpoint", checkpoint, "--prompt",  "the ", "--temperature", "0", "--tokens",
        "24",       "--memory",     "600MiB",   "--threads", "1"};
    all.insert(all.end(), more.begin(), more.end());
    return done(all).out;
  };
  const std::string of_best = generated(folder, {});
  EXPECT_EQ(generated(folder_ / "run", {"--best"}), of_best);
  EXPECT_NE(generated(folder_ / "run", {}), of_best);
}

TEST_F(BestCheckpointTest, LossesOfAnotherValidationAreNotCompared) {
  done(validated("run", 8));
  const Outcome resumed = done(validated("run", 12, {"--resume"}, "2"));
  EXPECT_THAT(resumed.error, HasSubstr("validated by other data or another number of batches"));
  ASSERT_GE(inspected("run").at("best").at("step").get<int>(), 10);
}

}  // namespace sluice::cli::best_checkpoint_test
