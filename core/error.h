#pragma once
#include <fmt/core.h>

#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

namespace sluice {

enum class ErrorCode {
  kInvalidArgument,  // what the caller asked for is not valid; nothing was changed
  kNotFound,         // a named file, preset or tensor does not exist
  kBudget,           // it does not fit in the memory or the disk space that was stated
  kIo,               // the system refused or failed an operation
  kCorrupt,          // bytes that were read are not what was written, or are not of the expected format
  kNotFinite,  // a loss or a gradient is infinite or not a number: training diverged, or the data is at fault
  kState,      // a call that is not allowed now: misuse, or an engine that has failed
  kInternal,   // a defect in Sluice
};

// The one exception type of the project. The text says what was asked, what was found, and what to do.
class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& text) : std::runtime_error(text), code_(code) {}
  ErrorCode code() const { return code_; }

 private:
  ErrorCode code_;
};

// "invalid_argument", "not_found", ...: for programs that read errors.
std::string_view name_of(ErrorCode code);

// Exit status of the command line for an error: 2 for input that is not valid, 3 for what does not fit, 1
// otherwise.
int exit_status(ErrorCode code);

template <class... Arguments>
[[noreturn]] void fail(ErrorCode code, fmt::format_string<Arguments...> text, Arguments&&... arguments) {
  throw Error(code, fmt::format(text, std::forward<Arguments>(arguments)...));
}

// For conditions that only a defect in Sluice itself can break.
template <class... Arguments>
void ensure(bool condition, fmt::format_string<Arguments...> text, Arguments&&... arguments) {
  if (!condition) throw Error(ErrorCode::kInternal, fmt::format(text, std::forward<Arguments>(arguments)...));
}

// "No space left on device (28)" for an errno value.
std::string errno_text(int error_number);

}  // namespace sluice
