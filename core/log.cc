#include "core/log.h"

#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

#include <array>
#include <memory>

#include "core/error.h"

namespace sluice {
namespace {

struct Name {
  std::string_view name;
  LogLevel level;
  spdlog::level::level_enum of_library;
};
constexpr std::array<Name, 5> kNames = {{{"debug", LogLevel::kDebug, spdlog::level::debug},
                                         {"info", LogLevel::kInfo, spdlog::level::info},
                                         {"warn", LogLevel::kWarning, spdlog::level::warn},
                                         {"error", LogLevel::kError, spdlog::level::err},
                                         {"off", LogLevel::kOff, spdlog::level::off}}};

spdlog::level::level_enum of_library(LogLevel level) {
  return kNames[static_cast<std::size_t>(level)].of_library;
}

spdlog::logger& logger() {
  static const std::shared_ptr<spdlog::logger> logger = [] {
    auto made =
        std::make_shared<spdlog::logger>("sluice", std::make_shared<spdlog::sinks::stderr_color_sink_mt>());
    made->set_pattern("sluice: %^%l%$: %v");
    return made;
  }();
  return *logger;
}

}  // namespace

LogLevel Log::level() const {
  for (const Name& known : kNames)
    if (known.of_library == logger().level()) return known.level;
  fail(ErrorCode::kInternal, "the log has a level that it was not given");
}

void Log::set_level(LogLevel level) { logger().set_level(of_library(level)); }

void Log::write(LogLevel level, fmt::string_view text, fmt::format_args arguments) {
  if (logger().should_log(of_library(level))) logger().log(of_library(level), fmt::vformat(text, arguments));
}

Log& log() {
  static Log log;
  return log;
}

void set_log_level(std::string_view level) {
  for (const Name& known : kNames)
    if (level == known.name) return log().set_level(known.level);
  fail(ErrorCode::kInvalidArgument, "'{}' is not a log level; use debug, info, warn, error or off", level);
}

}  // namespace sluice
