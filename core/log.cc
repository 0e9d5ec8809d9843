#include "core/log.h"

#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <array>
#include <memory>

#include "core/error.h"
#include "core/printable.h"

namespace sluice {
namespace {

struct Level {
  std::string_view name;
  spdlog::level::level_enum of_library;
};
// In the order of LogLevel.
constexpr std::array<Level, 5> kLevels = {{{"debug", spdlog::level::debug},
                                           {"info", spdlog::level::info},
                                           {"warn", spdlog::level::warn},
                                           {"error", spdlog::level::err},
                                           {"off", spdlog::level::off}}};

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

void Log::write(LogLevel level, fmt::string_view text, fmt::format_args arguments) {
  const auto of_library = kLevels[static_cast<std::size_t>(level)].of_library;
  if (logger().should_log(of_library))
    logger().log(of_library, printable(fmt::vformat(text, arguments), Lines::kKeep));
}

Log& log() {
  static Log log;
  return log;
}

void set_log_rank(int rank) { logger().set_pattern(fmt::format("sluice: rank {}: %^%l%$: %v", rank)); }

void set_log_level(std::string_view level) {
  const auto known = std::ranges::find(kLevels, level, &Level::name);
  if (known == kLevels.end())
    fail(ErrorCode::kInvalidArgument, "'{}' is not a log level; use debug, info, warn, error or off", level);
  logger().set_level(known->of_library);
}

}  // namespace sluice
