#pragma once
#include <string>
#include <string_view>

namespace sluice {

// The text as it may be shown on a terminal: names come out of files, and a terminal obeys the control
// characters in them. They become \n, \x1b and the like (and a backslash stays as it is); so do bytes that
// are not UTF-8. Lines::kKeep: the ends of lines stay, in a text that has several.
enum class Lines { kEscape, kKeep };
std::string printable(std::string_view text, Lines lines = Lines::kEscape);

// Writes to the standard error stream, if that can be written to. Never throws.
void tell_on_stderr(std::string_view text) noexcept;

}  // namespace sluice
