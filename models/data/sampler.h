#pragma once
#include <cstdint>
#include <span>

#include "models/data/tokens.h"

// The order in which a run reads training samples: see docs/formats/tokens.md.
namespace sluice::models {

// A pseudo-random bijection of [0, size), given by seed and number, that takes no memory.
class Permutation {
 public:
  Permutation(std::uint64_t size, std::uint64_t seed, std::uint64_t number);  // REQUIRES: 1 <= size <= 2^62
  std::uint64_t operator()(std::uint64_t position) const;                     // REQUIRES: position < size

 private:
  std::uint64_t network(std::uint64_t value) const;
  std::uint64_t size_, seed_, number_;
  unsigned half_bits_;
};

// The windows first ... first + count - 1 of a token source; window w begins at token w * sequence and has
// sequence + 1 tokens.
struct WindowRange {
  std::uint64_t first = 0, count = 0;
};
struct WindowSplit {
  WindowRange train, held_out;
};

// Returns a source's windows, of which the fraction `held_out` at its end is set apart. Throws
// Error(kInvalidArgument) where held_out is not in [0, 1), or the source is too short. REQUIRES: sequence >=
// 1
WindowSplit split_windows(const TokenSource& source, std::uint64_t sequence, double held_out);

// The order in which windows are visited. A run's position in its data is one number, the index of its next
// sample, which counts over epochs and over all ranks. Thread rule: any thread.
class Sampler {
 public:
  enum class Order { kShuffled, kInOrder };
  Sampler(WindowRange windows, std::uint64_t seed,
          Order order = Order::kShuffled);  // REQUIRES: windows.count >= 1
  std::uint64_t window(std::uint64_t sample) const;
  std::uint64_t windows() const { return windows_.count; }  // the number of samples of an epoch

 private:
  WindowRange windows_;
  std::uint64_t seed_;
  Order order_;
};

// Writes the samples first, first + 1, ... as rows of `sequence` tokens; targets are the tokens one position
// later. REQUIRES: both spans have the same size, a multiple of `sequence`. Throws as TokenSource::read().
void fill_batch(TokenSource& source, const Sampler& sampler, std::uint64_t first, std::uint64_t sequence,
                std::span<std::int32_t> tokens, std::span<std::int32_t> targets);

}  // namespace sluice::models
