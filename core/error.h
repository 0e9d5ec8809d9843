#pragma once
#include <fmt/core.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace sluice {

enum class ErrorCode {
  kInvalidArgument,  // what the caller asked for is not valid; nothing was changed
  kNotFound,         // a named file, preset or tensor does not exist
  kBudget,           // the request does not fit in the memory or the disk space that was stated
  kIo,               // the system refused or failed an operation
  kCorrupt,          // bytes that were read are not what was written, or are not of the expected format
  kNotFinite,  // a loss or a gradient is infinite or not a number: training diverged, or the data is at fault
  kState,      // the call is not allowed now: the caller misuses the object, or the engine has failed
  kInternal,   // a defect in Sluice
};

// The one exception type of the project. The text says what was asked, what was found, and what to do.
class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& text, std::uint64_t lacks = 0)
      : std::runtime_error(text), code_(code), lacks_(lacks) {}
  ErrorCode code() const { return code_; }
  // With kBudget: how many bytes are short, where that is known. 0: it is not.
  std::uint64_t lacks() const { return lacks_; }

 private:
  ErrorCode code_;
  std::uint64_t lacks_;
};

// "invalid_argument", "not_found", ...: for programs that read errors.
std::string_view name_of(ErrorCode code);

// The command line's exit status for an error: 2 for invalid input, 3 where the budget is too small, else 1.
int exit_status(ErrorCode code);

template <class... Arguments>
[[noreturn]] void fail(ErrorCode code, fmt::format_string<Arguments...> text, Arguments&&... arguments) {
  throw Error(code, fmt::format(text, std::forward<Arguments>(arguments)...));
}

// Throws Error(kInternal) where a condition is false that only a defect in Sluice itself can break.
template <class... Arguments>
void ensure(bool condition, fmt::format_string<Arguments...> text, Arguments&&... arguments) {
  if (!condition) throw Error(ErrorCode::kInternal, fmt::format(text, std::forward<Arguments>(arguments)...));
}

// Returns the text of an errno value, as in "No space left on device (28)".
std::string errno_text(int error_number);

}  // namespace sluice
