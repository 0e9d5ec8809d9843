#pragma once
#include <string>
#include <string_view>

namespace sluice {

// Makes untrusted text (names from files) safe to show on a terminal, which obeys control characters. They
// become \n, \x1b and the like, and so do bytes that are not UTF-8; a backslash stays as it is. Lines::kKeep
// leaves line ends as they are.
enum class Lines { kEscape, kKeep };
std::string printable(std::string_view text, Lines lines = Lines::kEscape);

// Writes to standard error and ignores failures. Never throws.
void tell_on_stderr(std::string_view text) noexcept;

}  // namespace sluice
