#pragma once
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <cstring>

namespace sluice::engine::faulty {

// The main() of a campaign, whose words are how much of it to run, and optionally the first seed. `unit` says
// in the usage what the first one counts.
inline int campaign_main(int count, char** words, const char* unit,
                         int (*run)(std::uint64_t wanted, std::uint64_t seed)) {
  const auto parse = [](const char* text, std::uint64_t& value) {
    const auto [rest, error] = std::from_chars(text, text + std::strlen(text), value);
    return error == std::errc() && *rest == '\0';
  };
  std::uint64_t wanted = 0, seed = 0;
  if (count < 2 || count > 3 || !parse(words[1], wanted) || (count == 3 && !parse(words[2], seed))) {
    std::fprintf(stderr, "usage: %s %s [SEED]\n", words[0], unit);
    return 2;
  }
  return run(wanted, seed);
}

}  // namespace sluice::engine::faulty
