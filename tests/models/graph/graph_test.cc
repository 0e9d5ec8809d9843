#include "models/graph/graph.h"

#include "core/error.h"
#include "models/cases.h"
#include "models/graph/program.h"
#include "models/graph/recompute.h"
#include "testing.h"

namespace sluice::models::testing::graph_test {

bool overlap(std::size_t a, std::size_t a_end, std::size_t b, std::size_t b_end) {
  return a < b_end && b < a_end;
}

void expect_no_overlap(const std::vector<Buffer>& buffers, std::size_t peak) {
  std::size_t most = 0;
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    EXPECT_EQ(buffers[i].offset % kAlignment, 0u);
    most = std::max(most, buffers[i].offset + buffers[i].bytes);
    for (std::size_t j = 0; j < i; ++j) {
      const bool same_time =
          overlap(buffers[i].first, buffers[i].last + 1, buffers[j].first, buffers[j].last + 1);
      const bool same_place = overlap(buffers[i].offset, buffers[i].offset + buffers[i].bytes,
                                      buffers[j].offset, buffers[j].offset + buffers[j].bytes);
      EXPECT_FALSE(same_time && same_place) << i << " and " << j;
    }
  }
  EXPECT_EQ(most, peak);
}

TEST(PlaceBuffersTest, BuffersOfOneTimeNeverOverlapAndThoseOfDifferentTimesDo) {
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    std::vector<Buffer> buffers;
    std::size_t sum = 0, at_once = 0;
    for (int i = 0; i < 30; ++i) {
      const std::size_t first = random() % 40;
      buffers.push_back({0, kAlignment * (1 + random() % 50), first, first + random() % 8});
      sum += buffers.back().bytes;
    }
    for (std::size_t step = 0; step < 50; ++step) {
      std::size_t alive = 0;
      for (const Buffer& buffer : buffers)
        alive += buffer.first <= step && step <= buffer.last ? buffer.bytes : 0;
      at_once = std::max(at_once, alive);
    }
    const std::size_t peak = place_buffers(buffers);
    expect_no_overlap(buffers, peak);
    EXPECT_GE(peak, at_once);
    EXPECT_LT(peak, sum);
    EXPECT_LE(peak, at_once + at_once / 2) << "first fit should be near the least possible";
  }
}

TEST(PlaceBuffersTest, BuffersThatFollowEachOtherShareOnePlace) {
  std::vector<Buffer> buffers = {{0, 128, 0, 1}, {0, 128, 2, 3}, {0, 64, 1, 2}};
  EXPECT_EQ(place_buffers(buffers), 192u);
  EXPECT_EQ(buffers[0].offset, buffers[1].offset);
}

class LadderTest : public ::testing::TestWithParam<ModelConfig> {};

TEST_P(LadderTest, KeepsLessAndComputesMoreFromNoneToFull) {
  const Model model(GetParam(), Dtype::kF32, 4, 8);
  const Graph& block = model.impl().graph(1);
  const std::vector<Choice> ladder = choice_ladder(block);
  ASSERT_GT(ladder.size(), 4u);
  EXPECT_EQ(ladder.front().name, "none");
  EXPECT_EQ(recompute_work(block, ladder.front()), 0);
  EXPECT_EQ(ladder.back().name, "full");
  EXPECT_EQ(kept_bytes(block, ladder.back()), 0u);
  for (std::size_t i = 1; i < ladder.size(); ++i) {
    EXPECT_LT(kept_bytes(block, ladder[i]), kept_bytes(block, ladder[i - 1])) << ladder[i].name;
    EXPECT_GT(recompute_work(block, ladder[i]), recompute_work(block, ladder[i - 1])) << ladder[i].name;
  }
  // Everything runs again, but for what only the output needs.
  EXPECT_GT(recomputed_ops(block, ladder.back()).size(), block.ops().size() - 3);
}

TEST_P(LadderTest, ProgramsUseDisjointMemoryAndNoMoreThanTheySay) {
  const Model model(GetParam(), Dtype::kF32, 4, 8);
  const auto library = kernels::load_matrix_library(2);
  kernels::ProductSurvey products(*library);
  for (const engine::UnitId unit : {engine::UnitId{0}, engine::UnitId{1}, model.impl().last()}) {
    for (const Choice& choice : model.impl().choices(unit))
      for (const bool splits_backward : {false, true}) {
        const UnitProgram program = compile(model.impl().graph(unit), choice, products, splits_backward);
        for (const Program* part : {&program.forward, &program.backward, &program.weights})
          expect_no_overlap(part->buffers, part->workspace_bytes);
        EXPECT_EQ(program.kept_bytes + program.kept_for_weights_bytes,
                  kept_bytes(model.impl().graph(unit), choice));
        EXPECT_EQ(program.weights.steps.empty(),
                  !splits_backward || !model.impl().graph(unit).splits_backward());
      }
  }
}

// The input of a linear op is kept, or is computed again by backward, and is there twice at no time.
TEST_P(LadderTest, WhatWeightsNeedIsKeptOrLeft) {
  const Model model(GetParam(), Dtype::kF32, 4, 8);
  const auto library = kernels::load_matrix_library(2);
  kernels::ProductSurvey products(*library);
  const Graph& block = model.impl().graph(1);
  std::size_t read = 0, gradients = 0;
  for (const auto& op : block.ops()) {
    if (!op->spec().splits_backward) continue;
    for (const ValueId value : op->spec().saved) read += block.values()[value].bytes();
    for (const ValueId value : op->spec().outputs) gradients += block.values()[value].bytes();
  }
  const std::vector<Choice> ladder = choice_ladder(block);
  for (const Choice& choice : ladder) {
    const UnitProgram program = compile(block, choice, products, true);
    EXPECT_EQ(program.kept_for_weights_bytes + program.left_for_weights_bytes, read + gradients);
  }
  EXPECT_EQ(compile(block, ladder.front(), products, true).kept_for_weights_bytes, read);
  EXPECT_EQ(compile(block, ladder.back(), products, true).kept_for_weights_bytes, 0u);
}

INSTANTIATE_TEST_SUITE_P(Models, LadderTest,
                         ::testing::Values(small_gpt2(), small_gpt2(true, 0.1f), small_llama(),
                                           small_llama(true, true)));

TEST(RecomputeTest, NormsAndActivationsGoFirst) {
  const Model model(preset("gpt2-124m"), Dtype::kF32, 4, 256);
  const std::vector<Choice> ladder = choice_ladder(model.impl().graph(1));
  EXPECT_THAT(split_names(ladder[3].name), ElementsAre("ln1", "ln2", "gelu"));
}

TEST(RecomputeTest, WhatADroppedOpNeedsRunsAgainOnlyWhereItIsNotKept) {
  const Model model(small_gpt2(), Dtype::kF32, 2, 8);
  const Graph& block = model.impl().graph(1);
  const auto names = [&](const std::string& dropped) {
    std::vector<std::string> result;
    for (const std::size_t op : recomputed_ops(block, named_choice(block, dropped))) {
      result.push_back(block.ops()[op]->spec().name);
    }
    return result;
  };
  EXPECT_THAT(names("gelu"), ElementsAre("gelu"));
  EXPECT_THAT(names("add1"), ElementsAre("proj", "add1"));
  EXPECT_THAT(names("attention+ln1"), ElementsAre("ln1", "attention"));
  EXPECT_THAT(names("qkv+ln1"), ElementsAre("ln1", "qkv"));
  EXPECT_THAT(names("proj"), ElementsAre());
}

TEST(ProgramTest, ResidualGradientsAndGeluWorkInPlace) {
  const Model model(small_gpt2(), Dtype::kF32, 2, 8);
  const auto library = kernels::load_matrix_library(2);
  kernels::ProductSurvey products(*library);
  const Graph& block = model.impl().graph(1);
  const Program program = compile(block, choice_ladder(block).front(), products).backward;
  for (const Step& step : program.steps) {
    if (step.kind == Step::Kind::kCopy) {
      EXPECT_EQ(step.from, step.to);
    }
    if (step.kind == Step::Kind::kBackward && block.ops()[step.op]->spec().name == "gelu") {
      EXPECT_EQ(step.input_gradients[0], step.output_gradients[0]);
    }
  }
}

class Nothing : public Op {
 public:
  using Op::Op;
  void forward(const OpContext&) const override {}
  void backward(const OpContext&) const override {}
};

TEST(GraphTest, AnOpThatReadsWhatIsNotMadeYetIsRefused) {
  Graph graph;
  const ValueId a = graph.add_value({"a", 1, Dtype::kF32, true}),
                b = graph.add_value({"b", 1, Dtype::kF32, true});
  OpSpec spec{.name = "op", .inputs = {a}, .outputs = {b}};
  EXPECT_THROW(graph.add_op(std::make_unique<Nothing>(spec)), Error);
  graph.set_input(a);
  graph.add_op(std::make_unique<Nothing>(spec));
  EXPECT_THROW(graph.add_op(std::make_unique<Nothing>(spec)), Error) << "b is made twice";
}

// The input of a unit, and the gradient of its output, are gone when gradients of weights are computed.
TEST(GraphTest, WeightsThatNeedTheInputOfAUnitAreRefusedWhereTheyAreApart) {
  Graph graph;
  const ValueId a = graph.add_value({"a", 1, Dtype::kF32, true}),
                b = graph.add_value({"b", 1, Dtype::kF32, true});
  graph.set_input(a);
  OpSpec spec{.name = "first", .inputs = {a}, .outputs = {b}, .saved = {a}};
  spec.splits_backward = true;
  graph.add_op(std::make_unique<Nothing>(spec));
  const auto library = kernels::load_matrix_library(1);
  kernels::ProductSurvey products(*library);
  const Choice none = choice_ladder(graph).front();
  EXPECT_NO_THROW(compile(graph, none, products));
  EXPECT_THROW(compile(graph, none, products, true), Error);
}

}  // namespace sluice::models::testing::graph_test
