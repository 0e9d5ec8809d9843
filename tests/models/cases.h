#pragma once
#include "kernels/loss.h"
#include "models/families/gpt2.h"
#include "models/families/llama.h"
#include "plain_run.h"
#include "rounding.h"
#include "testing.h"

// Small models and data for the tests of this room.
namespace sluice::models::testing {

inline ModelConfig small_gpt2(bool tied = true, float dropout = 0) {
  ModelConfig config;
  config.family = &kGpt2;
  config.vocabulary = 37;
  config.context = 12;
  config.layers = 2;
  config.width = 16;
  config.heads = config.kv_heads = 2;
  config.head_width = 8;
  config.hidden_width = 40;
  config.tied_head = tied;
  config.embedding_dropout = config.attention_dropout = config.residual_dropout = dropout;
  return config;
}

inline ModelConfig small_llama(bool tied = false, bool bias = false) {
  ModelConfig config = small_gpt2(tied);
  config.family = bias ? &kQwen2 : &kLlama;
  config.heads = 4;
  config.kv_heads = 2;
  config.head_width = 6;
  config.hidden_width = 24;
  config.rope_theta = 100;
  config.qkv_bias = bias;
  return config;
}

// A GPT-2 of which every second block is Llama's, with another inner width. No file has such a model.
inline const Family& mixed_family() {
  static const Family family = [] {
    Family mixed = kGpt2;
    mixed.model_type = "mixed";
    mixed.build = [](const Shape& shape) {
      Shape other = shape;
      other.config.hidden_width /= 2;
      Architecture architecture = kGpt2.build(shape);
      architecture.blocks.push_back(std::move(kLlama.build(other).blocks.front()));
      for (std::size_t i = 1; i < architecture.block_of.size(); i += 2) architecture.block_of[i] = 1;
      return architecture;
    };
    return mixed;
  }();
  return family;
}

inline ModelConfig small_mixed(bool tied = true, float dropout = 0) {
  ModelConfig config = small_gpt2(tied, dropout);
  config.family = &mixed_family();
  config.layers = 5;
  return config;
}

// The tokens and targets of a step, of which a few targets do not count.
struct Data {
  Data(const Model& model, std::size_t count, unsigned seed = 3) {
    std::mt19937 random(seed);
    const std::size_t rows = model.batch() * model.length();
    std::uniform_int_distribution<std::int32_t> any(0,
                                                    static_cast<std::int32_t>(model.config().vocabulary) - 1);
    for (std::size_t i = 0; i < count * rows; ++i) {
      tokens.push_back(any(random));
      targets.push_back(random() % 8 == 0 ? kernels::kIgnoredTarget : any(random));
    }
    for (std::size_t i = 0; i < count; ++i) {
      micro_batches.push_back({std::span(tokens).subspan(i * rows, rows),
                               std::span(targets).subspan(i * rows, rows), 100 + i * model.batch()});
    }
  }
  std::vector<std::int32_t> tokens, targets;
  std::vector<MicroBatch> micro_batches;
};

// The relative error of a loss, or of the norm of a parameter's gradient, by all layers forward and backward.
// A matrix sums over its inputs, its outputs and, for its gradient, the rows (tokens of a step); so do
// attention and norms. Each parameter has some sixteen elementwise operations, of which a quarter is stored
// in the model's type; sums are in f32.
inline double rounding_of(const Model& model, std::size_t rows) {
  std::size_t terms = 0, operations = 0;
  for (const engine::UnitSpec& unit : model.units())
    for (const engine::ParameterSpec& spec : unit.parameters) {
      const bool matrix = spec.shape.size() > 1;
      terms += rows + (matrix ? spec.shape[0] + spec.shape[1] : 2 * spec.shape[0]);
      operations += 16;
    }
  const Dtype type = model.impl().shape.dtype;
  const double stored =
      type == Dtype::kF32 ? 0 : test::of_roundings(static_cast<double>(operations) / 4, type);
  return stored + test::of_roundings(static_cast<double>(terms + operations));
}

// The relative error of the mean of `count` values, each off by `error` and by its square, the same for all.
inline double rounding_of_mean(double error, std::size_t count) {
  return error / std::sqrt(static_cast<double>(count)) + error * error;
}

// Weights that a trained model might have, with norms around one.
inline void randomize(PlainSource& source, unsigned seed = 5) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, 0.2f);
  for (std::size_t parameter = 0; parameter < source.parameters(); ++parameter) {
    const engine::ParameterSpec& spec = source.spec(parameter);
    const bool is_gamma = spec.shape.size() == 1 && spec.name.ends_with("weight");
    for (std::size_t i = 0; i < source.elements(parameter); ++i) {
      source.set(parameter, i, normal(random) + (is_gamma ? 1.0f : 0.0f));
    }
  }
}

}  // namespace sluice::models::testing
