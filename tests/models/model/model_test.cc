#include "models/model/model.h"

#include "core/error.h"
#include "models/cases.h"
#include "testing.h"
#include "thrown.h"

namespace sluice::models::testing::model_test {

using ::testing::Contains;

std::vector<std::string> names(const engine::UnitSpec& unit) {
  std::vector<std::string> result;
  for (const engine::ParameterSpec& parameter : unit.parameters) result.push_back(parameter.name);
  return result;
}

TEST(UnitsTest, HaveTheNamesOfTransformers) {
  const Model gpt2(small_gpt2(), Dtype::kF32, 1, 8);
  ASSERT_EQ(gpt2.units().size(), 4u);
  EXPECT_THAT(names(gpt2.units()[0]), ElementsAre("transformer.wte.weight", "transformer.wpe.weight"));
  EXPECT_THAT(names(gpt2.units()[2]),
              ElementsAre("transformer.h.1.ln_1.weight", "transformer.h.1.ln_1.bias",
                          "transformer.h.1.attn.c_attn.weight", "transformer.h.1.attn.c_attn.bias",
                          "transformer.h.1.attn.c_proj.weight", "transformer.h.1.attn.c_proj.bias",
                          "transformer.h.1.ln_2.weight", "transformer.h.1.ln_2.bias",
                          "transformer.h.1.mlp.c_fc.weight", "transformer.h.1.mlp.c_fc.bias",
                          "transformer.h.1.mlp.c_proj.weight", "transformer.h.1.mlp.c_proj.bias"));
  EXPECT_THAT(names(gpt2.units()[3]), ElementsAre("transformer.ln_f.weight", "transformer.ln_f.bias"));
  EXPECT_THAT(gpt2.units()[1].parameters[2].shape, ElementsAre(16, 48));
  const Model llama(small_llama(), Dtype::kF32, 1, 8);
  EXPECT_THAT(
      names(llama.units()[1]),
      ElementsAre("model.layers.0.input_layernorm.weight", "model.layers.0.self_attn.q_proj.weight",
                  "model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.v_proj.weight",
                  "model.layers.0.self_attn.o_proj.weight", "model.layers.0.post_attention_layernorm.weight",
                  "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight",
                  "model.layers.0.mlp.down_proj.weight"));
  EXPECT_THAT(names(llama.units()[3]), ElementsAre("model.norm.weight", "lm_head.weight"));
  EXPECT_THAT(llama.units()[1].parameters[2].shape, ElementsAre(12, 16));
}

TEST(UnitsTest, MayBeBlocksThatDiffer) {
  const Model model(small_mixed(), Dtype::kF32, 1, 8);
  ASSERT_EQ(model.units().size(), 7u);
  EXPECT_THAT(names(model.units()[1]), Contains("transformer.h.0.mlp.c_fc.bias"));
  EXPECT_THAT(names(model.units()[2]), Contains("transformer.h.1.mlp.gate_proj.weight"));
  EXPECT_EQ(names(model.units()[3]).size(), names(model.units()[1]).size());
  const Model::Impl& impl = model.impl();
  EXPECT_EQ(&impl.graph(1), &impl.graph(5));
  EXPECT_NE(&impl.graph(1), &impl.graph(2));
  for (engine::UnitId unit = 1; unit < model.units().size(); ++unit)
    EXPECT_EQ(impl.first_op(unit), impl.first_op(unit - 1) + impl.graph(unit - 1).ops().size());
}

TEST(UnitsTest, MatricesDecayAndATiedTableHasTwoUses) {
  const std::set<std::string> tables = {"transformer.wte.weight", "transformer.wpe.weight"};
  const Model model(small_gpt2(), Dtype::kF32, 1, 8);
  for (const engine::UnitSpec& unit : model.units()) {
    for (const engine::ParameterSpec& parameter : unit.parameters) {
      EXPECT_EQ(parameter.group, parameter.shape.size() < 2 ? kNotDecayed
                                 : parameter.by_elements    ? kTables
                                                            : kDecayed)
          << parameter.name;
      EXPECT_EQ(parameter.by_elements, tables.contains(parameter.name)) << parameter.name;
    }
  }
  EXPECT_EQ(model.units()[0].parameters[0].uses, 2);
  EXPECT_EQ(Model(small_gpt2(false), Dtype::kF32, 1, 8).units()[0].parameters[0].uses, 1);
}

TEST(ProfileTest, TheScheduleIsForwardHeadAndBackward) {
  const auto library = kernels::load_matrix_library(2);
  using A = engine::Access;
  const Model tied(small_gpt2(), Dtype::kF32, 1, 8);
  EXPECT_THAT(tied.profile(1, *library).schedule,
              ElementsAre(A{0, true}, A{1, true}, A{2, true}, A{3, true, 0, true}, A{0, true, 0, false, true},
                          A{2, true, 0, true}, A{1, true, 0, true}, A{0, false, 1, true}));
  const Model untied(small_llama(), Dtype::kF32, 1, 8);
  EXPECT_THAT(untied.profile(1, *library).schedule,
              ElementsAre(A{0, true}, A{1, true}, A{2, true}, A{3, true, 0, true}, A{2, true, 0, true},
                          A{1, true, 0, true}, A{0, false, 0, true}));
}

TEST(ProfileTest, FlopsAreThoseOfTheUsualFormula) {
  const auto library = kernels::load_matrix_library(2);
  const Model model(preset("gpt2-124m"), Dtype::kF32, 2, 512);
  const engine::Profile profile = model.profile(3, *library);
  double flops = 0;
  for (const auto& unit : profile.unit_profiles) flops += unit.forward.flops() + unit.backward.flops();
  // Each token has six flops for each weight of products (tables are looked up), and attention.
  const double weights = 124439808 - 1024 * 768;
  const double attention = 12 * 7.0 * 2 * 12 * 512 * 512 * 64;
  EXPECT_NEAR(flops / (6 * weights * 1024 + attention), 1, 0.002);
  EXPECT_EQ(profile.tokens, 1024u);
  EXPECT_EQ(profile.micro_batches, 3u);
  EXPECT_EQ(profile.border_gradient_bytes, 1024u * 768 * 4);
}

TEST(ProfileTest, GradientsOfWeightsAreAddedToWhereThereAreMicroBatches) {
  const auto library = kernels::load_matrix_library(2);
  const Model model(small_gpt2(), Dtype::kF32, 1, 8);
  for (const std::size_t micro_batches : {1, 2})
    for (const kernels::Product& product : model.profile(micro_batches, *library).products)
      EXPECT_EQ(product.accumulate, product.transpose_a && micro_batches > 1);
}

TEST(ProfileTest, BytesAreWhatTheExecutorTakes) {
  const auto library = kernels::load_matrix_library(2);
  Threads threads(2);
  for (const ModelConfig& config : {small_gpt2(), small_llama(), small_mixed()}) {
    const Model model(config, Dtype::kF32, 2, 8);
    for (const Choice& choice : model.impl().choices(1)) {
      for (const std::size_t group : {1, 3}) {
        const PlainRun run(model, choice.name, group, 3, threads, *library);
        EXPECT_EQ(run.activations().size(), run.executor.activation_bytes());
        EXPECT_EQ(run.workspace().size(), run.executor.workspace_bytes());
      }
    }
  }
}

TEST(ProfileTest, LogitsOfTheWholeBatchNeverExist) {
  const auto library = kernels::load_matrix_library(2);
  const Model model(preset("gpt2-124m"), Dtype::kF32, 8, 1024);
  const std::size_t logits = std::size_t{8} * 1024 * 50257 * 4;
  const auto profile = model.profile(1, *library);
  EXPECT_LT(profile.unit_profiles.back().choices[0].workspace_bytes, logits / 10);
}

TEST(RecomputeNamesTest, AUsersListIsAChoiceAndUnknownNamesAreRefused) {
  const auto library = kernels::load_matrix_library(2);
  const Model model(small_gpt2(), Dtype::kF32, 1, 8, "gelu+attention");
  const auto profile = model.profile(1, *library);
  std::vector<std::string> known;
  for (const auto& choice : profile.unit_profiles[1].choices) known.push_back(choice.name);
  EXPECT_EQ(std::ranges::count(known, "gelu+attention"), 1);
  EXPECT_EQ(known.front(), "none");
  EXPECT_EQ(known.back(), "full");
  EXPECT_THAT(message_of([] { Model(small_gpt2(), Dtype::kF32, 1, 8, "gelu+atention"); }),
              HasSubstr("'attention'"));
  EXPECT_THAT(message_of([] { Model(small_gpt2(), Dtype::kF32, 1, 8, "ln1+"); }), HasSubstr("ln1"));
}

TEST(ModelTest, ImpossibleShapesAreRefused) {
  EXPECT_THAT(message_of([] { Model(small_gpt2(), Dtype::kF32, 1, 13); }), HasSubstr("context is 12"));
  EXPECT_THAT(message_of([] { Model(small_gpt2(), Dtype::kF32, 0, 8); }), HasSubstr("empty"));
  EXPECT_THAT(message_of([] { Model(small_gpt2(), Dtype::kI32, 1, 8); }), HasSubstr("i32"));
  ModelConfig config = small_llama();
  config.kv_heads = 3;
  EXPECT_THAT(message_of([&] { Model(config, Dtype::kF32, 1, 8); }), HasSubstr("key/value"));
}

class RunTest : public ::testing::Test {
 protected:
  Model model_{small_gpt2(), Dtype::kF32, 2, 8};
  Threads threads_{2};
  std::unique_ptr<kernels::MatrixLibrary> library_ = kernels::load_matrix_library(2);
};

TEST_F(RunTest, EvaluationGivesTheLossOfTraining) {
  PlainRun run(model_, "none", 1, 1, threads_, *library_);
  randomize(run.source);
  const Data data(model_, 1);
  const double targets = static_cast<double>(counted_targets(data.micro_batches));
  EXPECT_DOUBLE_EQ(run.executor.evaluate(data.micro_batches[0]) / targets, run.train(data.micro_batches));
}

TEST_F(RunTest, BadMicroBatchesAreRefused) {
  PlainRun run(model_, "none", 1, 1, threads_, *library_);
  randomize(run.source);
  Data data(model_, 1);
  const auto train = [&] { run.train(data.micro_batches); };
  data.tokens[3] = 37;
  EXPECT_THAT(message_of(train), HasSubstr("token 37"));
  data.tokens[3] = 0;
  data.targets[2] = -2;
  EXPECT_THAT(message_of(train), HasSubstr("token -2"));
  std::ranges::fill(data.targets, kernels::kIgnoredTarget);
  EXPECT_THAT(message_of(train), HasSubstr("no target"));
  data.micro_batches[0].tokens = data.micro_batches[0].tokens.first(15);
  EXPECT_THAT(message_of(train), HasSubstr("15 tokens"));
  std::vector<float> logits(37);
  EXPECT_THAT(message_of([&] { run.executor.next_logits({}, logits); }), HasSubstr("0 tokens"));
  EXPECT_THAT(message_of([&] { run.executor.next_logits(std::span(data.tokens).first(9), logits); }),
              HasSubstr("9"));
}

TEST_F(RunTest, BetweenIsCalledAndMayThrow) {
  PlainRun run(model_, "none", 1, 1, threads_, *library_);
  randomize(run.source);
  const Data data(model_, 1);
  run.source.begin_step();
  int calls = 0;
  const TrainStep step = {1, 1, counted_targets(data.micro_batches)};
  run.executor.train_step(data.micro_batches, step, [&] { ++calls; });
  EXPECT_GT(calls, 40);
  run.source.begin_step();
  EXPECT_THROW(run.executor.train_step(data.micro_batches, step, [] { throw std::runtime_error("stop"); }),
               std::runtime_error);
}

}  // namespace sluice::models::testing::model_test
