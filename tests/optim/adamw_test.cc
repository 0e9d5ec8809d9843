#include <gtest/gtest.h>

#include <cmath>

#include "kernels/harness.h"
#include "optim/optimizer.h"

namespace sluice::optim {
namespace adamw_test {
using namespace sluice::test;

// A parameter with its state, in memory as the engine would hold it.
struct Parameter {
  std::vector<float> master, first, second;
  std::vector<Bf16> compute;

  explicit Parameter(std::vector<float> values)
      : master(std::move(values)), first(master.size()), second(master.size()), compute(master.size()) {}
  Span span(ConstArray gradient, std::size_t begin, std::size_t count, bool narrow) {
    return {.count = count,
            .first_index = begin,
            .master = master.data() + begin,
            .parameter = narrow ? Array{compute.data() + begin, Dtype::kBf16} : Array{},
            .gradient = gradient.at(begin),
            .state = {{Array{first.data() + begin}}, {Array{second.data() + begin}}}};
  }
  Span all(ConstArray gradient, bool narrow = false) { return span(gradient, 0, master.size(), narrow); }
  Bytes bytes() const {
    Bytes result;
    for (const auto* values : {&master, &first, &second})
      result = result + TestArray(Dtype::kF32, *values).bytes();
    const auto* const narrow = reinterpret_cast<const unsigned char*>(compute.data());
    return result + Bytes(narrow, narrow + compute.size() * sizeof(Bf16));
  }
};

// Algorithm 2 of the paper for one element, in f64.
struct Reference {
  double value, first = 0, second = 0;
  void step(const Hyperparameters& h, double gradient) {
    constexpr double kBeta1 = 0.9, kBeta2 = 0.95, kEpsilon = 1e-8;
    const double g = gradient * h.gradient_factor, t = static_cast<double>(h.step);
    value -= h.learning_rate * h.weight_decay * value;
    first = kBeta1 * first + (1 - kBeta1) * g;
    second = kBeta2 * second + (1 - kBeta2) * g * g;
    const double unbiased = first / (1 - std::pow(kBeta1, t));
    value -= h.learning_rate * unbiased / (std::sqrt(second / (1 - std::pow(kBeta2, t))) + kEpsilon);
  }
};

TEST(AdamW, DescribesItself) {
  const auto adamw = make_optimizer({.settings = {{"beta1", 0.8}, {"beta2", 0.95}, {"epsilon", 1e-6}}});
  EXPECT_EQ(adamw->name(), "adamw");
  EXPECT_EQ(adamw->rounds(), 0);
  EXPECT_EQ(adamw->settings(), (Json{{"beta1", 0.8}, {"beta2", 0.95}, {"epsilon", 1e-6}}));
  ASSERT_EQ(adamw->state().size(), 2u);
  EXPECT_EQ(adamw->state()[0].name, "exp_avg");
  EXPECT_EQ(adamw->state()[1].name, "exp_avg_sq");
  for (const StateArray& array : adamw->state()) EXPECT_EQ(array.type, Dtype::kF32);
}

TEST(AdamW, RefusesSettingsOutOfRange) {
  for (const double beta : {-0.1, 1.0, std::nan("")}) {
    EXPECT_THROW(make_optimizer({.settings = {{"beta1", beta}}}), Error);
    EXPECT_THROW(make_optimizer({.settings = {{"beta2", beta}}}), Error);
  }
  for (const double epsilon : {-1e-8, std::nan(""), HUGE_VAL})
    EXPECT_THROW(make_optimizer({.settings = {{"epsilon", epsilon}}}), Error);
}

TEST(AdamW, AHundredStepsAgreeWithF64) {
  Threads threads(2);
  for (const Dtype type : kFloatTypes)
    for (const std::size_t n : {1u, 7u, 1000u, 40003u}) {
      const auto adamw = make_optimizer({.settings = {{"beta2", 0.95}}});
      Parameter parameter(random_values(n, 1));
      std::vector<Reference> reference;
      for (const float value : parameter.master) reference.push_back({value});
      for (std::uint64_t step = 1; step <= 100; ++step) {
        const TestArray gradient(type, random_values(n, static_cast<unsigned>(step), 0.1f));
        const Hyperparameters h{1e-3 * static_cast<double>(step) / 100, 0.1, 0.7, step};
        adamw->apply(threads, h, parameter.all(gradient, true));
        for (std::size_t i = 0; i < n; ++i) reference[i].step(h, gradient[i]);
      }
      const TestArray values(Dtype::kF32, parameter.master), first(Dtype::kF32, parameter.first);
      expect_close(
          values, [&](auto i) { return reference[i].value; }, 2e-6, 5e-7, "value");
      expect_close(
          first, [&](auto i) { return reference[i].first; }, 1e-6, 1e-7, "exp_avg");
      expect_close(
          TestArray(Dtype::kF32, parameter.second), [&](auto i) { return reference[i].second; }, 5e-6, 0,
          "exp_avg_sq");
      for (std::size_t i = 0; i < n; ++i)
        ASSERT_EQ(parameter.compute[i].bits, to_bf16(parameter.master[i]).bits) << i;
    }
}

// The values are those of three steps of torch.optim.AdamW 2.13 (lr 0.01, betas 0.9 and 0.99, weight decay
// 0.1, single tensor).
TEST(AdamW, AgreesWithTorch) {
  const std::vector<std::vector<float>> gradients = {{0.1f, -0.2f, 1e-4f, 3.0f, -5e-8f, 0.0f},
                                                     {-0.3f, 0.4f, 2e-4f, -1.0f, 2e-8f, 1e-6f},
                                                     {0.25f, 0.125f, -3e-4f, 0.5f, 1e-8f, -2.0f}};
  const std::vector<float> values = {0.492483944f,  -1.24437439f,    2.97206593f,
                                     -0.017058447f, -0.00777386641f, -0.000954598188f};
  const std::vector<float> first = {0.00610000035f, 0.0323000029f,    -3.90000196e-06f,
                                    0.203000009f,   -1.24999999e-09f, -0.199999899f};
  const std::vector<float> second = {0.00161401008f, 0.00213229028f,  1.39401013e-09f,
                                     0.10060899f,    2.94624992e-17f, 0.0399999991f};
  Threads threads(1);
  const auto adamw = make_optimizer({.settings = {{"beta2", 0.99}}});
  Parameter parameter({0.5f, -1.25f, 3.0f, 1e-3f, -0.02f, 0.0f});
  for (std::uint64_t step = 1; step <= 3; ++step)
    adamw->apply(threads, {0.01, 0.1, 1, step}, parameter.all(TestArray(Dtype::kF32, gradients[step - 1])));
  const auto expect = [](const std::vector<float>& got, const std::vector<float>& expected,
                         const char* what) {
    expect_close(
        TestArray(Dtype::kF32, got), [&](auto i) { return double{expected[i]}; }, 3e-7, 5e-10, what);
  };
  expect(parameter.master, values, "value");
  expect(parameter.first, first, "exp_avg");
  for (std::size_t i = 0; i < second.size(); ++i) EXPECT_NEAR(parameter.second[i] / second[i], 1, 3e-7) << i;
}

// The bits are the same on every target, with any number of threads, and however the parameter is cut into
// spans.
TEST(AdamW, SameBits) {
  const std::size_t n = 70 * kernels::kGridBlock + 5;
  const auto adamw = make_optimizer({});
  for (const Dtype type : kFloatTypes) {
    std::size_t length = n;  // the parameter is one span at first, and then ever shorter ones
    expect_same_bits([&](Threads& threads) {
      Parameter parameter(random_values(n, 1));
      for (std::uint64_t step = 1; step <= 3; ++step) {
        const TestArray gradient(type, random_values(n, static_cast<unsigned>(step)));
        for (std::size_t begin = 0; begin < n; begin += length)
          adamw->apply(threads, {1e-3, 0.1, 0.5, step},
                       parameter.span(gradient, begin, std::min(length, n - begin), true));
      }
      length = length == n ? 32 * kernels::kGridBlock : std::max(length / 2, kernels::kGridBlock);
      return parameter.bytes();
    });
  }
}

TEST(AdamW, AnF32ParameterCanBeWrittenToo) {
  Threads threads(1);
  Parameter parameter(random_values(100, 1));
  std::vector<float> copy(100);
  const TestArray gradient(Dtype::kF32, random_values(100, 2));
  Span span = parameter.all(gradient);
  span.parameter = Array{copy.data(), Dtype::kF32};
  make_optimizer({})->apply(threads, {1e-3, 0, 1, 1}, span);
  EXPECT_EQ(copy, parameter.master);
}

TEST(AdamW, MisuseIsAnError) {
  Threads threads(1);
  Parameter parameter({1, 2, 3});
  const TestArray gradient(Dtype::kF32, 3);
  Span span = parameter.all(gradient);
  EXPECT_THROW(make_optimizer({})->apply(threads, {1e-3, 0, 1, 0}, span), Error);
  span.state.pop_back();
  EXPECT_THROW(make_optimizer({})->apply(threads, {1e-3, 0, 1, 1}, span), Error);
}

}  // namespace adamw_test
}  // namespace sluice::optim
