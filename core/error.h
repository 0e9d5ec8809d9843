#pragma once
#include <fmt/core.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace sluice {

enum class ErrorCode {
  kInvalidArgument,  // the request is not valid; nothing was changed
  kNotFound,         // a named file, preset or tensor does not exist
  kBudget,           // the request does not fit in the stated memory or disk space
  kIo,               // the operating system refused or failed an operation
  kCorrupt,          // bytes that were read differ from those written, or have an unexpected format
  kNotFinite,  // a loss or a gradient is infinite or not a number: training diverged, or the data is at fault
  kState,      // the call is not allowed now: the caller misuses the object, or the engine has failed
  kInternal,   // a bug in Sluice
};

// The project's one exception type. Its text says what was requested, what was found, and what to do.
class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& text, std::uint64_t lacks = 0)
      : std::runtime_error(text), code_(code), lacks_(lacks) {}
  ErrorCode code() const { return code_; }
  // With kBudget: how many bytes are missing; 0 where that is unknown.
  std::uint64_t lacks() const { return lacks_; }

 private:
  ErrorCode code_;
  std::uint64_t lacks_;
};

// Returns a stable identifier for programs that read errors: "invalid_argument", "not_found", ...
std::string_view name_of(ErrorCode code);

// The command line's exit status for an error: 2 for invalid input, 3 where the budget is too small, else 1.
int exit_status(ErrorCode code);

template <class... Arguments>
[[noreturn]] void fail(ErrorCode code, fmt::format_string<Arguments...> text, Arguments&&... arguments) {
  throw Error(code, fmt::format(text, std::forward<Arguments>(arguments)...));
}

// Throws Error(kInternal) where a condition is false that only a bug in Sluice can break.
template <class... Arguments>
void ensure(bool condition, fmt::format_string<Arguments...> text, Arguments&&... arguments) {
  if (!condition) throw Error(ErrorCode::kInternal, fmt::format(text, std::forward<Arguments>(arguments)...));
}

// Returns the text of an errno value, as in "No space left on device (28)".
std::string errno_text(int error_number);

// Returns what to do about an errno of a call on a file, as in "; the disk is full: free space on it"; ""
// where nothing is known.
std::string_view errno_advice(int error_number);

}  // namespace sluice
