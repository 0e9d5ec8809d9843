#include "models/families/config.h"

#include "core/error.h"
#include "models/model/model.h"
#include "temporary_folder.h"
#include "testing.h"
#include "thrown.h"

namespace sluice::models::config_test {

std::uint64_t parameters_of(const ModelConfig& config) {
  std::uint64_t sum = 0;
  const Model model(config, Dtype::kF32, 1, 8);
  for (const engine::UnitSpec& unit : model.units()) {
    for (const engine::ParameterSpec& parameter : unit.parameters) {
      std::uint64_t elements = 1;
      for (const std::size_t dimension : parameter.shape) elements *= dimension;
      sum += elements;
    }
  }
  return sum;
}

TEST(PresetTest, HaveThePublishedNumbersOfParameters) {
  EXPECT_EQ(parameters_of(preset("gpt2-124m")), 124439808u);
  EXPECT_EQ(parameters_of(preset("gpt2-355m")), 354823168u);
  EXPECT_EQ(parameters_of(preset("gpt2-774m")), 774030080u);
  EXPECT_EQ(parameters_of(preset("gpt2-1.5b")), 1557611200u);
  EXPECT_EQ(parameters_of(preset("llama-1b")), 1235814400u);
  EXPECT_EQ(parameters_of(preset("llama-3b")), 3212749824u);
  EXPECT_EQ(parameters_of(preset("llama-8b")), 8030261248u);
  EXPECT_EQ(parameters_of(preset("llama-70b")), 70553706496u);
}

TEST(PresetTest, TakesAnotherVocabularyAndRefusesUnknownNames) {
  EXPECT_EQ(preset("gpt2-124m", 256).vocabulary, 256u);
  EXPECT_THAT(message_of([] { preset("gpt2-124"); }), HasSubstr("'gpt2-124m'"));
  EXPECT_THAT(message_of([] { preset("gpt2-124m", 0); }), HasSubstr("vocabulary"));
  EXPECT_THAT(message_of([] { resolve_model("tiny-lama"); }), HasSubstr("'tiny-llama'"));
}

TEST(ConfigTest, EveryPresetComesBackFromItsConfigJson) {
  for (const std::string& name : preset_names()) {
    ModelConfig config = preset(name);
    const Json json = config_to_hugging_face(config, Dtype::kF32);
    const ModelConfig back = config_from_hugging_face(json, "config.json");
    EXPECT_EQ(config_to_hugging_face(back, Dtype::kF32), json) << name;
    ModelConfig again = back;
    again.hugging_face = nullptr;
    EXPECT_EQ(config_to_hugging_face(again, Dtype::kF32), json) << name;
    EXPECT_EQ(json.at("torch_dtype"), "float32");
  }
}

TEST(ConfigTest, WhatCameFromAFileIsWrittenBackWhole) {
  Json json = config_to_hugging_face(preset("tiny-llama"), Dtype::kF32);
  json["bos_token_id"] = 7;
  json["something_of_ones_own"] = {1, 2};
  json["dtype"] = "float32";
  const Json back = config_to_hugging_face(config_from_hugging_face(json, "config.json"), Dtype::kBf16);
  EXPECT_EQ(back.at("bos_token_id"), 7);
  EXPECT_EQ(back.at("something_of_ones_own"), json.at("something_of_ones_own"));
  EXPECT_EQ(back.at("torch_dtype"), "bfloat16");
  EXPECT_EQ(
      config_to_hugging_face(config_from_hugging_face(json, "config.json"), Dtype::kF16).at("torch_dtype"),
      "float16");
  EXPECT_FALSE(back.contains("dtype"));
}

TEST(ConfigTest, ReadsQwen2AndBothFormsOfRope) {
  Json json = config_to_hugging_face(preset("tiny-llama"), Dtype::kF32);
  json["model_type"] = "qwen2";
  EXPECT_TRUE(config_from_hugging_face(json, "config.json").qkv_bias);
  const Json llama3 = {{"rope_type", "llama3"},  {"factor", 8.0},
                       {"low_freq_factor", 1.0}, {"high_freq_factor", 4.0},
                       {"rope_theta", 5000.0},   {"original_max_position_embeddings", 64}};
  json["rope_parameters"] = llama3;
  const ModelConfig config = config_from_hugging_face(json, "config.json");
  EXPECT_EQ(config.rope_theta, 5000);
  ASSERT_TRUE(config.rope_scaling);
  EXPECT_EQ(config.rope_scaling->original_context, 64u);
  json["rope_parameters"] = {{"rope_type", "linear"}, {"factor", 2.5}, {"rope_theta", 5000.0}};
  ModelConfig linear = config_from_hugging_face(json, "config.json");
  linear.hugging_face = nullptr;
  const Json written = {{"rope_type", "linear"}, {"factor", 2.5}};
  EXPECT_EQ(config_to_hugging_face(linear, Dtype::kF32).at("rope_scaling"), written);
}

struct Refusal {
  std::string preset, key;
  Json value;
  std::string expected;
};

class RefusalTest : public ::testing::TestWithParam<Refusal> {};

TEST_P(RefusalTest, NamesTheKey) {
  const Refusal& refusal = GetParam();
  Json json = config_to_hugging_face(preset(refusal.preset), Dtype::kF32);
  if (refusal.value.is_discarded()) {
    json.erase(refusal.key);
  } else {
    json[refusal.key] = refusal.value;
  }
  const std::string text = message_of([&] { config_from_hugging_face(json, "a/config.json"); });
  EXPECT_THAT(text, HasSubstr("a/config.json"));
  EXPECT_THAT(text, HasSubstr("'" + refusal.key + "'"));
  EXPECT_THAT(text, HasSubstr(refusal.expected));
}

const Json kAbsent = Json(nlohmann::detail::value_t::discarded);

INSTANTIATE_TEST_SUITE_P(
    Keys, RefusalTest,
    ::testing::Values(
        Refusal{"tiny", "activation_function", "relu", "gelu_new"},
        Refusal{"tiny", "model_type", "gpt3", "qwen2 (the nearest is gpt2); in Python sluice.torch"},
        Refusal{"tiny", "model_type", kAbsent, "missing"}, Refusal{"tiny", "n_layer", kAbsent, "missing"},
        Refusal{"tiny", "n_layer", 0, "at least 1"}, Refusal{"tiny", "n_layer", -3, "at least 1"},
        Refusal{"tiny", "n_layer", "12", "whole number"}, Refusal{"tiny", "n_layer", 1.5, "whole number"},
        Refusal{"tiny", "n_head", 7, "divisor"}, Refusal{"tiny", "resid_pdrop", 1.0, "less than 1"},
        Refusal{"tiny", "scale_attn_by_inverse_layer_idx", true, "false"},
        Refusal{"tiny", "layer_norm_epsilon", -1, "above 0"},
        Refusal{"tiny", "layer_norm_epsilon", 1e-50, "above 0, in f32"},
        Refusal{"tiny", "initializer_range", 1e50, "range of f32"},
        Refusal{"tiny", "resid_pdrop", 0.999999999999, "less than 1"},
        Refusal{"tiny-llama", "hidden_act", "gelu", "silu"},
        Refusal{"tiny-llama", "attention_bias", true, "false"},
        Refusal{"tiny-llama", "num_key_value_heads", 3, "divisor"},
        Refusal{"tiny-llama", "head_dim", 5, "even"},
        Refusal{"tiny-llama", "quantization_config", {{"bits", 4}}, "absent"},
        Refusal{"tiny-llama", "tie_word_embeddings", "yes", "true or false"}));

TEST(ConfigTest, RefusesOtherRopesAndSlidingWindows) {
  Json json = config_to_hugging_face(preset("tiny-llama"), Dtype::kF32);
  json["rope_scaling"] = {{"rope_type", "yarn"}, {"factor", 4}};
  EXPECT_THAT(message_of([&] { config_from_hugging_face(json, "c"); }), HasSubstr("'rope_type' is \"yarn\""));
  json["rope_scaling"] = nullptr;
  json["model_type"] = "qwen2";
  json["use_sliding_window"] = true;
  EXPECT_THAT(message_of([&] { config_from_hugging_face(json, "c"); }), HasSubstr("use_sliding_window"));
  json["model_type"] = "mistral";
  EXPECT_NO_THROW(config_from_hugging_face(json, "c"));  // 4096 by default, longer than its context
  json["sliding_window"] = 128;
  EXPECT_THAT(
      message_of([&] { config_from_hugging_face(json, "c"); }),
      HasSubstr("'sliding_window' is 128; it must be null, or at least max_position_embeddings (256; lower"));
  json["sliding_window"] = nullptr;
  EXPECT_NO_THROW(config_from_hugging_face(json, "c"));
  json["max_position_embeddings"] = 8192;
  EXPECT_NO_THROW(config_from_hugging_face(json, "c"));
  json.erase("sliding_window");
  EXPECT_THAT(message_of([&] { config_from_hugging_face(json, "c"); }), HasSubstr("sliding_window"));
  EXPECT_THAT(message_of([&] { config_from_hugging_face(Json::array(), "c"); }), HasSubstr("not an object"));
}

TEST(ConfigTest, AMisspelledKeyIsNamed) {
  Json json = config_to_hugging_face(preset("tiny"), Dtype::kF32);
  json.erase("n_layer");
  json["n_layers"] = 3;
  EXPECT_THAT(message_of([&] { config_from_hugging_face(json, "c"); }), HasSubstr("'n_layers'"));
}

TEST(ConfigTest, AFolderIsReadByItsConfigJson) {
  const TemporaryFolder folder;
  EXPECT_THAT(message_of([&] { resolve_model(folder.path()); }), HasSubstr("as each checkpoint in an --out"));
  folder.put("config.json", config_to_hugging_face(preset("tiny", 99), Dtype::kF32).dump());
  EXPECT_EQ(resolve_model(folder.path()).vocabulary, 99u);
}

}  // namespace sluice::models::config_test
