#pragma once
#include "models/families/config.h"
#include "testing.h"

// The loss of both families in f64, as the papers define it. It shares nothing with the models but the names
// of their parameters, which say what each block is.
namespace sluice::models::testing {

using Values = std::map<std::string, std::vector<double>>;
using Matrix = std::vector<std::vector<double>>;  // rows of tokens

class Reference {
 public:
  Reference(const ModelConfig& config, const Values& values) : config_(config), values_(values) {}

  // Returns the sum over targets that are not negative. Sequences are independent of each other.
  double loss(std::span<const std::int32_t> tokens, std::span<const std::int32_t> targets,
              std::size_t length) const {
    double sum = 0;
    for (std::size_t begin = 0; begin < tokens.size(); begin += length) {
      const Matrix logits = sequence(tokens.subspan(begin, length));
      for (std::size_t t = 0; t < length; ++t) {
        if (targets[begin + t] < 0) continue;
        double total = 0;
        for (const double logit : logits[t]) total += std::exp(logit);
        sum += std::log(total) - logits[t][static_cast<std::size_t>(targets[begin + t])];
      }
    }
    return sum;
  }

  Matrix sequence(std::span<const std::int32_t> tokens) const {
    const bool gpt2 = has("transformer.wte.weight");
    const std::string table = gpt2 ? "transformer.wte.weight" : "model.embed_tokens.weight";
    Matrix x(tokens.size(), std::vector<double>(config_.width));
    for (std::size_t t = 0; t < tokens.size(); ++t) {
      for (std::size_t i = 0; i < config_.width; ++i) {
        x[t][i] = at(table, static_cast<std::size_t>(tokens[t]) * config_.width + i);
        if (gpt2) x[t][i] += at("transformer.wpe.weight", t * config_.width + i);
      }
    }
    for (std::size_t layer = 0; layer < config_.layers; ++layer) {
      const std::string prefix = (gpt2 ? "transformer.h." : "model.layers.") + std::to_string(layer) + ".";
      x = has(prefix + "ln_1.weight") ? gpt2_block(x, prefix) : llama_block(x, prefix);
    }
    x = norm(x, gpt2 ? "transformer.ln_f" : "model.norm");
    return linear(x, config_.tied_head ? table : "lm_head.weight", true);
  }

 private:
  bool has(const std::string& name) const { return values_.contains(name); }
  double at(const std::string& name, std::size_t i) const { return values_.at(name)[i]; }

  // Adds the bias where there is one.
  Matrix linear(const Matrix& x, const std::string& weight, bool transposed) const {
    const std::vector<double>& w = values_.at(weight);
    const std::string bias = weight.substr(0, weight.rfind('.')) + ".bias";
    const std::size_t in = x[0].size(), out = w.size() / in;
    Matrix y(x.size(), std::vector<double>(out));
    for (std::size_t t = 0; t < x.size(); ++t) {
      for (std::size_t j = 0; j < out; ++j) {
        y[t][j] = has(bias) ? at(bias, j) : 0;
        for (std::size_t i = 0; i < in; ++i) y[t][j] += x[t][i] * w[transposed ? j * in + i : i * out + j];
      }
    }
    return y;
  }

  Matrix norm(const Matrix& x, const std::string& name) const {
    Matrix y = x;
    const bool centered = has(name + ".bias");
    const double width = static_cast<double>(config_.width);
    for (std::vector<double>& row : y) {
      double mean = 0, square = 0;
      if (centered) {
        for (const double value : row) mean += value / width;
      }
      for (const double value : row) square += (value - mean) * (value - mean) / width;
      for (std::size_t i = 0; i < row.size(); ++i) {
        row[i] = (row[i] - mean) / std::sqrt(square + static_cast<double>(config_.norm_epsilon)) *
                 at(name + ".weight", i);
        if (centered) row[i] += at(name + ".bias", i);
      }
    }
    return y;
  }

  Matrix attention(const Matrix& q, const Matrix& k, const Matrix& v) const {
    const std::size_t width = config_.head_width, shared = config_.heads / config_.kv_heads;
    Matrix y(q.size(), std::vector<double>(config_.heads * width));
    for (std::size_t head = 0; head < config_.heads; ++head) {
      for (std::size_t t = 0; t < q.size(); ++t) {
        std::vector<double> weights(t + 1);
        double total = 0;
        for (std::size_t s = 0; s <= t; ++s) {
          double score = 0;
          for (std::size_t i = 0; i < width; ++i)
            score += q[t][head * width + i] * k[s][head / shared * width + i];
          total += weights[s] = std::exp(score / std::sqrt(static_cast<double>(width)));
        }
        for (std::size_t s = 0; s <= t; ++s) {
          for (std::size_t i = 0; i < width; ++i) {
            y[t][head * width + i] += weights[s] / total * v[s][head / shared * width + i];
          }
        }
      }
    }
    return y;
  }

  void turn(Matrix& x) const {
    const std::size_t width = config_.head_width, half = width / 2;
    for (std::size_t t = 0; t < x.size(); ++t) {
      for (std::size_t head = 0; head < x[t].size(); head += width) {
        for (std::size_t i = 0; i < half; ++i) {
          const double angle =
              static_cast<double>(t) *
              std::pow(config_.rope_theta, -2.0 * static_cast<double>(i) / static_cast<double>(width));
          const double a = x[t][head + i], b = x[t][head + i + half];
          x[t][head + i] = a * std::cos(angle) - b * std::sin(angle);
          x[t][head + i + half] = b * std::cos(angle) + a * std::sin(angle);
        }
      }
    }
  }

  static Matrix add(Matrix a, const Matrix& b) {
    for (std::size_t t = 0; t < a.size(); ++t) {
      for (std::size_t i = 0; i < a[t].size(); ++i) a[t][i] += b[t][i];
    }
    return a;
  }

  static Matrix columns(const Matrix& x, std::size_t first, std::size_t count) {
    Matrix y;
    for (const auto& row : x) {
      y.emplace_back(row.begin() + static_cast<std::ptrdiff_t>(first),
                     row.begin() + static_cast<std::ptrdiff_t>(first + count));
    }
    return y;
  }

  Matrix gpt2_block(const Matrix& x, const std::string& prefix) const {
    const auto apply = [&](const Matrix& in, const std::string& name) {
      return linear(in, prefix + name + ".weight", false);
    };
    const std::size_t d = config_.width;
    const Matrix qkv = apply(norm(x, prefix + "ln_1"), "attn.c_attn");
    const Matrix mixed = attention(columns(qkv, 0, d), columns(qkv, d, d), columns(qkv, 2 * d, d));
    const Matrix middle = add(x, apply(mixed, "attn.c_proj"));
    Matrix up = apply(norm(middle, prefix + "ln_2"), "mlp.c_fc");
    for (auto& row : up) {
      for (double& value : row) {
        value *= 0.5 * (1 + std::tanh(std::sqrt(2 / M_PI) * (value + 0.044715 * value * value * value)));
      }
    }
    return add(middle, apply(up, "mlp.c_proj"));
  }

  Matrix llama_block(const Matrix& x, const std::string& prefix) const {
    const auto apply = [&](const Matrix& in, const std::string& name) {
      return linear(in, prefix + name + ".weight", true);
    };
    const Matrix n1 = norm(x, prefix + "input_layernorm");
    Matrix q = apply(n1, "self_attn.q_proj");
    Matrix k = apply(n1, "self_attn.k_proj");
    turn(q);
    turn(k);
    const Matrix mixed = attention(q, k, apply(n1, "self_attn.v_proj"));
    const Matrix middle = add(x, apply(mixed, "self_attn.o_proj"));
    const Matrix n2 = norm(middle, prefix + "post_attention_layernorm");
    Matrix up = apply(n2, "mlp.up_proj");
    const Matrix gate = apply(n2, "mlp.gate_proj");
    for (std::size_t t = 0; t < up.size(); ++t) {
      for (std::size_t i = 0; i < up[t].size(); ++i) up[t][i] *= gate[t][i] / (1 + std::exp(-gate[t][i]));
    }
    return add(middle, apply(up, "mlp.down_proj"));
  }

  const ModelConfig& config_;
  const Values& values_;
};

}  // namespace sluice::models::testing
