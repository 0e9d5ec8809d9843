#include "models/data/sampler.h"

#include <algorithm>
#include <bit>

#include "core/error.h"
#include "core/random.h"

namespace sluice::models {
namespace {

constexpr unsigned kRounds = 8;
constexpr unsigned kLeastHalfBits = 4;  // a narrower network has too few round functions to shuffle well

}  // namespace

Permutation::Permutation(std::uint64_t size, std::uint64_t seed, std::uint64_t number)
    : size_(size), seed_(seed), number_(number) {
  ensure(size >= 1 && size <= std::uint64_t{1} << 62, "a permutation of {} elements", size);
  const auto bits = static_cast<unsigned>(std::bit_width(size - 1));
  half_bits_ = std::max(kLeastHalfBits, (bits + 1) / 2);
}

std::uint64_t Permutation::network(std::uint64_t value) const {
  const std::uint64_t mask = (std::uint64_t{1} << half_bits_) - 1;
  auto left = static_cast<std::uint32_t>(value >> half_bits_);
  auto right = static_cast<std::uint32_t>(value & mask);
  for (unsigned round = 0; round < kRounds; ++round) {
    const auto words =
        philox({right, round, static_cast<std::uint32_t>(number_), static_cast<std::uint32_t>(number_ >> 32)},
               {static_cast<std::uint32_t>(seed_), static_cast<std::uint32_t>(seed_ >> 32)});
    const auto next = static_cast<std::uint32_t>(left ^ (words[0] & mask));
    left = right;
    right = next;
  }
  return std::uint64_t{left} << half_bits_ | right;
}

std::uint64_t Permutation::operator()(std::uint64_t position) const {
  ensure(position < size_, "position {} of a permutation of {} elements", position, size_);
  std::uint64_t value = network(position);
  while (value >= size_) value = network(value);
  return value;
}

WindowSplit split_windows(const TokenSource& source, std::uint64_t sequence, double held_out) {
  ensure(sequence >= 1, "windows of {} tokens", sequence);
  if (!(held_out >= 0.0 && held_out < 1.0))
    fail(ErrorCode::kInvalidArgument, "the held-out part is a fraction from 0 to below 1, and {} was given",
         held_out);
  const std::uint64_t needed = held_out > 0.0 ? 2 : 1;
  const std::uint64_t windows = source.total() == 0 ? 0 : (source.total() - 1) / sequence;
  if (windows < needed)
    fail(ErrorCode::kInvalidArgument,
         "'{}' is too short: it has {} tokens, and {} of {} tokens{} need at least {}; give more text or a "
         "shorter "
         "sequence",
         source.name(), source.total(), needed == 1 ? "one sample" : "two samples", sequence,
         needed == 1 ? "" : " (one of them held out)", needed * sequence + 1);
  std::uint64_t apart = 0;
  if (held_out > 0.0) {
    apart = static_cast<std::uint64_t>(held_out * static_cast<double>(windows));
    apart = std::clamp<std::uint64_t>(apart, 1, windows - 1);
  }
  return {{0, windows - apart}, {windows - apart, apart}};
}

Sampler::Sampler(WindowRange windows, std::uint64_t seed, Order order)
    : windows_(windows), seed_(seed), order_(order) {
  ensure(windows.count >= 1, "a sampler without windows");
}

std::uint64_t Sampler::window(std::uint64_t sample) const {
  const std::uint64_t epoch = sample / windows_.count, position = sample % windows_.count;
  if (order_ == Order::kInOrder) return windows_.first + position;
  return windows_.first + Permutation(windows_.count, seed_, epoch)(position);
}

void fill_batch(TokenSource& source, const Sampler& sampler, std::uint64_t first, std::uint64_t sequence,
                std::span<std::int32_t> tokens, std::span<std::int32_t> targets) {
  ensure(tokens.size() == targets.size() && sequence >= 1 && tokens.size() % sequence == 0,
         "a batch of {} tokens and {} targets in rows of {}", tokens.size(), targets.size(), sequence);
  for (std::uint64_t row = 0; row < tokens.size() / sequence; ++row) {
    const std::uint64_t begin = sampler.window(first + row) * sequence;
    const auto inputs = tokens.subspan(row * sequence, sequence);
    const auto outputs = targets.subspan(row * sequence, sequence);
    source.read(begin, inputs);
    std::copy(inputs.begin() + 1, inputs.end(), outputs.begin());
    source.read(begin + sequence, outputs.last(1));
  }
}

}  // namespace sluice::models
