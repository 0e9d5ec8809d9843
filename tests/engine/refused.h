#pragma once
#include <cstdint>
#include <optional>
#include <regex>
#include <string>

#include "core/bytes.h"

namespace sluice::engine {

// The bytes that a refusal names behind these words, as in "--memory 12MiB".
inline std::optional<std::uint64_t> mebibytes_after(const std::string& words, const std::string& text) {
  std::smatch found;
  if (!std::regex_search(text, found, std::regex(words + "([0-9]+)MiB"))) return std::nullopt;
  return std::stoull(found[1]) * kMiB;
}

}  // namespace sluice::engine
