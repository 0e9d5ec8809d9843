#pragma once
#include <array>
#include <functional>
#include <limits>
#include <string_view>

#include "core/dtype.h"
#include "core/threads.h"
#include "optim/optimizer.h"

// What the elementwise optimizers share. Private to this room.
namespace sluice::optim {

inline constexpr std::size_t kMostArrays = 2;

// The words that bf16 values without a master are rounded by: those of CounterRandom(seed, stream),
// of kRoundingPhiloxRounds. An element has half of one, element 0 the lower half of word 0.
struct RoundingWords {
  std::uint64_t seed = 0, stream = 0, first_index = 0;  // of the piece's first element
};

// What is done to a gradient's elements before anything else: see optim/gradient-inl.h.
struct GradientRule {
  float factor = 1;
  float bound = std::numeric_limits<float>::infinity();
};
GradientRule gradient_rule(const Hyperparameters& hyperparameters);

// A part of a span that one call of a kernel works on.
struct Piece {
  std::size_t first = 0, count = 0;  // elements of the span
  ConstArray gradient;
  float* master = nullptr;  // null: the parameter is rounded stochastically
  Array parameter;          // null data: none
  RoundingWords words;
  std::array<StatePart, kMostArrays> state;  // as many as the optimizer keeps

  Piece part(std::size_t at, std::size_t elements) const;  // REQUIRES: `at` is a multiple of kScaleBlock
};

class Elementwise : public Optimizer {
 public:
  // own: what a step's are where it has none. Throws Error(kInvalidArgument) for a type that arrays of state
  // cannot have.
  Elementwise(std::string name, const Storage& storage, const Coefficients& own);

  std::string name() const final { return name_; }
  Json settings() const final;
  bool keeps_master() const final { return storage_.master; }

 protected:
  virtual Json arithmetic() const = 0;  // the settings, without those of the storage
  Dtype state_type() const { return storage_.state; }
  const Coefficients& own() const { return own_; }
  const Coefficients& of(const Hyperparameters& h) const { return h.coefficients ? *h.coefficients : own_; }
  // body(piece) for the whole span, on all threads: see optim/update-inl.h. Finds misuse by the engine: steps
  // that do not begin at 1, state other than the optimizer describes, other types.
  void for_each_piece(Threads& threads, const Hyperparameters& hyperparameters, const Span& span,
                      const std::function<void(const Piece&)>& body) const;

  void check_span(const Hyperparameters& hyperparameters, const Span& span) const;
  void check_values(const Span& span) const;  // that it has some
  // Throws Error(kInvalidArgument) unless it is at least 0 and below 1.
  void check_share(std::string_view name, double value) const;
  // Throws Error(kInvalidArgument) unless it is above 0, or 0 where `zero` says so, and finite; as f32, too.
  void check_size(std::string_view name, double value, bool zero) const;
  // As check_share(); also where one of it and the own value is 0, as the array that it needs is there or is
  // not.
  void check_momentum(std::string_view name, double value, double own) const;

 private:
  std::string name_;
  Storage storage_;
  Coefficients own_;
};

// By squaring, and not std::pow, whose last bit differs between machines.
double power(double base, std::uint64_t exponent);

}  // namespace sluice::optim
