#include "core/random.h"
#include "kernels/harness.h"
#include "optim/optimizer.h"
#include "testing.h"
#include "thrown.h"

// Tests every elementwise optimizer against its paper's formulae in f64, on every target, cut in every way.
namespace sluice::optim::elementwise_test {
using namespace sluice::test;

// A parameter with its state, in memory as the engine would hold it.
struct Parameter {
  struct State {
    TestArray values;
    std::vector<float> scales;  // of state in codes
    CodeMap map;
    std::size_t size() const { return values.size(); }
    double operator[](std::size_t i) const {
      if (scales.empty()) return values[i];
      return code_values(map)[static_cast<std::size_t>(values[i])] * scales[i / kScaleBlock];
    }
  };
  std::vector<float> master;
  std::vector<State> state;
  std::vector<Bf16> compute;

  Parameter(const Optimizer& optimizer, std::vector<float> values)
      : master(std::move(values)), compute(master.size()) {
    const std::size_t blocks = (master.size() + kScaleBlock - 1) / kScaleBlock;
    for (const StateArray& array : optimizer.state())
      state.push_back({TestArray(array.type, master.size()),
                       std::vector<float>(array.type == Dtype::kU8 ? blocks : 0), array.map});
  }
  Span span(ConstArray gradient, std::size_t begin, std::size_t count) {
    Span span{.count = count,
              .first_index = begin,
              .master = master.data() + begin,
              .parameter = {compute.data() + begin, Dtype::kBf16},
              .gradient = gradient.at(begin),
              .state = {}};
    for (State& array : state)
      span.state.push_back({Array(array.values).at(begin),
                            array.scales.empty() ? nullptr : array.scales.data() + begin / kScaleBlock});
    return span;
  }
  Bytes bytes() const {
    Bytes result = TestArray(Dtype::kF32, master).bytes();
    for (const State& array : state)
      result = result + array.values.bytes() + TestArray(Dtype::kF32, array.scales).bytes();
    const auto* const narrow = reinterpret_cast<const unsigned char*>(compute.data());
    return result + Bytes(narrow, narrow + compute.size() * sizeof(Bf16));
  }
};

// One element in f64. `undecided` says that the formula jumps here, so that f32 may go the other way.
struct Reference {
  double value = 0, first = 0, second = 0;
  bool undecided = false;
};
using Formula = void (*)(Reference&, const Hyperparameters&, double gradient);

struct Case {
  const char* name;
  OptimizerSettings settings;
  std::vector<std::string> state;
  Formula formula;
};

// Kingma, Ba 2015, algorithm 1.
void adam(Reference& r, const Hyperparameters& h, double gradient) {
  const double g = gradient * h.gradient_factor + h.weight_decay * r.value, t = static_cast<double>(h.step);
  r.first = 0.8 * r.first + 0.2 * g;
  r.second = 0.95 * r.second + 0.05 * g * g;
  const double root = std::sqrt(r.second / (1 - std::pow(0.95, t)));
  r.value -= h.learning_rate * r.first / (1 - std::pow(0.8, t)) / (root + 1e-6);
}

// Loshchilov, Hutter 2019, algorithm 2.
void adamw(Reference& r, const Hyperparameters& h, double gradient) {
  const double g = gradient * h.gradient_factor, t = static_cast<double>(h.step);
  r.value -= h.learning_rate * h.weight_decay * r.value;
  r.first = 0.9 * r.first + 0.1 * g;
  r.second = 0.95 * r.second + 0.05 * g * g;
  const double root = std::sqrt(r.second / (1 - std::pow(0.95, t)));
  r.value -= h.learning_rate * r.first / (1 - std::pow(0.9, t)) / (root + 1e-8);
}

// Chen et al. 2023, algorithm 2.
void lion(Reference& r, const Hyperparameters& h, double gradient) {
  const double g = gradient * h.gradient_factor, c = 0.9 * r.first + 0.1 * g;
  r.undecided |= std::abs(c) < 1e-8;
  r.value -= h.learning_rate * ((c > 0 ? 1 : c < 0 ? -1 : 0) + h.weight_decay * r.value);
  r.first = 0.98 * r.first + 0.02 * g;
}

// The formulae of torch.optim.SGD's documentation, with dampening 0.
void sgd(Reference& r, const Hyperparameters& h, double gradient) {
  r.value -= h.learning_rate * (gradient * h.gradient_factor + h.weight_decay * r.value);
}
void momentum(Reference& r, const Hyperparameters& h, double gradient) {
  r.first = 0.9 * r.first + gradient * h.gradient_factor + h.weight_decay * r.value;
  r.value -= h.learning_rate * r.first;
}
void nesterov(Reference& r, const Hyperparameters& h, double gradient) {
  const double g = gradient * h.gradient_factor + h.weight_decay * r.value;
  r.first = 0.9 * r.first + g;
  r.value -= h.learning_rate * (g + 0.9 * r.first);
}

const std::vector<Case>& cases() {
  static const std::vector<Case> all = {
      {"adamw", {"adamw", {{"beta2", 0.95}}}, {"exp_avg", "exp_avg_sq"}, adamw},
      {"adam",
       {"adam", {{"beta1", 0.8}, {"beta2", 0.95}, {"epsilon", 1e-6}}},
       {"exp_avg", "exp_avg_sq"},
       adam},
      {"lion", {"lion", {{"beta2", 0.98}}}, {"exp_avg"}, lion},
      {"sgd", {"sgd"}, {}, sgd},
      {"sgd_momentum", {"sgd", {{"momentum", 0.9}}}, {"momentum_buffer"}, momentum},
      {"sgd_nesterov", {"sgd", {{"momentum", 0.9}, {"nesterov", true}}}, {"momentum_buffer"}, nesterov},
      {"adam_bf16",
       {"adam", {{"beta1", 0.8}, {"beta2", 0.95}, {"epsilon", 1e-6}}, {Dtype::kBf16}},
       {"exp_avg", "exp_avg_sq"},
       adam},
      {"lion_bf16", {"lion", {{"beta2", 0.98}}, {Dtype::kBf16}}, {"exp_avg"}, lion},
      {"sgd_bf16",
       {"sgd", {{"momentum", 0.9}, {"nesterov", true}}, {Dtype::kBf16}},
       {"momentum_buffer"},
       nesterov},
      {"adam_8bit",
       {"adam", {{"beta1", 0.8}, {"beta2", 0.95}, {"epsilon", 1e-6}}, {Dtype::kU8}},
       {"exp_avg", "exp_avg_sq"},
       adam},
      {"lion_8bit", {"lion", {{"beta2", 0.98}}, {Dtype::kU8}}, {"exp_avg"}, lion},
      {"sgd_8bit",
       {"sgd", {{"momentum", 0.9}, {"nesterov", true}}, {Dtype::kU8}},
       {"momentum_buffer"},
       nesterov},
  };
  return all;
}

class Elementwise : public testing::TestWithParam<Case> {
 protected:
  std::unique_ptr<Optimizer> optimizer_ = make_optimizer(GetParam().settings);
};
INSTANTIATE_TEST_SUITE_P(Optimizers, Elementwise, testing::ValuesIn(cases()),
                         [](const auto& test) { return std::string(test.param.name); });

TEST_P(Elementwise, DescribesItself) {
  EXPECT_EQ(optimizer_->name(), GetParam().settings.name);
  EXPECT_EQ(optimizer_->rounds(), 0);
  std::vector<std::string> names;
  for (const StateArray& array : optimizer_->state()) {
    names.push_back(array.name);
    EXPECT_EQ(array.type, GetParam().settings.storage.state);
  }
  EXPECT_EQ(names, GetParam().state);
}

// Rounds a block of values to what codes can hold, in f64.
void hold_in_codes(CodeMap map, double Reference::*value, std::span<Reference> block) {
  const auto smaller = [&](const Reference& a, const Reference& b) {
    return std::abs(a.*value) < std::abs(b.*value);
  };
  const double scale = (*std::max_element(block.begin(), block.end(), smaller)).*value;
  const int most_parts = map == CodeMap::kSigned ? 64 : 128;
  for (Reference& each : block) {
    const double x = scale == 0 ? 0 : std::abs(each.*value / scale);
    double held = map == CodeMap::kSigned || x == 0 ? 0 : 1e-6 * (0.1 + 0.9 / 4),
           top = 1;  // for x below all parts
    for (int parts = most_parts; parts >= most_parts / 64; parts /= 2, top /= 10) {
      if (x < 0.1 * top) continue;
      const double part = std::floor((x / top - 0.1) / 0.9 * parts + 0x1p-12);  // the part in which x lies
      held = x >= 1 ? 1 : top * (0.1 + 0.9 * (part + 0.5) / parts);
      break;
    }
    each.*value = std::copysign(held * scale, each.*value);
  }
}

// Rounds a value to what arrays of the type can hold.
void hold(Dtype type, std::vector<Reference>& reference) {
  if (type == Dtype::kU8) {
    for (std::size_t at = 0; at < reference.size(); at += kScaleBlock) {
      const auto block = std::span(reference).subspan(at, std::min(kScaleBlock, reference.size() - at));
      hold_in_codes(CodeMap::kSigned, &Reference::first, block);
      hold_in_codes(CodeMap::kUnsigned, &Reference::second, block);
    }
  }
  if (type != Dtype::kBf16) return;
  for (Reference& each : reference)
    for (double Reference::*value : {&Reference::first, &Reference::second})
      each.*value = to_f32(to_bf16(static_cast<float>(each.*value)));
}

// Returns the share of elements whose error is more than f32 arithmetic explains. Where state is rounded to a
// narrower type, a value between two of its steps may go to the other one.
template <class Found>
double share_off(const Found& found, const std::vector<Reference>& reference, double Reference::*exact,
                 double relative, double absolute, double farthest) {
  double off = 0;
  for (std::size_t i = 0; i < reference.size(); ++i) {
    const double expected = reference[i].*exact, error = std::abs(found[i] - expected);
    if (!reference[i].undecided && !(error <= relative * std::abs(expected) + absolute)) ++off;
    EXPECT_LT(error, farthest) << i;
  }
  return off / static_cast<double>(reference.size());
}

TEST_P(Elementwise, AHundredStepsAgreeWithF64) {
  Threads threads(2);
  const Dtype state = GetParam().settings.storage.state;
  const bool exact = state == Dtype::kF32;
  const std::size_t many = state == Dtype::kU8 ? 40003 : 4003;  // of codes a whole block may go the other way
  for (const Dtype type : kFloatTypes)
    for (const std::size_t n : {std::size_t{1}, std::size_t{7}, many}) {
      if (state == Dtype::kU8 && n == many && type != Dtype::kBf16)
        continue;  // codes do not depend on the gradient's type
      Parameter parameter(*optimizer_, random_values(n, 1));
      std::vector<Reference> reference(n);
      for (std::size_t i = 0; i < n; ++i) reference[i].value = parameter.master[i];
      for (std::uint64_t step = 1; step <= 100; ++step) {
        const TestArray gradient(type, random_values(n, static_cast<unsigned>(step), 0.1f));
        const Hyperparameters h{1e-3 * static_cast<double>(step) / 100, 0.1, 0.7, step};
        optimizer_->apply(threads, h, parameter.span(gradient, 0, n));
        for (std::size_t i = 0; i < n; ++i) GetParam().formula(reference[i], h, gradient[i]);
        hold(state, reference);
      }
      std::size_t undecided = 0;
      for (const Reference& each : reference) undecided += each.undecided ? 1 : 0;
      EXPECT_LE(undecided, n / (exact ? 1000 : 250));
      const double most = exact ? 0 : 0.02;
      const double farthest = state == Dtype::kU8 ? 0.06 : 0.02;  // 0.06 is a step of codes with a scale of 4
      EXPECT_LE(share_off(parameter.master, reference, &Reference::value, 4e-6, 5e-7, farthest), most);
      if (!parameter.state.empty()) {
        EXPECT_LE(share_off(parameter.state[0], reference, &Reference::first, 2e-6, 5e-7, farthest), most);
      }
      if (parameter.state.size() > 1) {
        EXPECT_LE(share_off(parameter.state[1], reference, &Reference::second, 5e-6, 0, farthest), most);
      }
      for (std::size_t i = 0; i < n; ++i)
        ASSERT_EQ(parameter.compute[i].bits, to_bf16(parameter.master[i]).bits) << i;
    }
}

// The bits are the same on every target, with any number of threads, and however the parameter is cut into
// spans.
TEST_P(Elementwise, SameBits) {
  const std::size_t n = 70 * kernels::kGridBlock + 5;
  for (const Dtype type : kFloatTypes) {
    std::size_t length = n;  // the parameter is one span at first, and then ever shorter ones
    expect_same_bits([&](Threads& threads) {
      Parameter parameter(*optimizer_, random_values(n, 1));
      for (std::uint64_t step = 1; step <= 3; ++step) {
        const TestArray gradient(type, random_values(n, static_cast<unsigned>(step)));
        for (std::size_t begin = 0; begin < n; begin += length)
          optimizer_->apply(threads, {1e-3, 0.1, 0.5, step},
                            parameter.span(gradient, begin, std::min(length, n - begin)));
      }
      length = length == n ? 32 * kernels::kGridBlock : std::max(length / 2, kernels::kGridBlock);
      return parameter.bytes();
    });
  }
}

// Clipping by value must be the same as clipping each element of the gradient after the factor.
TEST_P(Elementwise, ClippingByValueClipsTheGradient) {
  const std::size_t n = 5003;
  const auto trained = [&](double factor, double clip_value, bool clipped) {
    Threads threads(2);
    Parameter parameter(*optimizer_, random_values(n, 1));
    for (std::uint64_t step = 1; step <= 3; ++step) {
      std::vector<float> gradient = random_values(n, static_cast<unsigned>(step));
      for (float& value : gradient)
        if (clipped) value = std::clamp(value * 0.5f, -0.25f, 0.25f);
      optimizer_->apply(threads, {1e-2, 0.1, factor, step, clip_value},
                        parameter.span(TestArray(Dtype::kF32, gradient), 0, n));
    }
    return parameter.bytes();
  };
  EXPECT_TRUE(trained(0.5, 0.25, false) == trained(1, 0, true));
  EXPECT_FALSE(trained(0.5, 0.25, false) == trained(0.5, 0, false));
}

// Coefficients that come with a step must work like those with which an optimizer was made.
TEST_P(Elementwise, AStepUsesItsOwnCoefficients) {
  OptimizerSettings settings = GetParam().settings;
  Json given = {{"beta1", 0.7}, {"beta2", 0.9}, {"epsilon", 1e-3}, {"momentum", 0.6}};
  for (auto value = given.begin(); value != given.end();)
    value = optimizer_->state().empty() || !optimizer_->settings().contains(value.key()) ? given.erase(value)
                                                                                         : std::next(value);
  settings.settings.update(given);
  const auto other = make_optimizer(settings);
  const std::size_t n = 5003;
  const auto trained = [&](bool by_step, bool by_other) {
    Threads threads(2);
    Parameter parameter(*optimizer_, random_values(n, 1));
    for (std::uint64_t step = 1; step <= 3; ++step) {
      Hyperparameters h{1e-2, 0.1, 1, step};
      if (by_step && step == 2) h.settings = optimizer_->for_step(given);
      const Optimizer& optimizer = by_other && step == 2 ? *other : *optimizer_;
      optimizer.apply(
          threads, h,
          parameter.span(TestArray(Dtype::kF32, random_values(n, static_cast<unsigned>(step))), 0, n));
    }
    return parameter.bytes();
  };
  EXPECT_TRUE(trained(true, false) == trained(false, true));
  EXPECT_EQ(trained(true, false) == trained(false, false), optimizer_->state().empty());
}

TEST_P(Elementwise, MisuseIsAnError) {
  Threads threads(1);
  Parameter parameter(*optimizer_, {1, 2, 3});
  const TestArray gradient(Dtype::kF32, 3);
  Span span = parameter.span(gradient, 0, 3);
  EXPECT_THROW(optimizer_->apply(threads, {1e-3, 0, 1, 0}, span), Error);
  span.state.push_back({Array{parameter.master.data()}});
  EXPECT_THROW(optimizer_->apply(threads, {1e-3, 0, 1, 1}, span), Error);
  span = parameter.span(gradient, 0, 3);
  if (span.state.empty()) return;
  Dtype& type = span.state[0].values.type;
  const Dtype right = std::exchange(type, type == Dtype::kF32 ? Dtype::kBf16 : Dtype::kF32);
  EXPECT_THROW(optimizer_->apply(threads, {1e-3, 0, 1, 1}, span), Error);
  if ((type = right) != Dtype::kU8) return;
  float* const scales = std::exchange(span.state[0].scales, nullptr);
  EXPECT_THROW(optimizer_->apply(threads, {1e-3, 0, 1, 1}, span), Error);
  span.state[0].scales = scales;
  span.first_index = 100;  // lies in the middle of a block
  EXPECT_THROW(optimizer_->apply(threads, {1e-3, 0, 1, 1}, span), Error);
}

TEST(AdamW, AnF32ParameterCanBeWrittenToo) {
  Threads threads(1);
  const auto optimizer = make_optimizer({});
  Parameter parameter(*optimizer, random_values(100, 1));
  std::vector<float> copy(100);
  const TestArray gradient(Dtype::kF32, random_values(100, 2));
  Span span = parameter.span(gradient, 0, 100);
  span.parameter = Array{copy.data(), Dtype::kF32};
  optimizer->apply(threads, {1e-3, 0, 1, 1}, span);
  EXPECT_EQ(copy, parameter.master);
}

// Without a master, the result has the bits of an update of the widened values, each rounded by its own word.
Bf16 rounded_by(std::uint32_t word, float value) {
  if (std::isnan(value)) return to_bf16(value);
  return {static_cast<std::uint16_t>((std::bit_cast<std::uint32_t>(value) + (word & 0xffffu)) >> 16)};
}

Span without_master(Parameter& parameter, ConstArray gradient, std::size_t begin, std::size_t count) {
  Span span = parameter.span(gradient, begin, count);
  span.master = nullptr;
  span.parameter_index = 5;
  return span;
}

TEST_P(Elementwise, WithoutAMasterEachValueIsRoundedByItsOwnWord) {
  Threads threads(2);
  const std::size_t n = 5 * kernels::kGridBlock + 3;
  OptimizerSettings settings = GetParam().settings;
  settings.storage.master = false;
  settings.storage.seed = 7;
  const auto optimizer = make_optimizer(settings);
  EXPECT_FALSE(optimizer->keeps_master());
  Parameter wide(*optimizer_, random_values(n, 1)), narrow(*optimizer, wide.master);
  for (std::size_t i = 0; i < n; ++i) {
    narrow.compute[i] = to_bf16(wide.master[i]);
    wide.master[i] = to_f32(narrow.compute[i]);
  }
  const TestArray gradient(Dtype::kF32, random_values(n, 2));
  optimizer_->apply(threads, {1e-3, 0.1, 0.5, 9}, wide.span(gradient, 0, n));
  optimizer->apply(threads, {1e-3, 0.1, 0.5, 9}, without_master(narrow, gradient, 0, n));
  const CounterRandom random(7, std::uint64_t{5} << 40 ^ 9);
  for (std::size_t i = 0; i < n; ++i)
    ASSERT_EQ(narrow.compute[i].bits,
              rounded_by(random.block<7>(i / 8)[i / 2 % 4] >> (i % 2 * 16), wide.master[i]).bits)
        << i;
}

TEST_P(Elementwise, WithoutAMasterSameBits) {
  const std::size_t n = 70 * kernels::kGridBlock + 5;
  OptimizerSettings settings = GetParam().settings;
  settings.storage.master = false;
  const auto optimizer = make_optimizer(settings);
  std::size_t length = n;
  expect_same_bits([&](Threads& threads) {
    Parameter parameter(*optimizer, random_values(n, 1));
    for (std::size_t i = 0; i < n; ++i) parameter.compute[i] = to_bf16(parameter.master[i]);
    for (std::uint64_t step = 1; step <= 3; ++step) {
      const TestArray gradient(Dtype::kBf16, random_values(n, static_cast<unsigned>(step)));
      for (std::size_t begin = 0; begin < n; begin += length)
        optimizer->apply(threads, {1e-3, 0.1, 0.5, step},
                         without_master(parameter, gradient, begin, std::min(length, n - begin)));
    }
    length = length == n ? 32 * kernels::kGridBlock : std::max(length / 2, kernels::kGridBlock);
    return parameter.bytes();
  });
}

// Steps are a fiftieth of what bf16 can tell apart: with rounding to nearest nothing would ever change.
TEST(StochasticRounding, SmallStepsAddUp) {
  Threads threads(1);
  const std::size_t n = 4096;
  const auto sgd = make_optimizer({.name = "sgd", .storage = {.master = false}});
  Parameter parameter(*sgd, std::vector<float>(n, 1.0f));
  std::fill(parameter.compute.begin(), parameter.compute.end(), to_bf16(1.0f));
  const TestArray gradient(Dtype::kF32, std::vector<float>(n, -1.0f));
  for (std::uint64_t step = 1; step <= 100; ++step)
    sgd->apply(threads, {0x1p-7 / 50, 0, 1, step}, without_master(parameter, gradient, 0, n));
  double mean = 0;
  for (const Bf16 value : parameter.compute) mean += to_f32(value) / static_cast<double>(n);
  // Each of 100 draws gives a step of 2^-7 with probability 1 / 50: the mean of n values has a deviation of
  // 2^-7 * sqrt(2 / n).
  EXPECT_NEAR(mean, 1 + 2 * 0x1p-7, 5 * 0x1p-7 * std::sqrt(2.0 / static_cast<double>(n)));
}

TEST(StochasticRounding, InfinitiesAndNansStay) {
  Threads threads(1);
  const auto sgd = make_optimizer({.name = "sgd", .storage = {.master = false}});
  Parameter parameter(*sgd, {1, 1, 1});
  const TestArray gradient(Dtype::kF32, {NAN, HUGE_VALF, -HUGE_VALF});
  sgd->apply(threads, {1, 0, 1, 1}, without_master(parameter, gradient, 0, 3));
  EXPECT_TRUE(std::isnan(to_f32(parameter.compute[0])));
  EXPECT_EQ(to_f32(parameter.compute[1]), -HUGE_VALF);
  EXPECT_EQ(to_f32(parameter.compute[2]), HUGE_VALF);
}

TEST(Averages, WithBetasOfZeroAreTheGradient) {
  Threads threads(1);
  for (const char* name : {"adamw", "adam", "lion"}) {
    const auto optimizer = make_optimizer({.name = name, .settings = {{"beta1", 0}, {"beta2", 0}}});
    Parameter parameter(*optimizer, {1, 1});
    for (const float size : {1e4f, 1e-4f}) {
      const std::vector<float> gradient = {size, -3 * size};
      const Hyperparameters h{0.1, 0, 1, size > 1 ? 1u : 2u};
      optimizer->apply(threads, h, parameter.span(TestArray(Dtype::kF32, gradient), 0, 2));
      for (std::size_t i = 0; i < 2; ++i) EXPECT_EQ(parameter.state[0][i], gradient[i]) << name;
    }
    EXPECT_NEAR(parameter.master[0], 0.8f, 1e-4) << name;  // moved by two steps of the learning rate
    EXPECT_NEAR(parameter.master[1], 1.2f, 1e-4) << name;
  }
}

TEST(Lion, ADirectionOfZeroLeavesTheParameter) {
  Threads threads(1);
  const auto lion = make_optimizer({.name = "lion"});
  Parameter parameter(*lion, {1, -2, 0});
  lion->apply(threads, {0.5, 0, 1, 1}, parameter.span(TestArray(Dtype::kF32, {0.0f, -0.0f, 3.0f}), 0, 3));
  EXPECT_EQ(parameter.master, (std::vector<float>{1, -2, -0.5}));
}

TEST(SettingsOfAStep, OutOfRangeOrForOtherStateAreRefused) {
  const auto refused = [](const OptimizerSettings& settings, const Json& given,
                          const std::vector<std::string>& parts) {
    const auto optimizer = make_optimizer(settings);
    expect_error(ErrorCode::kInvalidArgument, parts, [&] { optimizer->for_step(given); });
  };
  refused({.name = "adamw"}, Json{{"epsilon", 1e39}}, {"epsilon is 1e+39", "32 bits"});
  refused({.name = "sgd"}, Json{{"momentum", 0.9}},
          {"sgd", "momentum is 0.9, but the optimizer was made with 0"});
  refused({.name = "sgd", .settings = {{"momentum", 0.9}}}, Json{{"momentum", 0}},
          {"momentum is 0, but the optimizer was made with 0.9"});
  refused({.name = "sgd", .settings = {{"momentum", 0.9}}}, Json{{"momentum", 1}}, {"momentum is 1"});
  refused({.name = "adafactor"}, Json{{"beta1", 0.9}}, {"beta1 is 0.9, but the optimizer was made with 0"});
  refused({.name = "adafactor"}, Json{{"clip_threshold", 2}},
          {"clip_threshold is 2", "made with 1", "cannot"});
  refused({.name = "sgd"}, Json{{"beta1", 0.7}}, {"beta1 is given, but sgd has none", "momentum, nesterov"});
  make_optimizer({.name = "muon"})->for_step(Json::object());
}

TEST(MakeOptimizer, RefusesWhatAnOptimizerDoesNotHave) {
  const auto refused = [](const OptimizerSettings& settings, const std::vector<std::string>& parts) {
    expect_error(ErrorCode::kInvalidArgument, parts, [&] { make_optimizer(settings); });
  };
  refused({.name = "lion", .storage = {Dtype::kF16}}, {"lion", "f16", "f32, bf16, 8bit"});
  refused({.name = "sgd", .storage = {Dtype::kU8}}, {"sgd", "8bit", "momentum"});
  refused({.name = "sgd", .storage = {Dtype::kBf16}}, {"sgd", "bf16", "momentum"});
  refused({.name = "adamax"}, {"'adamax'", "adamw, adam, lion, sgd, adafactor, muon"});
  refused({.name = "adamw", .settings = {{"momentum", 0.9}}}, {"momentum", "adamw"});
  refused({.name = "adam", .settings = {{"nesterov", true}}}, {"nesterov", "adam"});
  refused({.name = "lion", .settings = {{"epsilon", 1e-8}}}, {"epsilon", "lion"});
  refused({.name = "sgd", .settings = {{"beta1", 0.9}}}, {"beta1", "momentum"});
  refused({.name = "sgd", .settings = {{"nesterov", true}}}, {"without momentum"});
  EXPECT_EQ(make_optimizer({})->settings(), (Json{{"beta1", 0.9}, {"beta2", 0.999}, {"epsilon", 1e-8}}));
}

}  // namespace sluice::optim::elementwise_test
