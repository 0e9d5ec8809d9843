#include "models/cases.h"
#include "models/reference.h"
#include "testing.h"

namespace sluice::models::testing::gradient_test {

struct Case {
  std::string name;
  ModelConfig config;
  std::size_t pieces = 1;  // of each layer
};

class GradientTest : public ::testing::TestWithParam<Case> {
 protected:
  Threads threads_{2};
  std::unique_ptr<kernels::MatrixLibrary> library_ = kernels::load_matrix_library(2);
};

Values values_of(const PlainSource& source) {
  Values values;
  for (std::size_t parameter = 0; parameter < source.parameters(); ++parameter) {
    for (std::size_t i = 0; i < source.elements(parameter); ++i) {
      values[source.spec(parameter).name].push_back(source.get(parameter, i));
    }
  }
  return values;
}

TEST_P(GradientTest, LossAndGradientsAreThoseOfAnF64ReferencesDifferences) {
  const Model model(GetParam().config, Dtype::kF32, 2, 8, "", {.pieces = GetParam().pieces});
  PlainRun run(model, "none", 2, 2, threads_, *library_);
  randomize(run.source);
  const Data data(model, 2);
  const double loss = run.train(data.micro_batches);

  Values values = values_of(run.source);
  const Reference reference(model.config(), values);
  const double count =
      static_cast<double>(std::ranges::count_if(data.targets, [](auto t) { return t >= 0; }));
  const auto reference_loss = [&] { return reference.loss(data.tokens, data.targets, 8) / count; };
  const double rounding = rounding_of(model, data.tokens.size());
  EXPECT_NEAR(loss, reference_loss(), rounding * loss);

  std::mt19937 random(1);
  for (std::size_t parameter = 0; parameter < run.source.parameters(); ++parameter) {
    const std::vector<float> gradient = run.source.gradient_of(parameter);
    double norm = 0;
    for (const float value : gradient) norm += static_cast<double>(value) * static_cast<double>(value);
    // Differences over 1e-4 in f64 are off by 1e-8 times the third derivative, in the worst of some elements.
    const double tolerance = 1e-6 + 6 * rounding * std::sqrt(norm);
    for (int sample = 0; sample < 2; ++sample) {
      const std::size_t element = random() % gradient.size();
      double& value = values[run.source.spec(parameter).name][element];
      const double kept = value, step = 1e-4;
      value = kept + step;
      const double above = reference_loss();
      value = kept - step;
      const double below = reference_loss();
      value = kept;
      EXPECT_NEAR(gradient[element], (above - below) / (2 * step), tolerance)
          << run.source.spec(parameter).name << " [" << element << "]";
    }
  }
  EXPECT_TRUE(run.guards_hold());
}

class LogitsTest : public GradientTest {};

TEST_P(LogitsTest, NextLogitsAreThoseOfTheReference) {
  const Model model(GetParam().config, Dtype::kF32, 2, 8);
  PlainRun run(model, "none", 1, 1, threads_, *library_);
  randomize(run.source);
  const Values values = values_of(run.source);
  const Reference reference(model.config(), values);
  const std::vector<std::int32_t> tokens = {3, 1, 4, 1, 5, 9, 2, 6};
  for (const std::size_t count : {1, 5, 8}) {
    std::vector<float> logits(model.config().vocabulary);
    run.executor.next_logits(std::span(tokens).first(count), logits);
    const Matrix expected = reference.sequence(std::span(tokens).first(count));
    double square = 0;
    for (const double logit : expected.back()) square += logit * logit;
    const double tolerance =
        6 * rounding_of(model, tokens.size()) * std::sqrt(square / static_cast<double>(logits.size()));
    for (std::size_t i = 0; i < logits.size(); ++i) EXPECT_NEAR(logits[i], expected.back()[i], tolerance);
  }
}

const auto kName = [](const auto& param) { return param.param.name; };
INSTANTIATE_TEST_SUITE_P(Pieces, GradientTest,
                         ::testing::Values(Case{"gpt2", small_gpt2(), 2}, Case{"llama", small_llama(), 2},
                                           Case{"qwen2", small_llama(true, true), 2}),
                         kName);
const auto kModels =
    ::testing::Values(Case{"gpt2_tied", small_gpt2()}, Case{"gpt2_untied", small_gpt2(false)},
                      Case{"llama_untied", small_llama()}, Case{"llama_tied", small_llama(true)},
                      Case{"qwen2", small_llama(true, true)}, Case{"mixed_tied", small_mixed()},
                      Case{"mixed_untied", small_mixed(false)});
INSTANTIATE_TEST_SUITE_P(Models, GradientTest, kModels, kName);
INSTANTIATE_TEST_SUITE_P(Models, LogitsTest, kModels, kName);

// Dropout has no reference. With the same masks the loss must rise along the gradient as the gradient says.
TEST(DropoutTest, GradientsAreThoseOfTheMaskedLoss) {
  Threads threads(2);
  const auto library = kernels::load_matrix_library(2);
  const Model model(small_gpt2(true, 0.2f), Dtype::kF32, 2, 8);
  PlainRun run(model, "none", 2, 2, threads, *library);
  randomize(run.source);
  const Data data(model, 2);
  const double loss = run.train(data.micro_batches, 11, 4);
  const auto gradients = run.source.all_gradients();
  double square = 0;
  for (const auto& gradient : gradients) {
    for (const float value : gradient) square += static_cast<double>(value) * static_cast<double>(value);
  }
  const double step = 2e-2 / square;
  const auto move = [&](double distance) {
    for (std::size_t parameter = 0; parameter < gradients.size(); ++parameter) {
      for (std::size_t i = 0; i < gradients[parameter].size(); ++i) {
        const float value = run.source.get(parameter, i);
        run.source.set(parameter, i, value + static_cast<float>(distance) * gradients[parameter][i]);
      }
    }
    return run.train(data.micro_batches, 11, 4);
  };
  const double above = move(step / 2), below = move(-step);
  EXPECT_NEAR((above - below) / (step * square), 1, 0.01);
  move(step / 2);
  EXPECT_NE(run.train(data.micro_batches, 11, 5), loss) << "another step must have other masks";
  EXPECT_NE(run.train(data.micro_batches, 12, 4), loss) << "another seed must have other masks";
  const std::span first = std::span(data.micro_batches).first(1);
  EXPECT_NE(run.executor.evaluate(first[0]) / static_cast<double>(counted_targets(first)),
            run.train(first, 11, 4));
}

}  // namespace sluice::models::testing::gradient_test
