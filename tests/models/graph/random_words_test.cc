#include <gtest/gtest.h>

#include <set>

#include "models/cases.h"
#include "models/graph/context.h"

namespace sluice::models::testing {
namespace {

// Hands its input on, and notes the random words that it could have drawn.
class Probe : public Op {
 public:
  using Streams = std::multiset<std::pair<std::uint64_t, std::uint64_t>>;
  Probe(OpSpec spec, Streams& streams) : Op(std::move(spec)), streams_(streams) {}
  void forward(const OpContext& context) const override {
    note(context);
    std::memcpy(context.output(0).data, context.input(0).data, kBytes);
  }
  void backward(const OpContext& context) const override { note(context); }
  static constexpr std::size_t kBytes = 2 * 8 * 16 * sizeof(float);

 private:
  void note(const OpContext& context) const {
    const RandomWords words = context.random_words();
    streams_.insert({words.seed, words.stream});
  }
  Streams& streams_;
};

void lengthen(Graph& graph, std::size_t ops, Probe::Streams& streams) {
  for (std::size_t i = 0; i < ops; ++i) {
    Value value = graph.values()[*graph.output()];
    value.name = "probe" + std::to_string(i);
    OpSpec spec;
    spec.name = value.name;
    spec.inputs = {*graph.output()};
    spec.outputs = {graph.add_value(value)};
    spec.passes_gradient = {0};
    spec.forward_in_place = {{0, 0}};
    graph.set_output(spec.outputs[0]);
    graph.add_op(std::make_unique<Probe>(std::move(spec), streams));
  }
}

// The words of every op in every unit and step are its own, also where a unit has more ops than units of
// today.
TEST(RandomWordsTest, NoTwoOpsShareAStreamHoweverManyOpsABlockHas) {
  constexpr std::size_t kProbes = 200;
  const ModelConfig config = small_gpt2();
  const Model model(config, Dtype::kF32, 2, 8);  // of the same units and schedule
  Model::Impl impl({config, Dtype::kF32, 2, 8}, "");
  Probe::Streams streams;
  lengthen(impl.architecture.embedding, kProbes, streams);
  lengthen(impl.architecture.block, kProbes, streams);

  Threads threads(2);
  const auto library = kernels::load_matrix_library(2);
  PlainSource source(model, 1, *library);
  randomize(source);
  std::vector<Choice> choices;
  for (engine::UnitId unit = 0; unit < impl.units.size(); ++unit)
    choices.push_back(impl.choices(unit).front());
  Executor executor(impl, choices, 1, {source, threads, *library});
  const GuardedMemory activations(executor.activation_bytes()), workspace(executor.workspace_bytes());
  executor.set_memory(activations.bytes(), workspace.bytes());
  const Data data(model, 1);
  for (const std::uint64_t step : {1, 2}) {
    source.begin_step();
    executor.train_step(data.micro_batches, 7, step, {});
  }

  const std::set different(streams.begin(), streams.end());
  EXPECT_EQ(different.size(), 2 * kProbes * (1 + config.layers));
  for (const auto& words : different)
    EXPECT_NE(words.first, 7u) << "the first values are drawn with that seed";
  EXPECT_TRUE(activations.guards_hold() && workspace.guards_hold());
}

}  // namespace
}  // namespace sluice::models::testing
