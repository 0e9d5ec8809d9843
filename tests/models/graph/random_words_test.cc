#include "models/cases.h"
#include "models/graph/context.h"
#include "testing.h"

namespace sluice::models::testing::random_words_test {

std::set<std::pair<std::uint64_t, std::uint64_t>> drawn;  // seeds and streams

// Hands its input on, and notes the random words that it could draw.
class Probe : public Op {
 public:
  using Op::Op;
  void forward(const OpContext& context) const override {
    note(context);
    std::memcpy(context.output(0).data, context.input(0).data, kBytes);
  }
  void backward(const OpContext& context) const override { note(context); }
  static constexpr std::size_t kBytes = 2 * 8 * 16 * sizeof(float);

 private:
  void note(const OpContext& context) const {
    const RandomWords words = context.random_words();
    drawn.insert({words.seed, words.stream});
  }
};

constexpr std::size_t kProbes = 200;

void lengthen(Graph& graph) {
  for (std::size_t i = 0; i < kProbes; ++i) {
    Value value = graph.values()[*graph.output()];
    value.name = "probe" + std::to_string(i);
    OpSpec spec{.name = value.name,
                .inputs = {*graph.output()},
                .outputs = {graph.add_value(value)},
                .forward_in_place = {{0, 0}},
                .passes_gradient = {0}};
    graph.set_output(spec.outputs[0]);
    graph.add_op(std::make_unique<Probe>(std::move(spec)));
  }
}

// No two ops of any unit and step have the same words, also where a unit has very many ops.
TEST(RandomWordsTest, NoTwoOpsShareAStreamHoweverManyOpsABlockHas) {
  Family longer = kGpt2;
  longer.build = [](const Shape& shape) {
    Architecture architecture = kGpt2.build(shape);
    lengthen(architecture.embedding);
    lengthen(architecture.blocks.front());
    return architecture;
  };
  ModelConfig config = small_gpt2();
  config.family = &longer;
  const Model model(config, Dtype::kF32, 2, 8);
  Threads threads(2);
  const auto library = kernels::load_matrix_library(2);
  PlainRun run(model, "none", 1, 1, threads, *library);
  randomize(run.source);
  const Data data(model, 1);
  drawn.clear();
  for (const std::uint64_t step : {1, 2}) run.train(data.micro_batches, 7, step);

  EXPECT_EQ(drawn.size(), 2 * kProbes * (1 + config.layers));
  for (const auto& words : drawn) EXPECT_NE(words.first, 7u) << "the first values are drawn with that seed";
  EXPECT_TRUE(run.guards_hold());
}

}  // namespace sluice::models::testing::random_words_test
