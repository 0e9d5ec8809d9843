#include "core/bytes.h"

#include <array>
#include <charconv>
#include <cmath>
#include <utility>

#include "core/error.h"

namespace sluice {
namespace {

std::uint64_t suffix_factor(std::string_view suffix) {
  static constexpr std::array<std::pair<std::string_view, double>, 4> kPrefixes = {
      {{"K", 1}, {"M", 2}, {"G", 3}, {"T", 4}}};
  if (!suffix.empty() && suffix.back() == 'B') suffix.remove_suffix(1);
  if (suffix.empty()) return 1;
  for (const auto& [letter, power] : kPrefixes) {
    if (suffix == letter) return static_cast<std::uint64_t>(std::pow(1000.0, power));
    if (suffix.size() == 2 && suffix.substr(0, 1) == letter && suffix[1] == 'i')
      return static_cast<std::uint64_t>(std::pow(1024.0, power));
  }
  return 0;
}

}  // namespace

std::uint64_t parse_size(std::string_view text) {
  double number = 0;
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, number, std::chars_format::fixed);
  const std::uint64_t factor =
      error == std::errc() ? suffix_factor(std::string_view(rest, static_cast<std::size_t>(end - rest))) : 0;
  const double bytes = number * static_cast<double>(factor);
  if (factor == 0 || !std::isfinite(bytes) || bytes < 0 || bytes >= 9.0e18)
    fail(ErrorCode::kInvalidArgument,
         "'{}' is not a size; write it as 512MiB, 4GiB, 1.5GB or a number of bytes", text);
  const auto whole = static_cast<std::uint64_t>(bytes);
  if (factor == 1 && static_cast<double>(whole) != bytes)
    fail(ErrorCode::kInvalidArgument, "'{}' is no whole number of bytes; the unit is missing, as in 1.5GiB",
         text);
  return whole;
}

std::string format_size(std::uint64_t bytes) {
  static constexpr std::array<std::string_view, 5> kSuffixes = {"B", "KiB", "MiB", "GiB", "TiB"};
  auto value = static_cast<double>(bytes);
  std::size_t power = 0;
  while (value >= 1024 && power + 1 < kSuffixes.size()) {
    value /= 1024;
    ++power;
  }
  const int decimals = power == 0 || value >= 100 ? 0 : value >= 10 ? 1 : 2;
  return fmt::format("{:.{}f} {}", value, decimals, kSuffixes[power]);
}

}  // namespace sluice
