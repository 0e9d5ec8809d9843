#include <numbers>

#include "kernels/harness.h"
#include "kernels/matrix.h"
#include "optim/optimizer.h"
#include "rounding.h"
#include "testing.h"
#include "thrown.h"

// Muon against f64, and the same bits however it is cut; tests/python/package/test_optimizers.py holds it to
// torch.optim.Muon.
namespace sluice::optim::muon_test {
using namespace sluice::test;

// The definition, one element after another.
class PlainProducts final : public kernels::F32Products {
 public:
  void multiply_f32(const kernels::Product& p) override {
    const std::size_t lda = p.lda ? p.lda : p.transpose_a ? p.m : p.k;
    const std::size_t ldb = p.ldb ? p.ldb : p.transpose_b ? p.k : p.n, ldc = p.ldc ? p.ldc : p.n;
    for (std::size_t i = 0; i < p.m; ++i)
      for (std::size_t j = 0; j < p.n; ++j) {
        double sum = 0;
        for (std::size_t x = 0; x < p.k; ++x)
          sum += static_cast<double>(p.a.f32()[p.transpose_a ? x * lda + i : i * lda + x]) *
                 p.b.f32()[p.transpose_b ? j * ldb + x : x * ldb + j];
        p.c.f32()[i * ldc + j] = static_cast<float>(sum);
      }
  }
  std::size_t hidden_bytes(const kernels::Product&) const override { return 0; }
};

struct Parameter {
  Parameter(const Optimizer& optimizer, std::vector<std::size_t> the_shape, unsigned seed,
            bool elementwise = false)
      : shape(std::move(the_shape)), by_elements(elementwise) {
    std::size_t n = 1;
    for (const std::size_t dimension : shape) n *= dimension;
    values = random_values(n, seed, 0.1f);
    for (std::size_t array = 0; array < optimizer.state().size(); ++array)
      state.emplace_back(optimizer.state()[array].type, optimizer.keeps(array, kind()) ? n : 0);
    scales.assign(state.size(), std::vector<float>(n / kScaleBlock + 1));
  }
  Kind kind() const { return {shape, by_elements}; }
  // One step, in spans of `piece` elements.
  void step(const Optimizer& optimizer, Threads& threads, kernels::F32Products& products,
            const Hyperparameters& h, ConstArray gradient, std::size_t piece) {
    std::vector<double> scratch(optimizer.scratch(kind()) + 8);
    std::vector<std::byte> workspace(optimizer.workspace(kind()) + 64);
    const Whole whole{kind(), nullptr, scratch.data(), workspace.data()};
    const auto each_span = [&](const auto& body) {
      for (std::size_t begin = 0; begin < values.size(); begin += piece) {
        Span span{.count = std::min(piece, values.size() - begin),
                  .first_index = begin,
                  .master = values.data() + begin,
                  .parameter = {},
                  .gradient = gradient.at(begin),
                  .state = {},
                  .whole = whole};
        for (std::size_t array = 0; array < state.size(); ++array) {
          StatePart part;
          if (state[array].size() > 0)
            part = {static_cast<Array>(state[array]).at(begin), scales[array].data() + begin / kScaleBlock};
          span.state.push_back(part);
        }
        body(span);
      }
    };
    for (int round = 0; round < optimizer.rounds() && optimizer.has_rounds(kind()); ++round) {
      each_span([&](const Span& span) { optimizer.statistics(threads, round, h, span); });
      optimizer.combine(threads, &products, round, h, whole);
    }
    each_span([&](const Span& span) { optimizer.apply(threads, h, span); });
  }
  Bytes bytes() const {
    Bytes all = TestArray(Dtype::kF32, values).bytes();
    for (const TestArray& array : state) all = all + array.bytes();
    return all;
  }
  std::vector<std::size_t> shape;
  bool by_elements;
  std::vector<float> values;
  std::vector<TestArray> state;
  std::vector<std::vector<float>> scales;
};

TEST(Muon, SameBits) {
  PlainProducts products;
  for (const Dtype state : {Dtype::kF32, Dtype::kBf16, Dtype::kU8}) {
    const auto optimizer = make_optimizer({.name = "muon", .storage = {state}});
    for (const auto& shape : std::vector<std::vector<std::size_t>>{{5, 900}, {700, 9}, {7}, {2, 30, 40}}) {
      std::size_t piece = std::size_t{1} << 20;  // in one span first, then in ever smaller ones
      expect_same_bits([&](Threads& threads) {
        Parameter parameter(*optimizer, shape, 1);
        for (std::uint64_t step = 1; step <= 3; ++step) {
          const TestArray gradient(Dtype::kBf16,
                                   random_values(parameter.values.size(), static_cast<unsigned>(step)));
          parameter.step(*optimizer, threads, products, {1, 0.1, 0.5, step}, gradient, piece);
        }
        piece = std::max(std::min(piece, std::size_t{1} << 13) / 2, kernels::kGridBlock);
        return parameter.bytes();
      });
    }
  }
}

// Jordan et al. 2024 in f64, of any shape as it stands.
std::vector<double> orthogonal(std::vector<double> x, std::size_t rows, std::size_t columns) {
  double norm = 0;
  for (const double value : x) norm += value * value;
  for (double& value : x) value /= std::max(std::sqrt(norm), 1e-7);
  const auto multiply = [](const auto& a, const auto& b, std::size_t m, std::size_t k, std::size_t n) {
    std::vector<double> c(m * n);
    for (std::size_t i = 0; i < m; ++i)
      for (std::size_t l = 0; l < k; ++l)
        for (std::size_t j = 0; j < n; ++j) c[i * n + j] += a[i * k + l] * b[l * n + j];
    return c;
  };
  for (int iteration = 0; iteration < 5; ++iteration) {
    std::vector<double> transposed(x.size());
    for (std::size_t i = 0; i < rows; ++i)
      for (std::size_t j = 0; j < columns; ++j) transposed[j * rows + i] = x[i * columns + j];
    const auto gram = multiply(x, transposed, rows, columns, rows);
    auto sum = multiply(gram, gram, rows, rows, rows);
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] = 2.0315 * sum[i] - 4.7750 * gram[i];
    const auto change = multiply(sum, x, rows, rows, columns);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = 3.4445 * x[i] + change[i];
  }
  return x;
}

class MuonOfAShape : public testing::TestWithParam<std::tuple<bool, const char*, bool>> {};
INSTANTIATE_TEST_SUITE_P(All, MuonOfAShape,
                         testing::Combine(testing::Bool(), testing::Values("original", "match_rms_adamw"),
                                          testing::Bool()));

TEST_P(MuonOfAShape, AgreesWithF64) {
  const auto [tall, scale, nesterov] = GetParam();
  const std::size_t rows = tall ? 70 : 20, columns = tall ? 20 : 70;
  const auto optimizer =
      make_optimizer({.name = "muon", .settings = {{"nesterov", nesterov}, {"muon_scale", scale}}});
  Threads threads(2);
  const auto library = kernels::load_matrix_library(2);
  Parameter parameter(*optimizer, {rows, columns}, 1);
  std::vector<double> values(parameter.values.begin(), parameter.values.end()), momentum(values.size());
  const double factor =
      scale == std::string("original") ? (tall ? std::sqrt(3.5) : 1) : 0.2 * std::sqrt(70.0);
  for (std::uint64_t step = 1; step <= 30; ++step) {
    const TestArray gradient(Dtype::kF32, random_values(values.size(), static_cast<unsigned>(step)));
    parameter.step(*optimizer, threads, *library, {0.02, 0.1, 0.5, step}, gradient, values.size());
    std::vector<double> direction(values.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
      const double g = 0.5 * gradient[i];
      momentum[i] = 0.95 * momentum[i] + 0.05 * g;
      direction[i] = nesterov ? 0.05 * g + 0.95 * momentum[i] : momentum[i];
    }
    direction = orthogonal(direction, rows, columns);
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = values[i] * (1 - 0.02 * 0.1) - 0.02 * factor * direction[i];
  }
  // Three products in each of five iterations of thirty steps, one after the other; the worst of many
  // elements.
  const double roundings = 30 * 5 * 3 * static_cast<double>(rows + columns);
  for (std::size_t i = 0; i < values.size(); ++i)
    ASSERT_NEAR(parameter.values[i], values[i],
                6 * of_roundings(roundings) * (std::abs(values[i]) + 0.02 * factor))
        << i;
}

// There are more elements than a product writes at once, on either side.
TEST(Muon, InSlices) {
  const std::size_t least = 48, most = 100'000;
  Threads threads(2);
  const auto library = kernels::load_matrix_library(2);
  const auto optimizer = make_optimizer({.name = "muon"});
  ASSERT_LT(optimizer->workspace({std::vector<std::size_t>{least, most}}), least * most * sizeof(float));
  const std::vector<float> start = random_values(least * most, 3);
  for (const bool tall : {false, true}) {
    const std::size_t rows = tall ? most : least, columns = tall ? least : most;
    Parameter parameter(*optimizer, {rows, columns}, 1);
    std::fill(parameter.values.begin(), parameter.values.end(), 0.0f);
    parameter.step(*optimizer, threads, *library, {1, 0, 1, 1}, {start.data(), Dtype::kF32}, start.size());
    // Singular values of such a matrix are nearly alike, so all become the same, by the polynomial of one
    // number.
    double x = 1 / std::sqrt(static_cast<double>(least));
    for (int i = 0; i < 5; ++i) x = x * (3.4445 + x * x * (-4.7750 + x * x * 2.0315));
    const double scale = (tall ? std::sqrt(static_cast<double>(most) / least) : 1) * x / std::sqrt(most);
    double error = 0, size = 0;
    for (std::size_t i = 0; i < start.size(); ++i) {
      error += std::pow(parameter.values[i] + scale * start[i], 2);
      size += std::pow(scale * start[i], 2);
      ASSERT_GT(std::abs(parameter.values[i]) + (std::abs(start[i]) < 1e-3 ? 1 : 0), 0) << "left out: " << i;
    }
    EXPECT_LT(std::sqrt(error / size), 0.25);
  }
}

TEST(Muon, ZerosStayZeros) {
  Threads threads(1);
  PlainProducts products;
  const auto optimizer = make_optimizer({.name = "muon"});
  Parameter parameter(*optimizer, {4, 6}, 1);
  const std::vector<float> before = parameter.values;
  parameter.step(*optimizer, threads, products, {0.1, 0, 1, 1}, TestArray(Dtype::kF32, 24), 24);
  EXPECT_EQ(parameter.values, before);
}

TEST(Muon, LeavesWhatIsNoMatrixToAdamW) {
  Threads threads(1);
  PlainProducts products;
  const Json rest = {{"beta1", 0.8}, {"beta2", 0.9}, {"epsilon", 1e-6}};
  const auto optimizer = make_optimizer({.name = "muon", .settings = rest}),
             adamw = make_optimizer({.settings = rest});
  for (const auto& [shape, by_elements] : std::vector<std::pair<std::vector<std::size_t>, bool>>{
           {{60}, false}, {{3, 4, 5}, false}, {{6, 10}, true}}) {
    Parameter parameter(*optimizer, shape, 1, by_elements), other(*adamw, shape, 1);
    for (std::uint64_t step = 1; step <= 3; ++step) {
      const TestArray gradient(Dtype::kF32, random_values(60, static_cast<unsigned>(step)));
      parameter.step(*optimizer, threads, products, {0.1, 0.1, 0.5, step}, gradient, 60);
      other.step(*adamw, threads, products, {0.1, 0.1, 0.5, step}, gradient, 60);
    }
    EXPECT_EQ(parameter.values, other.values);
    EXPECT_EQ(parameter.state[1].bytes() + parameter.state[2].bytes(),
              other.state[0].bytes() + other.state[1].bytes());
  }
}

TEST(Muon, CoefficientsAreThoseOfTheStep) {
  Threads threads(2);
  PlainProducts products;
  const auto optimizer = make_optimizer({.name = "muon"});
  const Json settings = {{"momentum", 0.5}, {"beta1", 0.8}, {"beta2", 0.9}, {"epsilon", 1e-3}};
  const auto other = make_optimizer({.name = "muon", .settings = settings});
  for (const bool by_elements : {false, true}) {
    const auto trained = [&](bool by_step, bool by_other) {
      Parameter parameter(*optimizer, {20, 30}, 1, by_elements);
      for (std::uint64_t step = 1; step <= 3; ++step) {
        Hyperparameters h{0.1, 0.1, 0.5, step};
        if (by_step && step == 2) h.settings = optimizer->for_step(settings);
        const TestArray gradient(Dtype::kF32, random_values(600, static_cast<unsigned>(step)));
        parameter.step(by_other && step == 2 ? *other : *optimizer, threads, products, h, gradient, 600);
      }
      return parameter.bytes();
    };
    EXPECT_TRUE(trained(true, false) == trained(false, true));
    EXPECT_FALSE(trained(true, false) == trained(false, false));
  }
}

TEST(Muon, RefusesWhatCannotBe) {
  const auto refused = [](const OptimizerSettings& settings, const std::vector<std::string>& parts) {
    expect_error(ErrorCode::kInvalidArgument, parts, [&] { make_optimizer(settings); });
  };
  refused({.name = "muon", .settings = {{"momentum", 1.0}}}, {"muon", "momentum is 1"});
  refused({.name = "muon", .settings = {{"muon_scale", "large"}}}, {"'large'", "original, match_rms_adamw"});
  refused({.name = "muon", .settings = {{"clip_threshold", 1.0}}}, {"clip_threshold", "muon_scale"});
  refused({.name = "muon", .settings = {{"beta1", 2.0}}}, {"beta1 is 2"});
  refused({.name = "sgd", .settings = {{"momentum", 0.9}, {"muon_scale", "original"}}},
          {"muon_scale", "sgd"});
}

}  // namespace sluice::optim::muon_test
