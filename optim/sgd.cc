#include "core/error.h"
#include "kernels/simd.h"
#include "optim/elementwise.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optim/sgd.cc"
#include <hwy/foreach_target.h>

#include "optim/gradient-inl.h"

#ifndef SLUICE_OPTIM_SGD_TYPES
#define SLUICE_OPTIM_SGD_TYPES
namespace sluice::optim {

// The constants of a step, rounded once.
struct SgdFactors {
  GradientRule gradient;
  float decay, learning_rate, momentum;
  bool nesterov;
};

}  // namespace sluice::optim
#endif

HWY_BEFORE_NAMESPACE();
namespace sluice::optim::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace simd = kernels::HWY_NAMESPACE;

void sgd_piece(const SgdFactors& factors, const Piece& piece) {
  simd::for_each_vector(piece.count, [f = factors, a = piece](auto at) HWY_ATTR {
    using simd::mul_add, simd::set, simd::load, simd::store;
    const auto before = load(a.master, at);
    const auto scaled = ruled(simd::F32(), f.gradient, a.gradient, at);
    const auto gradient = mul_add(before, set(f.decay), scaled);
    auto direction = gradient;
    if (a.state[0].data != nullptr) {
      const auto buffer = mul_add(load(a.state[0], at), set(f.momentum), gradient);
      direction = f.nesterov ? mul_add(buffer, set(f.momentum), gradient) : buffer;
      store(buffer, a.state[0], at);
    }
    const auto value = mul_add(direction, set(-f.learning_rate), before);
    store_value(value, a, at);
  });
}

}  // namespace sluice::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sluice::optim {
HWY_EXPORT(sgd_piece);

namespace {

class Sgd final : public Elementwise {
 public:
  explicit Sgd(const SgdSettings& settings) : Elementwise("sgd", settings.storage), settings_(settings) {}

  std::vector<StateArray> state() const override {
    if (settings_.momentum == 0) return {};
    return {{"momentum_buffer", state_type()}};
  }
  void apply(Threads& threads, const Hyperparameters& h, const Span& span) const override {
    const auto rounded = [](double value) { return static_cast<float>(value); };
    const SgdFactors factors = {.gradient = gradient_rule(h),
                                .decay = rounded(h.weight_decay),
                                .learning_rate = rounded(h.learning_rate),
                                .momentum = rounded(settings_.momentum),
                                .nesterov = settings_.nesterov};
    for_each_piece(threads, h, span, [&](const Piece& piece) {
      HWY_DYNAMIC_DISPATCH(sgd_piece)(factors, piece);
    });
  }

 private:
  Json arithmetic() const override {
    return {{"momentum", settings_.momentum}, {"nesterov", settings_.nesterov}};
  }

  SgdSettings settings_;
};

}  // namespace

std::unique_ptr<Optimizer> make_sgd(const SgdSettings& settings) {
  check_share("sgd", "momentum", settings.momentum);
  if (settings.nesterov && settings.momentum == 0)
    fail(ErrorCode::kInvalidArgument, "sgd: nesterov is asked for without momentum; give a momentum above 0");
  if (settings.storage.state != Dtype::kF32 && settings.momentum == 0)
    fail(ErrorCode::kInvalidArgument,
         "sgd: its state is to be {}, and without momentum it has none; leave that out, or give a momentum "
         "above 0",
         state_type_name(settings.storage.state));
  return std::make_unique<Sgd>(settings);
}

}  // namespace sluice::optim
#endif  // HWY_ONCE
