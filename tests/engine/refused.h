#pragma once
#include <charconv>

#include "core/bytes.h"
#include "testing.h"

namespace sluice::engine {

// The bytes that a refusal names behind these words, as in "--memory 12MiB".
inline std::optional<std::uint64_t> mebibytes_after(const std::string& words, const std::string& text) {
  for (std::size_t at = text.find(words); at != std::string::npos; at = text.find(words, at + 1)) {
    std::uint64_t found = 0;
    const char* const end = text.data() + text.size();
    const auto [rest, error] = std::from_chars(text.data() + at + words.size(), end, found);
    if (error == std::errc{} && std::string_view(rest, end).starts_with("MiB")) return found * kMiB;
  }
  return std::nullopt;
}

}  // namespace sluice::engine
