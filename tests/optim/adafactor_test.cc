#include "kernels/harness.h"
#include "optim/optimizer.h"
#include "testing.h"
#include "thrown.h"

// Adafactor follows its paper for one matrix and one vector, in f64, and has the same bits however they are
// cut; tests/python/package/test_optimizers.py holds it to transformers' over 100 steps.
namespace sluice::optim::adafactor_test {
using namespace sluice::test;

struct Parameter {
  Parameter(const Optimizer& optimizer, std::vector<std::size_t> the_shape, unsigned seed)
      : shape(std::move(the_shape)) {
    std::size_t n = 1, kept = 0;
    for (const std::size_t dimension : shape) n *= dimension;
    for (const WholeArray& array : optimizer.whole_state(shape)) kept += array.elements();
    values = random_values(n, seed, 0.1f);
    whole.resize(kept);
    momentum.resize(optimizer.state().empty() ? 0 : n);
  }
  Span span(std::size_t begin, std::size_t end, ConstArray gradient, const Whole& of) {
    Span span{.count = end - begin,
              .first_index = begin,
              .master = values.data() + begin,
              .parameter = {},
              .gradient = gradient.at(begin),
              .state = {},
              .whole = of};
    if (!momentum.empty()) span.state.push_back({Array{momentum.data() + begin}});
    return span;
  }
  // One step, in spans of `piece` elements.
  void step(const Optimizer& optimizer, Threads& threads, const Hyperparameters& h, ConstArray gradient,
            std::size_t piece) {
    std::vector<double> scratch(optimizer.scratch({shape}));
    const auto each_span = [&](const auto& body) {
      for (std::size_t begin = 0; begin < values.size(); begin += piece)
        body(span(begin, std::min(begin + piece, values.size()), gradient,
                  {{shape}, whole.data(), scratch.data()}));
    };
    for (int round = 0; round < optimizer.rounds(); ++round) {
      each_span([&](const Span& span) { optimizer.statistics(threads, round, h, span); });
      optimizer.combine(threads, nullptr, round, h, {{shape}, whole.data(), scratch.data()});
    }
    each_span([&](const Span& span) { optimizer.apply(threads, h, span); });
  }
  // One step in parts, as ranks have them: `cuts` are where they begin, and where the last one ends. Each has
  // a scratch and whole arrays of its own. order: in which their sums are added.
  void step_in_parts(const Optimizer& optimizer, Threads& threads, const Hyperparameters& h,
                     ConstArray gradient, const std::vector<std::size_t>& cuts,
                     const std::vector<std::size_t>& order) {
    const std::size_t parts = cuts.size() - 1;
    std::vector<std::vector<double>> scratch(parts, std::vector<double>(optimizer.scratch({shape})));
    std::vector<std::vector<float>> wholes(parts, whole);
    const auto whole_of = [&](std::size_t part) {
      return Whole{{shape}, wholes[part].data(), scratch[part].data()};
    };
    const auto span_of = [&](std::size_t part) {
      return span(cuts[part], cuts[part + 1], gradient, whole_of(part));
    };
    for (int round = 0; round < optimizer.rounds(); ++round) {
      for (std::size_t part = 0; part < parts; ++part) {
        std::ranges::fill(optimizer.sums(round, whole_of(part)).f64, 0.0);
        optimizer.statistics(threads, round, h, span_of(part));
      }
      std::vector<double> sums(optimizer.sums(round, whole_of(0)).f64.size());
      for (const std::size_t part : order) {
        const std::span<double> own = optimizer.sums(round, whole_of(part)).f64;
        for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += own[i];
      }
      for (std::size_t part = 0; part < parts; ++part) {
        std::ranges::copy(sums, optimizer.sums(round, whole_of(part)).f64.begin());
        optimizer.combine(threads, nullptr, round, h, whole_of(part));
      }
    }
    for (std::size_t part = 0; part < parts; ++part)
      if (cuts[part] < cuts[part + 1]) optimizer.apply(threads, h, span_of(part));
    whole = wholes[owner_of_whole(cuts)];
  }
  // A vector is never cut, and the part that has it updates its second moment.
  static std::size_t owner_of_whole(const std::vector<std::size_t>& cuts) {
    std::size_t owner = 0;
    while (cuts[owner] == cuts[owner + 1]) ++owner;
    return owner;
  }
  Bytes bytes() const {
    Bytes all;
    for (const auto* each : {&values, &whole, &momentum}) all = all + TestArray(Dtype::kF32, *each).bytes();
    return all;
  }
  std::vector<std::size_t> shape;
  std::vector<float> values, whole, momentum;
};

// Vectors; a matrix of one tile and of several; short rows; several matrices in a tile, and several tiles of
// each; rows of whole vectors.
const std::vector<std::vector<std::size_t>> kShapes = {
    {7},        {5000},       {70, 333},     {300, 700}, {3, 900, 2}, {2, 5, 2100}, {4096, 1},
    {30000, 3}, {8, 120, 90}, {2, 75, 1000}, {3000, 16}, {5, 60, 48}, {2, 30, 2096}};

TEST(Adafactor, LargeMatricesAreCutNearEveryShareWhateverTheirSize) {
  const auto optimizer = make_optimizer({.name = "adafactor"});
  for (const auto& shape :
       std::vector<std::vector<std::size_t>>{{50257, 768}, {50256, 768}, {50257, 1600}, {4097, 1001}}) {
    const std::size_t n = shape[0] * shape[1];
    for (const std::size_t share : {n / 4, n / 2, n / 4 * 3}) {
      const std::size_t cut = optimizer->last_cut({shape}, share);
      EXPECT_LE(cut, share);
      EXPECT_EQ(cut % kernels::kGridBlock, 0u);
      EXPECT_EQ(cut % shape[1], 0u) << "a row is taken apart";
      if (shape[1] % 32 == 0) {
        EXPECT_LT(share - cut, n / 32) << shape[0] << " x " << shape[1];
      }
    }
  }
}

TEST(Adafactor, NoCutIntoPartsChangesABit) {
  auto shapes = kShapes;
  shapes.push_back({3000, 700});     // strips of one tile
  shapes.push_back({9001, 640});     // strips of two tiles, of a size that is no multiple of a block
  shapes.push_back({3, 700, 1000});  // likewise, of several matrices
  shapes.push_back({3, 700, 512});   // matrices of several strips
  const auto optimizer = make_optimizer({.name = "adafactor", .settings = {{"beta1", 0.9}}});
  Threads threads(2);
  std::mt19937 random(1);
  std::size_t cut = 0;
  for (const auto& shape : shapes) {
    Parameter whole(*optimizer, shape, 1), parted = whole;
    const std::size_t n = whole.values.size();
    // Matrices of many strips are cut where the small ones are, and differ in their first step already.
    for (std::uint64_t step = 1; step <= (n > 1'000'000 ? 1 : 2); ++step) {
      const TestArray gradient(Dtype::kF32, random_values(n, static_cast<unsigned>(step)));
      const Hyperparameters h{1e-3, 0.1, 0.5, step};
      std::vector<std::size_t> cuts = {0, n}, order;
      for (int i = 0; i < 6; ++i) cuts.push_back(optimizer->last_cut({shape}, random() % n));
      std::ranges::sort(cuts);
      for (std::size_t part = 0; part + 1 < cuts.size(); ++part) order.push_back(part);
      std::ranges::shuffle(order, random);
      cut += std::ranges::count_if(cuts, [&](std::size_t at) { return at > 0 && at < n; });
      whole.step(*optimizer, threads, h, gradient, n);
      parted.step_in_parts(*optimizer, threads, h, gradient, cuts, order);
      EXPECT_EQ(whole.bytes(), parted.bytes())
          << shape.size() << " dimensions, " << n << " elements, step " << step;
    }
  }
  EXPECT_GT(cut, 20u) << "few of these cuts are within a parameter";
}

TEST(Adafactor, SameBits) {
  const auto optimizer =
      make_optimizer({.name = "adafactor", .settings = {{"beta1", 0.9}, {"relative_step", true}}});
  std::size_t shapes = 0;
  for (const auto& shape : kShapes) {
    const Dtype type = kFloatTypes[++shapes % std::size(kFloatTypes)];
    std::size_t piece = std::size_t{1} << 20;  // in one span first, then in ever smaller ones
    expect_same_bits([&](Threads& threads) {
      Parameter parameter(*optimizer, shape, 1);
      for (std::uint64_t step = 1; step <= 2; ++step) {
        const TestArray gradient(type, random_values(parameter.values.size(), static_cast<unsigned>(step)));
        parameter.step(*optimizer, threads, {1, 0.1, 0.5, step}, gradient, piece);
      }
      piece = std::max(std::min(piece, std::size_t{1} << 15) / 2, kernels::kGridBlock);
      return parameter.bytes();
    });
  }
}

TEST(Adafactor, ClippingByValueIsThatOfTheGradient) {
  const auto optimizer = make_optimizer({.name = "adafactor", .settings = {{"beta1", 0.9}}});
  for (const auto& shape : {kShapes[1], kShapes[3], kShapes[8]}) {
    const auto trained = [&](double factor, double clip_value, bool clipped) {
      Threads threads(2);
      Parameter parameter(*optimizer, shape, 1);
      for (std::uint64_t step = 1; step <= 3; ++step) {
        std::vector<float> gradient = random_values(parameter.values.size(), static_cast<unsigned>(step));
        for (float& value : gradient)
          if (clipped) value = std::clamp(value * 0.5f, -0.25f, 0.25f);
        parameter.step(*optimizer, threads, {0.01, 0.1, factor, step, clip_value},
                       TestArray(Dtype::kF32, gradient), std::size_t{1} << 20);
      }
      return parameter.bytes();
    };
    EXPECT_TRUE(trained(0.5, 0.25, false) == trained(1, 0, true));
    EXPECT_FALSE(trained(0.5, 0.25, false) == trained(0.5, 0, false));
  }
}

TEST(Adafactor, CoefficientsAreThoseOfTheStep) {
  const auto optimizer = make_optimizer({.name = "adafactor", .settings = {{"beta1", 0.9}}}),
             other = make_optimizer({.name = "adafactor", .settings = {{"beta1", 0.6}, {"epsilon", 1e-3}}});
  for (const auto& shape : {kShapes[1], kShapes[3], kShapes[8]}) {
    const auto trained = [&](bool by_step, bool by_other) {
      Threads threads(2);
      Parameter parameter(*optimizer, shape, 1);
      for (std::uint64_t step = 1; step <= 3; ++step) {
        Hyperparameters h{0.01, 0.1, 1, step};
        if (by_step && step == 2) h.settings = optimizer->for_step({{"beta1", 0.6}, {"epsilon", 1e-3}});
        const auto gradient = random_values(parameter.values.size(), static_cast<unsigned>(step));
        parameter.step(by_other && step == 2 ? *other : *optimizer, threads, h,
                       TestArray(Dtype::kF32, gradient), std::size_t{1} << 20);
      }
      return parameter.bytes();
    };
    EXPECT_TRUE(trained(true, false) == trained(false, true));
    EXPECT_FALSE(trained(true, false) == trained(false, false));
  }
}

// The first step, where beta2 is 0, by the formulae of the paper's algorithm 4.
void expect_first_step(std::size_t rows, std::size_t columns) {
  Threads threads(2);
  const auto optimizer = make_optimizer({.name = "adafactor", .settings = {{"clip_threshold", 0.5}}});
  Parameter parameter(*optimizer, {rows, columns}, 1);
  const std::vector<float> before = parameter.values;
  const TestArray gradient(Dtype::kF32, random_values(rows * columns, 2));
  parameter.step(*optimizer, threads, {0.01, 0.1, 0.5, 1}, gradient, 1465 * kernels::kGridBlock);
  std::vector<double> r(rows), c(columns), update(rows * columns);
  double total = 0, values = 0, squares = 0;
  for (std::size_t i = 0; i < rows; ++i)
    for (std::size_t j = 0; j < columns; ++j) {
      const double square = 0.25 * gradient[i * columns + j] * gradient[i * columns + j] + 1e-30;
      r[i] += square, c[j] += square, total += square;
      values += before[i * columns + j] * before[i * columns + j];
    }
  for (std::size_t i = 0; i < rows; ++i)
    EXPECT_NEAR(parameter.whole[i], r[i] / columns, 1e-6 * r[i] / columns);
  for (std::size_t k = 0; k < update.size(); ++k) {
    update[k] = 0.5 * gradient[k] / std::sqrt(r[k / columns] * c[k % columns] / total);
    squares += update[k] * update[k];
  }
  const double n = rows * columns, rate = 0.01 * std::max(1e-3, std::sqrt(values / n));
  const double clip = std::max(1.0, std::sqrt(squares / n) / 0.5);
  EXPECT_GT(clip, 1.5);
  for (std::size_t k = 0; k < update.size(); ++k)
    EXPECT_NEAR(parameter.values[k], before[k] * (1 - 0.1 * rate) - rate / clip * update[k], 1e-7);
}
TEST(Adafactor, TheFirstStepOfAMatrix) {
  expect_first_step(40, 70);
  expect_first_step(90, 48);      // of whole vectors
  expect_first_step(300, 700);    // of several tiles
  expect_first_step(30000, 3);    // of short rows
  expect_first_step(5200, 1024);  // of more tiles than are at work at once
}

TEST(Adafactor, SquaresBeyondF32LeaveNumbers) {
  Threads threads(2);
  const auto optimizer = make_optimizer({.name = "adafactor"});
  for (const std::size_t columns : {48, 50}) {
    Parameter parameter(*optimizer, {64, columns}, 1);
    const TestArray gradient(Dtype::kF32, std::vector<float>(64 * columns, 1e20f));
    parameter.step(*optimizer, threads, {0.01, 0, 1, 1}, gradient, std::size_t{1} << 20);
    EXPECT_TRUE(std::ranges::all_of(parameter.values, [](float value) { return std::isfinite(value); }));
  }
}

TEST(Adafactor, DescribesItself) {
  const auto plain = make_optimizer({.name = "adafactor"}),
             with_momentum = make_optimizer({.name = "adafactor", .settings = {{"beta1", 0.9}}});
  EXPECT_TRUE(plain->state().empty());
  EXPECT_EQ(with_momentum->state().size(), 1u);
  const std::vector<std::size_t> vector = {9}, matrix = {4, 9}, several = {2, 4, 9};
  EXPECT_EQ(plain->whole_state(vector)[0].shape, vector);
  EXPECT_EQ(plain->whole_state(matrix)[0].shape, std::vector<std::size_t>{4});
  EXPECT_EQ(plain->whole_state(matrix)[1].shape, std::vector<std::size_t>{9});
  EXPECT_EQ(plain->whole_state(several)[0].shape, (std::vector<std::size_t>{2, 4}));
  EXPECT_EQ(plain->whole_state(several)[1].shape, (std::vector<std::size_t>{2, 9}));
}

TEST(Adafactor, RefusesWhatCannotBe) {
  const auto refused = [](const OptimizerSettings& settings, const std::vector<std::string>& parts) {
    expect_error(ErrorCode::kInvalidArgument, parts, [&] { make_optimizer(settings); });
  };
  refused({.name = "adafactor", .storage = {Dtype::kBf16}}, {"bf16", "without momentum", "beta1"});
  refused({.name = "adafactor", .settings = {{"beta2", 0.9}}}, {"beta2", "clip_threshold"});
  refused({.name = "adamw", .settings = {{"relative_step", true}}}, {"relative_step", "adamw"});
}

}  // namespace sluice::optim::adafactor_test
