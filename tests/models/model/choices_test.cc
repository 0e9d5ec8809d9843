#include "models/cases.h"
#include "testing.h"

namespace sluice::models::testing::choices_test {

struct Case {
  std::string name;
  ModelConfig config;
  Dtype dtype;
};

struct Outcome {
  double loss;
  std::vector<std::vector<float>> gradients;
};

void expect_same_bits(const Outcome& a, const Outcome& b) {
  EXPECT_EQ(std::memcmp(&a.loss, &b.loss, sizeof(double)), 0) << a.loss << " and " << b.loss;
  ASSERT_EQ(a.gradients.size(), b.gradients.size());
  for (std::size_t i = 0; i < a.gradients.size(); ++i) {
    const std::size_t bytes = a.gradients[i].size() * sizeof(float);
    EXPECT_EQ(std::memcmp(a.gradients[i].data(), b.gradients[i].data(), bytes), 0) << "parameter " << i;
  }
}

class ChoicesTest : public ::testing::TestWithParam<Case> {
 protected:
  Outcome outcome(const Model& model, const std::string& choice, std::size_t group, bool poison = false) {
    PlainRun run(model, choice, group, kCount, threads_, *library_);
    randomize(run.source);
    // Former contents must not matter.
    std::memset(run.activations().data(), 0xff, run.activations().size());
    std::memset(run.workspace().data(), 0xff, run.workspace().size());
    if (poison) run.executor.observe(poison_dead_buffers);
    const Data data(model, kCount);
    Outcome result{run.train(data.micro_batches), run.source.all_gradients()};
    EXPECT_TRUE(run.guards_hold()) << choice;
    EXPECT_TRUE(std::isfinite(result.loss));
    return result;
  }

  // All of the workspace that no step needs now, by the plan, becomes NaN.
  static void poison_dead_buffers(const Program& program, std::size_t step, std::span<std::byte> workspace) {
    std::map<std::size_t, std::size_t> alive;  // offset to end
    for (const Buffer& buffer : program.buffers) {
      if (buffer.first < step && buffer.last >= step) alive[buffer.offset] = buffer.offset + buffer.bytes;
    }
    alive[workspace.size()] = workspace.size();
    std::size_t end_of_last = 0;
    for (const auto& [begin, end] : alive) {
      std::memset(workspace.data() + end_of_last, 0xff, begin - end_of_last);
      end_of_last = end;
    }
  }

  Model model(const std::string& recompute = "") const {
    return Model(GetParam().config, GetParam().dtype, 2, 8, recompute);
  }

  static constexpr std::size_t kCount = 4;
  Threads threads_{2};
  std::unique_ptr<kernels::MatrixLibrary> library_ = kernels::load_matrix_library(2);
};

TEST_P(ChoicesTest, EveryChoiceGivesTheSameBits) {
  const Model one = model();
  const Outcome expected = outcome(one, "none", kCount);
  std::vector<Choice> all = one.impl().choices(1);
  for (const Choice& choice : one.impl().choices(2)) all.push_back(choice);  // of a block that differs
  for (const Choice& choice : all) {
    SCOPED_TRACE(choice.name);
    expect_same_bits(expected, outcome(one, choice.name, kCount, true));
  }
  for (const std::string names : {"ln2+ln1", "attention", "up", "add1+qkv", "proj"}) {
    SCOPED_TRACE(names);
    expect_same_bits(expected, outcome(model(names), names, kCount, true));
  }
}

TEST_P(ChoicesTest, EveryGroupGivesTheSameBits) {
  const Model one = model();
  const Outcome expected = outcome(one, "none", kCount);
  for (const std::size_t group : {1, 2, 3}) {
    SCOPED_TRACE(group);
    expect_same_bits(expected, outcome(one, "none", group));
    expect_same_bits(expected, outcome(one, "full", group));
  }
}

INSTANTIATE_TEST_SUITE_P(Models, ChoicesTest,
                         ::testing::Values(Case{"gpt2_f32", small_gpt2(), Dtype::kF32},
                                           Case{"gpt2_dropout_f32", small_gpt2(true, 0.1f), Dtype::kF32},
                                           Case{"gpt2_dropout_bf16", small_gpt2(true, 0.1f), Dtype::kBf16},
                                           Case{"gpt2_untied_bf16", small_gpt2(false), Dtype::kBf16},
                                           Case{"gpt2_dropout_f16", small_gpt2(true, 0.1f), Dtype::kF16},
                                           Case{"llama_f32", small_llama(), Dtype::kF32},
                                           Case{"mixed_dropout_f32", small_mixed(true, 0.1f), Dtype::kF32},
                                           Case{"qwen2_bf16", small_llama(true, true), Dtype::kBf16}),
                         [](const auto& param) { return param.param.name; });

class NarrowTest : public ::testing::TestWithParam<Dtype> {};

TEST_P(NarrowTest, LossAndGradientsAreNearThoseOfF32) {
  Threads threads(2);
  const auto library = kernels::load_matrix_library(2);
  for (const ModelConfig& config : {small_gpt2(), small_llama(true, true)}) {
    const Model wide(config, Dtype::kF32, 2, 8), narrow(config, GetParam(), 2, 8);
    PlainRun expected(wide, "none", 1, 2, threads, *library), run(narrow, "none", 1, 2, threads, *library);
    randomize(run.source);
    for (std::size_t parameter = 0; parameter < run.source.parameters(); ++parameter) {
      for (std::size_t i = 0; i < run.source.elements(parameter); ++i) {
        expected.source.set(parameter, i, run.source.get(parameter, i));
      }
    }
    const Data data(wide, 2);
    const double rounding = rounding_of(narrow, data.tokens.size()),
                 loss = expected.train(data.micro_batches);
    EXPECT_NEAR(run.train(data.micro_batches), loss, rounding_of_mean(rounding, data.tokens.size()) * loss);
    for (std::size_t parameter = 0; parameter < run.source.parameters(); ++parameter) {
      const auto found = run.source.gradient_of(parameter), wanted = expected.source.gradient_of(parameter);
      double error = 0, norm = 0;
      for (std::size_t i = 0; i < found.size(); ++i) {
        error += std::pow(static_cast<double>(found[i]) - static_cast<double>(wanted[i]), 2);
        norm += std::pow(static_cast<double>(wanted[i]), 2);
      }
      EXPECT_LT(std::sqrt(error / norm), rounding) << run.source.spec(parameter).name;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, NarrowTest, ::testing::Values(Dtype::kBf16, Dtype::kF16),
                         [](const auto& test) { return std::string(name_of(test.param)); });

// A sequence has the same words of dropout in whatever micro-batch it comes.
TEST(SamplesTest, MicroBatchesOfAnotherSizeGiveTheSameLoss) {
  Threads threads(2);
  const auto library = kernels::load_matrix_library(2);
  const ModelConfig config = small_gpt2(true, 0.1f);
  const Model two(config, Dtype::kF32, 2, 8), four(config, Dtype::kF32, 4, 8);
  PlainRun first(two, "none", 2, 2, threads, *library), second(four, "none", 1, 1, threads, *library);
  randomize(first.source);
  randomize(second.source);
  const Data data(four, 1);
  const auto half = [&](std::size_t begin) {
    return MicroBatch{std::span(data.tokens).subspan(begin, 16), std::span(data.targets).subspan(begin, 16),
                      100 + begin / 8};
  };
  const std::vector<MicroBatch> halves = {half(0), half(16)};
  const double loss = second.train(data.micro_batches);
  EXPECT_NEAR(first.train(halves), loss, rounding_of(four, data.tokens.size()) * loss);
}

}  // namespace sluice::models::testing::choices_test
