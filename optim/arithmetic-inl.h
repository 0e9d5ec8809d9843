// The arithmetic of one element, written once for CPU vectors and GPU threads, so that both give the same
// bits. It is included within a namespace, once for each target, after SLUICE_ARITHMETIC is defined as the
// prefix of functions, and SLUICE_UNROLL_LINES as the pragma that unrolls a loop. Ops has the operations on
// its type V, each rounded once.

template <class Ops, class V = typename Ops::V>
SLUICE_ARITHMETIC V clipped(const GradientRule& rule, V value) {  // a NaN stays NaN
  const V high = Ops::set(rule.bound), low = Ops::set(-rule.bound);
  return Ops::choose(Ops::greater(value, high), high, Ops::choose(Ops::greater(low, value), low, value));
}
template <class Ops, class V = typename Ops::V>
SLUICE_ARITHMETIC V ruled(const GradientRule& rule, V gradient) {
  const V value = Ops::mul(gradient, Ops::set(rule.factor));
  return rule.clips() ? clipped<Ops>(rule, value) : value;
}

// `e` has an element's gradient, its value, and its entries in the optimizer's two state arrays. The decay
// goes into the parameter (AdamW), or into the gradient (Adam).
template <class Ops, class Elements>
SLUICE_ARITHMETIC void update_adam(const AdamFactors& f, Elements& e) {
  auto gradient = e.gradient;
  if (!f.decoupled) gradient = Ops::mul_add(e.value, Ops::set(f.decay), gradient);
  e.first = Ops::mul_add(e.first, Ops::set(f.first_decay), Ops::mul(gradient, Ops::set(f.first_rate)));
  const auto square = Ops::mul(Ops::mul(gradient, gradient), Ops::set(f.second_rate));
  e.second = Ops::mul_add(e.second, Ops::set(f.second_decay), square);
  const auto divisor = Ops::mul_add(Ops::root(e.second), Ops::set(f.root_scale), Ops::set(f.epsilon));
  const auto decayed = f.decoupled ? Ops::mul(e.value, Ops::set(f.decay)) : e.value;
  e.value = Ops::mul_add(Ops::div(e.first, divisor), Ops::set(-f.step_size), decayed);
}

template <class Ops, class Elements>
SLUICE_ARITHMETIC void update_lion(const LionFactors& f, Elements& e) {
  const auto zero = Ops::set(0.0f);
  const auto direction =
      Ops::mul_add(e.first, Ops::set(f.of_average), Ops::mul(e.gradient, Ops::set(f.blend)));
  const auto up = Ops::choose(Ops::greater(direction, zero), Ops::set(f.step_size), zero);
  const auto step = Ops::choose(Ops::greater(zero, direction), Ops::set(-f.step_size), up);
  e.value = Ops::sub(Ops::mul(e.value, Ops::set(f.decay)), step);
  e.first = Ops::mul_add(e.first, Ops::set(f.keep), Ops::mul(e.gradient, Ops::set(f.rate)));
}

template <bool kMomentum, class Ops, class Elements>
SLUICE_ARITHMETIC void update_sgd(const SgdFactors& f, Elements& e) {
  const auto gradient = Ops::mul_add(e.value, Ops::set(f.decay), e.gradient);
  auto direction = gradient;
  if constexpr (kMomentum) {
    e.first = Ops::mul_add(e.first, Ops::set(f.momentum), gradient);
    direction = f.nesterov ? Ops::mul_add(e.first, Ops::set(f.momentum), gradient) : e.first;
  }
  e.value = Ops::mul_add(direction, Ops::set(-f.learning_rate), e.value);
}

// Returns the number (code_table.h) that encodes a value in a block of 8-bit state, before rounding. The
// lines are CodeTable's inverse ones, with slopes divided by the scale's magnitude.
template <CodeMap kMap, class Ops, class V = typename Ops::V>
SLUICE_ARITHMETIC V code_number(V value, const float* slopes, const float* offsets, float zero_of_scale) {
  const V x = kMap == CodeMap::kSigned ? Ops::abs(value) : value;
  V least = Ops::mul_add(x, Ops::set(slopes[0]), Ops::set(offsets[0]));
  SLUICE_UNROLL_LINES
  for (std::size_t i = 1; i < CodeTable::kLines; ++i)
    least = Ops::min(least, Ops::mul_add(x, Ops::set(slopes[i]), Ops::set(offsets[i])));
  if constexpr (kMap == CodeMap::kSigned)
    return Ops::max(Ops::with_sign(least, Ops::turn(value, zero_of_scale)), Ops::set(-127));
  return Ops::choose(Ops::greater(value, Ops::set(0)), Ops::max(least, Ops::set(1)), least);
}
