#include <cmath>

#include "core/error.h"
#include "kernels/simd.h"
#include "optim/optimizer.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optim/adamw.cc"
#include <hwy/foreach_target.h>

#include "kernels/simd-inl.h"

#ifndef SLUICE_OPTIM_ADAMW_TYPES
#define SLUICE_OPTIM_ADAMW_TYPES
namespace sluice::optim {

// The constants of a step, computed in f64 and rounded once.
struct AdamWFactors {
  float gradient;
  float decay;                      // 1 - lr * weight_decay
  float first_rate;                 // 1 - beta1
  float second_decay, second_rate;  // beta2, 1 - beta2
  float step_size;                  // lr / (1 - beta1^t)
  float root_scale;                 // 1 / sqrt(1 - beta2^t)
  float epsilon;
};

struct AdamWArrays {
  ConstArray gradient;
  float* master;
  float* first;   // exp_avg
  float* second;  // exp_avg_sq
  Array parameter;
};

}  // namespace sluice::optim
#endif

HWY_BEFORE_NAMESPACE();
namespace sluice::optim::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace simd = kernels::HWY_NAMESPACE;

void adamw_piece(std::size_t n, const AdamWFactors& factors, const AdamWArrays& arrays) {
  simd::for_each_vector(n, [f = factors, a = arrays](auto at) HWY_ATTR {
    using simd::mul_add, simd::set, simd::load, simd::store;
    const auto gradient = hn::Mul(load(a.gradient, at), set(f.gradient));
    auto first = load(a.first, at);
    first = mul_add(hn::Sub(gradient, first), set(f.first_rate), first);
    const auto square = hn::Mul(hn::Mul(gradient, gradient), set(f.second_rate));
    const auto second = mul_add(load(a.second, at), set(f.second_decay), square);
    const auto divisor = mul_add(hn::Sqrt(second), set(f.root_scale), set(f.epsilon));
    const auto decayed = hn::Mul(load(a.master, at), set(f.decay));
    const auto value = mul_add(hn::Div(first, divisor), set(-f.step_size), decayed);
    store(first, a.first, at);
    store(second, a.second, at);
    store(value, a.master, at);
    if (a.parameter.data != nullptr) store(value, a.parameter, at);
  });
}

}  // namespace sluice::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sluice::optim {
HWY_EXPORT(adamw_piece);

namespace {

// By squaring, and not std::pow, whose last bit differs between machines.
double power(double base, std::uint64_t exponent) {
  double result = 1;
  for (; exponent > 0; exponent >>= 1, base *= base)
    if (exponent & 1) result *= base;
  return result;
}

class AdamW final : public Optimizer {
 public:
  explicit AdamW(const AdamWSettings& settings) : settings_(settings) {}

  std::string name() const override { return "adamw"; }
  Json settings() const override {
    return {{"beta1", settings_.beta1}, {"beta2", settings_.beta2}, {"epsilon", settings_.epsilon}};
  }
  std::vector<StateArray> state() const override {
    return {{"exp_avg", Dtype::kF32}, {"exp_avg_sq", Dtype::kF32}};
  }
  void apply(Threads& threads, const Hyperparameters& hyperparameters, const Span& span) const override;

 private:
  AdamWFactors factors(const Hyperparameters& hyperparameters) const;

  AdamWSettings settings_;
};

AdamWFactors AdamW::factors(const Hyperparameters& h) const {
  const auto rounded = [](double value) { return static_cast<float>(value); };
  return {.gradient = rounded(h.gradient_factor),
          .decay = rounded(1 - h.learning_rate * h.weight_decay),
          .first_rate = rounded(1 - settings_.beta1),
          .second_decay = rounded(settings_.beta2),
          .second_rate = rounded(1 - settings_.beta2),
          .step_size = rounded(h.learning_rate / (1 - power(settings_.beta1, h.step))),
          .root_scale = rounded(1 / std::sqrt(1 - power(settings_.beta2, h.step))),
          .epsilon = rounded(settings_.epsilon)};
}

void check(const Hyperparameters& hyperparameters, const Span& span) {
  ensure(hyperparameters.step >= 1, "adamw counts steps from 1 and was given step 0");
  ensure(span.state.size() == 2 && span.state[0].type == Dtype::kF32 && span.state[1].type == Dtype::kF32,
         "adamw keeps two f32 arrays of state, exp_avg and exp_avg_sq; the span has {}", span.state.size());
  kernels::require_float({span.gradient, span.parameter});
}

void AdamW::apply(Threads& threads, const Hyperparameters& hyperparameters, const Span& span) const {
  check(hyperparameters, span);
  const AdamWFactors constants = factors(hyperparameters);
  threads.parallel_for(span.count, kernels::kLoopGrain, [&](std::size_t begin, std::size_t end) {
    const AdamWArrays arrays{span.gradient.at(begin), span.master + begin, span.state[0].f32() + begin,
                             span.state[1].f32() + begin,
                             span.parameter.data == nullptr ? Array{} : span.parameter.at(begin)};
    HWY_DYNAMIC_DISPATCH(adamw_piece)(end - begin, constants, arrays);
  });
}

}  // namespace

std::unique_ptr<Optimizer> make_adamw(const AdamWSettings& settings) {
  const auto check_beta = [](const char* name, double beta) {
    if (!(beta >= 0 && beta < 1))
      fail(ErrorCode::kInvalidArgument, "adamw: {} is {}; it must be at least 0 and below 1", name, beta);
  };
  check_beta("beta1", settings.beta1);
  check_beta("beta2", settings.beta2);
  if (!(settings.epsilon >= 0) || std::isinf(settings.epsilon))
    fail(ErrorCode::kInvalidArgument, "adamw: epsilon is {}; it must be finite and not negative",
         settings.epsilon);
  return std::make_unique<AdamW>(settings);
}

}  // namespace sluice::optim
#endif  // HWY_ONCE
