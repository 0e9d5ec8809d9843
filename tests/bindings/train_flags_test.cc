#include <unistd.h>
#include <CLI/CLI.hpp>

#include "bindings/cli/commands.h"
#include "bindings/sluice_process.h"
#include "core/error.h"
#include "models/run/training_setup.h"
#include "offload/disk_folders.h"
#include "testing.h"
#include "thrown.h"

namespace sluice::cli::train_flags_test {

models::TrainSettings settings_of(std::vector<std::string> words) {
  CLI::App app{"", "train"};
  app.allow_extras();
  TrainOptions options;
  bind_train(app, options);
  std::reverse(words.begin(), words.end());
  app.parse(words);
  refuse_unknown(app);
  return finish_settings(app, options);
}

std::string error_of(const std::vector<std::string>& words) {
  return message_of([&] { settings_of(words); });
}

TEST(TrainFlagsTest, AWholeCommandLineIsUnderstood) {
  const models::TrainSettings s = settings_of(words_of(
      "--model tiny --data a.txt b --memory 1GiB --disk /x:20GiB /y --dtype bf16 --batch 2 --accumulate 8 "
      "--seq 64 --steps 50 --lr 1e-3 --warmup 5 --schedule linear --clip 0.5 --weight-decay 0.2 --seed 7 "
      "--out o --save-every 10 --keep 3 --resume --recompute full --threads 2 --metrics m.jsonl "
      "--trace t.json --valid v.txt --eval-every 5"));
  EXPECT_EQ(s.data, (std::vector<std::string>{"a.txt", "b"}));
  EXPECT_EQ(s.memory, 1073741824u);
  ASSERT_EQ(s.disk.size(), 2u);
  EXPECT_EQ(s.disk[0].path, "/x");
  EXPECT_EQ(s.disk[0].limit, 21474836480u);
  EXPECT_EQ(s.disk[1].path, "/y");
  EXPECT_EQ(s.disk[1].limit, offload::kWholeDisk);
  EXPECT_EQ(s.dtype, Dtype::kBf16);
  EXPECT_EQ(s.batch, 2u);
  EXPECT_EQ(s.accumulate, 8u);
  EXPECT_EQ(s.length, 64u);
  EXPECT_EQ(s.schedule, "linear");
  EXPECT_EQ(s.learning_rate, 1e-3);
  EXPECT_EQ(s.warmup, 5u);
  EXPECT_EQ(s.clip, 0.5);
  EXPECT_EQ(s.weight_decay, 0.2);
  EXPECT_EQ(s.plan.recompute, "full");
  EXPECT_EQ(s.validation, "v.txt");
  EXPECT_EQ(s.keep, 3u);
  EXPECT_TRUE(s.resume);
}

TEST(TrainFlagsTest, PrecisionAndClipping) {
  const models::TrainSettings plain = settings_of({"--model", "tiny", "--data", "a"});
  EXPECT_FALSE(plain.loss_scale || plain.initial_scale || plain.scale_growth_interval);
  EXPECT_EQ(plain.clip_value, 0);
  const models::TrainSettings half =
      settings_of({"--model", "tiny", "--data", "a", "--dtype", "f16", "--loss-scale", "dynamic",
                   "--initial-scale", "64", "--scale-growth-interval", "5", "--clip-value", "0.5"});
  EXPECT_EQ(half.dtype, Dtype::kF16);
  EXPECT_EQ(models::loss_scale_of(half), models::LossScale::dynamic(64, 5));
  EXPECT_EQ(half.clip_value, 0.5);
  EXPECT_THAT(error_of({"--model", "tiny", "--data", "a", "--initial-scale", "many"}),
              HasSubstr("--initial-scale"));
  EXPECT_THAT(error_of({"--model", "tiny", "--data", "a", "--dtype", "half"}), HasSubstr("f32, bf16, f16"));
}

Json optimizer_settings(const models::TrainSettings& s) {
  return optim::make_optimizer(s.optimizer, optim::Settings::Defaults::kTraining)->settings();
}

TEST(TrainFlagsTest, AnOptimizerIsNamedWithItsSettings) {
  const models::TrainSettings plain = settings_of({"--model", "tiny", "--data", "a"});
  EXPECT_EQ(plain.optimizer.name, "adamw");
  EXPECT_EQ(optimizer_settings(plain), (Json{{"beta1", 0.9}, {"beta2", 0.95}, {"epsilon", 1e-8}}));
  const models::TrainSettings sgd = settings_of(
      {"--model", "tiny", "--data", "a", "--optimizer", "sgd", "--momentum", "0.8", "--nesterov"});
  EXPECT_EQ(optimizer_settings(sgd), (Json{{"momentum", 0.8}, {"nesterov", true}}));
  const models::TrainSettings codes = settings_of({"--model", "tiny", "--data", "a", "--state", "8bit"});
  EXPECT_EQ(optimizer_settings(codes).at("state"), "8bit");
  EXPECT_THAT(error_of({"--model", "tiny", "--data", "a", "--state", "4bit"}), HasSubstr("8bit"));
  EXPECT_FALSE(plain.learning_rate || plain.warmup || plain.schedule || plain.weight_decay || plain.clip);
  EXPECT_THAT(error_of({"--model", "tiny", "--data", "a", "--optimizer", "lyon"}), HasSubstr("lion"));
  const models::TrainSettings muon = settings_of(
      {"--model", "tiny", "--data", "a", "--optimizer", "muon", "--no-nesterov", "--adamw-lr", "1e-4"});
  EXPECT_EQ(optimizer_settings(muon), (Json{{"beta1", 0.9},
                                            {"beta2", 0.95},
                                            {"epsilon", 1e-8},
                                            {"momentum", 0.95},
                                            {"nesterov", false},
                                            {"muon_scale", "match_rms_adamw"}}));
  EXPECT_EQ(muon.adamw_learning_rate, 1e-4);
  EXPECT_THAT(error_of({"--model", "tiny", "--data", "a", "--nesterov", "--no-nesterov"}),
              HasSubstr("leave one out"));
}

TEST(TrainFlagsTest, AutoLeavesRecomputationToThePlan) {
  EXPECT_FALSE(
      settings_of({"--model", "tiny", "--data", "a", "--recompute", "auto"}).plan.recompute.has_value());
}

TEST(TrainFlagsTest, AModelIsNeeded) { EXPECT_THAT(error_of({"--data", "a"}), HasSubstr("--model")); }

TEST(TrainFlagsTest, ModelAndDataMayStandInTheConfigFile) {
  const std::string path = ::testing::TempDir() + "train-flags-" + std::to_string(::getpid()) + ".json";
  std::ofstream(path)
      << R"({"model": "tiny", "data": ["a"], "disk": ["/x:1GiB"], "dtype": "bf16", "eval_every": 3})";
  const models::TrainSettings s = settings_of({"--config", path, "--dtype", "f32"});
  EXPECT_EQ(s.model, "tiny");
  EXPECT_EQ(s.disk.at(0).limit, 1073741824u);
  EXPECT_EQ(s.dtype, Dtype::kF32);
  EXPECT_EQ(s.eval_every, 3u);
  std::filesystem::remove(path);
}

TEST(TrainFlagsTest, ASwitchWinsOverItsOppositeInTheConfigFile) {
  const std::string path = ::testing::TempDir() + "switches-" + std::to_string(::getpid()) + ".json";
  const auto write = [&](const char* settings) {
    std::ofstream(path) << R"({"model": "tiny", "data": ["a"], "optimizer": "muon", )" << settings << "}";
  };
  const auto nesterov = [&](const std::vector<std::string>& words) {
    return settings_of(words).optimizer.settings.at("nesterov");
  };
  write(R"("nesterov": true)");
  EXPECT_EQ(nesterov({"--config", path}), true);
  EXPECT_EQ(nesterov({"--config", path, "--no-nesterov"}), false);
  write(R"("nesterov": false)");
  EXPECT_EQ(nesterov({"--config", path}), false);
  EXPECT_EQ(nesterov({"--config", path, "--nesterov"}), true);
  write(R"("no_nesterov": true)");
  EXPECT_EQ(nesterov({"--config", path, "--nesterov"}), true);
  write(R"("nesterov": true, "no_nesterov": true)");
  EXPECT_THAT(error_of({"--config", path}), HasSubstr("leave one out"));
  std::filesystem::remove(path);
}

}  // namespace sluice::cli::train_flags_test
