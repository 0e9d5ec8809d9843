#pragma once
#include <fmt/core.h>

#include <string_view>

namespace sluice {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

// Writes messages for people to standard error, as "sluice: warning: text". Libraries log warnings and errors
// only where the caller must know; a call's result is never a log line. Thread rule: any thread.
class Log {
 public:
  template <class... Arguments>
  void debug(fmt::format_string<Arguments...> text, Arguments&&... arguments) {
    write(LogLevel::kDebug, text, fmt::make_format_args(arguments...));
  }
  template <class... Arguments>
  void info(fmt::format_string<Arguments...> text, Arguments&&... arguments) {
    write(LogLevel::kInfo, text, fmt::make_format_args(arguments...));
  }
  template <class... Arguments>
  void warn(fmt::format_string<Arguments...> text, Arguments&&... arguments) {
    write(LogLevel::kWarning, text, fmt::make_format_args(arguments...));
  }
  template <class... Arguments>
  void error(fmt::format_string<Arguments...> text, Arguments&&... arguments) {
    write(LogLevel::kError, text, fmt::make_format_args(arguments...));
  }

 private:
  // Not a template, which would compile the logging library's formatting into every file that logs.
  void write(LogLevel level, fmt::string_view text, fmt::format_args arguments);
};
Log& log();

// Sets the lowest level that is written: "debug", "info" (the default), "warn", "error" or "off". Throws
// Error(kInvalidArgument) for other words.
void set_log_level(std::string_view level);
// Adds the rank to this process's messages: "sluice: rank 2: warning: text". Thread rule: before any message
// is written.
void set_log_rank(int rank);

}  // namespace sluice
