#include "engine/plan/rows_of_tokens.h"

#include <algorithm>

namespace sluice::engine {
namespace {

// A step of so many tokens for each row has nearly all rows, or text that nobody would train on.
constexpr std::size_t kTokensOfARow = 16;

}  // namespace

std::optional<std::size_t> rows_of_tokens(const ParameterSpec& parameter, int use, const RankOf& ranks,
                                          const Profile& profile) {
  const bool in_spans = parameter.span_elements > 0 || parameter.continues();
  if (!parameter.by_tokens || use + 1 != parameter.uses || in_spans || ranks.size == 1 || profile.any_order)
    return std::nullopt;
  const std::size_t rows = parameter.shape.front();
  const std::size_t tokens =
      static_cast<std::size_t>(ranks.size / ranks.alike) * profile.micro_batches * profile.tokens;
  if (tokens >= kTokensOfARow * rows) return std::nullopt;
  return std::min(rows, tokens);
}

bool sums_by_rows(const Profile& profile, const RankOf& ranks) {
  return std::ranges::any_of(profile.units, [&](const UnitSpec& unit) {
    return std::ranges::any_of(unit.parameters, [&](const ParameterSpec& parameter) {
      return rows_of_tokens(parameter, parameter.uses - 1, ranks, profile).has_value();
    });
  });
}

}  // namespace sluice::engine
