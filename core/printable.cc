#include "core/printable.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>

namespace sluice {
namespace {

unsigned byte_at(std::string_view text, std::size_t at) { return static_cast<unsigned char>(text[at]); }

// Returns the length of the first character in bytes; 0 where it is not valid UTF-8.
std::size_t length_of_character(std::string_view text) {
  const unsigned first = byte_at(text, 0);
  if (first < 0x80) return 1;
  const std::size_t length = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
  if (first < 0xC2 || first > 0xF4 || text.size() < length) return 0;
  for (std::size_t i = 1; i < length; ++i)
    if ((byte_at(text, i) & 0xC0) != 0x80) return 0;
  return length;
}

// U+0080 to U+009F, whose UTF-8 begins with 0xC2, are control characters, too.
bool is_control(std::string_view character) {
  const unsigned first = byte_at(character, 0);
  return first < 0x20 || first == 0x7F || (first == 0xC2 && byte_at(character, 1) < 0xA0);
}

}  // namespace

std::string printable(std::string_view text, Lines lines) {
  std::string shown;
  while (!text.empty()) {
    const std::size_t length = length_of_character(text);
    const std::string_view character = text.substr(0, std::max<std::size_t>(1, length));
    if (character == "\n")
      shown += lines == Lines::kKeep ? "\n" : "\\n";
    else if (length == 0 || is_control(character))
      for (std::size_t i = 0; i < character.size(); ++i)
        shown += fmt::format("\\x{:02x}", byte_at(character, i));
    else
      shown += character;
    text.remove_prefix(character.size());
  }
  return shown;
}

void tell_on_stderr(std::string_view text) noexcept {
  (void)!std::fwrite(text.data(), 1, text.size(), stderr);
  std::fflush(stderr);
}

}  // namespace sluice
