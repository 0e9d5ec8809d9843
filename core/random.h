#pragma once
#include <array>
#include <cstdint>

namespace sluice {

// Rounds of Philox. 7 are the fewest that pass all tests of BigCrush (table 2 of the paper below); 10 have
// the safety margin that its authors advise. Stochastic rounding spends most of its time on rounds and needs
// no margin.
inline constexpr int kPhiloxRounds = 10, kRoundingPhiloxRounds = 7;

// Philox4x32: a counter-based generator. The same counter and key give the same bits anywhere, in any order.
// Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3" (SC11).
template <int kRounds = kPhiloxRounds>
constexpr std::array<std::uint32_t, 4> philox(std::array<std::uint32_t, 4> counter,
                                              std::array<std::uint32_t, 2> key) {
  for (int round = 0; round < kRounds; ++round) {
    const std::uint64_t a = std::uint64_t{0xD2511F53u} * counter[0];
    const std::uint64_t b = std::uint64_t{0xCD9E8D57u} * counter[2];
    counter = {static_cast<std::uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<std::uint32_t>(b),
               static_cast<std::uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<std::uint32_t>(a)};
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return counter;
}

// A stream of random words, identified by a 64-bit key and a 64-bit stream id. Word i depends on these and i
// alone.
class CounterRandom {
 public:
  CounterRandom(std::uint64_t seed, std::uint64_t stream) : seed_(seed), stream_(stream) {}
  // Returns the words 4 * block ... 4 * block + 3.
  template <int kRounds = kPhiloxRounds>
  std::array<std::uint32_t, 4> block(std::uint64_t block) const {
    return philox<kRounds>({static_cast<std::uint32_t>(block), static_cast<std::uint32_t>(block >> 32),
                            static_cast<std::uint32_t>(stream_), static_cast<std::uint32_t>(stream_ >> 32)},
                           {static_cast<std::uint32_t>(seed_), static_cast<std::uint32_t>(seed_ >> 32)});
  }

 private:
  std::uint64_t seed_, stream_;
};

// Returns a number uniform in [0, 1) made from the upper 24 bits of the word.
inline float to_unit_interval(std::uint32_t word) { return static_cast<float>(word >> 8) * 0x1.0p-24f; }

}  // namespace sluice
