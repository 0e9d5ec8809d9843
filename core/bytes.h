#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace sluice {

inline constexpr std::size_t kKiB = std::size_t{1} << 10;
inline constexpr std::size_t kMiB = std::size_t{1} << 20;
inline constexpr std::size_t kGiB = std::size_t{1} << 30;
inline constexpr std::size_t kDiskBlock = 4096;  // alignment of O_DIRECT transfers
inline constexpr std::size_t kHugePage = 2 * kMiB;

constexpr std::size_t round_up(std::size_t value, std::size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}
constexpr std::size_t divide_up(std::size_t value, std::size_t divisor) {
  return (value + divisor - 1) / divisor;
}

// Parses "512MiB", "4GiB", "1.5GB" or "100000" (bytes). KiB, MiB, GiB, TiB are powers of 1024; KB, MB, GB, TB
// are powers of 1000. The B may be left out ("4Gi", "1.5G"). Throws Error(kInvalidArgument) that shows the
// accepted forms.
std::uint64_t parse_size(std::string_view text);

// Formats a size for people, with at most three significant decimals: "1.25 GiB", "512 MiB", "17 B".
std::string format_size(std::uint64_t bytes);

}  // namespace sluice
