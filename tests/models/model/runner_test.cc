#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/bytes.h"
#include "core/error.h"
#include "core/random.h"
#include "engine/plan/plan.h"
#include "engine/planner/planner.h"
#include "engine/steps/scheduled_engine.h"
#include "float_array.h"
#include "models/cases.h"
#include "models/model/model.h"
#include "offload/records.h"
#include "offload/test_files.h"
#include "optim/optimizer.h"

namespace sluice::models::testing {
namespace runner_test {

struct Way {
  std::string name;
  engine::PlanRequest request;
};

Way way(const std::string& name, const std::string& tier, const std::string& recompute, std::size_t group) {
  engine::PlanRequest request;
  request.recompute = recompute;
  request.group = group;
  request.places.fill(engine::tier_of_place(tier));
  return {name, request};
}

struct Outcome {
  std::vector<double> losses, evaluations;
  std::vector<float> logits;
  std::vector<std::vector<float>> values;
  bool operator==(const Outcome&) const = default;
};

// Runs a few steps on a real engine, whose disk is a file in memory.
class Learner {
 public:
  Learner(const Model& model, const engine::PlanRequest& request, kernels::MatrixLibrary& library)
      : model_(model),
        profile_(model.profile(kCount, library)),
        plan_(engine::make_plan(profile_, *optimizer_, {2 * kGiB, 2 * kGiB, 0}, request, {})),
        records_(files(), ledger_),
        engine_(profile_, plan_, *optimizer_,
                {threads_, ledger_, plan_.uses_disk() ? &records_ : nullptr, nullptr}),
        runner_(model, plan_, engine_, threads_, library, ledger_) {
    engine::UnitSource source;
    source.values = [this](engine::ParameterId parameter, std::size_t first, std::span<float> out) {
      const engine::ParameterSpec& spec = engine_.layout().spec(parameter);
      const float mean = spec.shape.size() == 1 && spec.name.ends_with("weight") ? 1.0f : 0.0f;
      for (std::size_t i = 0; i < out.size(); ++i) {
        const auto word = philox({static_cast<std::uint32_t>(first + i), parameter, 0, 0}, {1, 2})[0];
        out[i] = mean + 0.4f * (to_unit_interval(word) - 0.5f);
      }
    };
    for (engine::UnitId unit = 0; unit < model.units().size(); ++unit) engine_.load(unit, source);
  }

  Outcome learn(int steps) {
    Outcome outcome;
    const Data data(model_, kCount);
    for (int step = 0; step < steps; ++step) {
      engine_.begin_step({{{0.01, 0.1}, {0.01, 0.0}, {0.01, 0.1}}, 1.0});
      const std::uint64_t targets = counted_targets(data.micro_batches);
      outcome.losses.push_back(loss_of_step(
          runner_.train_step(data.micro_batches, {7, static_cast<std::uint64_t>(step), targets}), targets));
      engine_.step();
      outcome.evaluations.push_back(runner_.evaluate(data.micro_batches[1]));
    }
    outcome.logits.resize(model_.config().vocabulary);
    runner_.next_logits(std::span(data.tokens).first(5), outcome.logits);
    outcome.values.resize(engine_.layout().parameters());
    engine::UnitSink sink;
    sink.parameter = [&](engine::ParameterId parameter, std::size_t, std::size_t count, ConstArray values) {
      for (std::size_t i = 0; i < count; ++i) {
        outcome.values[parameter].push_back(test::value_at(values, i));
      }
    };
    sink.master = [](engine::ParameterId, std::size_t, std::span<const float>) {};
    sink.state = [](engine::ParameterId, std::size_t, std::size_t, std::size_t, ConstArray, const float*) {};
    for (engine::UnitId unit = 0; unit < model_.units().size(); ++unit) engine_.save(unit, sink);
    return outcome;
  }

  const engine::Plan& plan() const { return plan_; }
  allocator::Ledger& ledger() { return ledger_; }

 private:
  static constexpr std::size_t kCount = 3;

  static std::vector<std::unique_ptr<offload::File>> files() {
    std::vector<std::unique_ptr<offload::File>> result;
    result.push_back(offload::make_memory_file("swap"));
    return result;
  }

  const Model& model_;
  Threads threads_{2};
  allocator::Ledger ledger_;
  std::unique_ptr<optim::Optimizer> optimizer_ = optim::make_optimizer({});
  engine::Profile profile_;
  engine::Plan plan_;
  offload::RecordStore records_;
  engine::ScheduledEngine engine_;
  Runner runner_;
};

struct Case {
  std::string name;
  ModelConfig config;
  Dtype dtype;
};

class RunnerTest : public ::testing::TestWithParam<Case> {
 protected:
  std::unique_ptr<kernels::MatrixLibrary> library_ = kernels::load_matrix_library(2);
  Model model_{GetParam().config, GetParam().dtype, 2, 8};
};

TEST_P(RunnerTest, LearnsWithTheSameBitsInMemoryAndOnDiskInAnyGroupAndAnyChoice) {
  const Outcome expected = Learner(model_, way("", "memory", "none", 3).request, *library_).learn(4);
  EXPECT_LT(expected.losses.back(), expected.losses.front());
  EXPECT_LT(expected.evaluations.back(), expected.evaluations.front());
  for (const Way& other : {way("disk", "disk", "none", 3), way("one by one", "memory", "full", 1),
                           way("all savings", "disk", "full", 1), way("uneven groups", "disk", "full", 2)}) {
    SCOPED_TRACE(other.name);
    Learner learner(model_, other.request, *library_);
    EXPECT_TRUE(learner.learn(4) == expected);
    EXPECT_EQ(learner.plan().uses_disk(), other.request.places[0] == allocator::Tier::kDisk);
    EXPECT_EQ(learner.plan().group, *other.request.group);
  }
}

TEST_P(RunnerTest, TakesTheActivationsAndTheWorkspaceOfThePlan) {
  for (const char* recompute : {"none", "full"}) {
    Learner learner(model_, way("", "memory", recompute, 3).request, *library_);
    learner.learn(1);
    const auto lines = learner.ledger().snapshot().lines[static_cast<std::size_t>(allocator::Tier::kHost)];
    EXPECT_EQ(lines[static_cast<std::size_t>(allocator::Purpose::kActivation)].peak,
              round_up(learner.plan().activation_bytes, kHugePage));
    EXPECT_EQ(lines[static_cast<std::size_t>(allocator::Purpose::kWorkspace)].peak,
              round_up(learner.plan().workspace_bytes, kHugePage));
  }
}

INSTANTIATE_TEST_SUITE_P(Models, RunnerTest,
                         ::testing::Values(Case{"gpt2_dropout_f32", small_gpt2(true, 0.1f), Dtype::kF32},
                                           Case{"gpt2_untied_bf16", small_gpt2(false), Dtype::kBf16},
                                           Case{"gpt2_dropout_f16", small_gpt2(true, 0.1f), Dtype::kF16},
                                           Case{"llama_f32", small_llama(), Dtype::kF32},
                                           Case{"mixed_dropout_f32", small_mixed(true, 0.1f), Dtype::kF32},
                                           Case{"mixed_untied_bf16", small_mixed(false), Dtype::kBf16},
                                           Case{"llama_f16", small_llama(), Dtype::kF16},
                                           Case{"qwen2_tied_bf16", small_llama(true, true), Dtype::kBf16}),
                         [](const auto& param) { return param.param.name; });

TEST(RunnerThreadsTest, MoreThreadsThanTheLibraryHasAreRefused) {
  const auto library = kernels::load_matrix_library(1);
  const Model model(small_gpt2(), Dtype::kF32, 2, 8);
  EXPECT_THROW(Learner(model, way("", "memory", "none", 1).request, *library), Error);
}

}  // namespace runner_test
}  // namespace sluice::models::testing
