#include "core/log.h"

#include <spdlog/sinks/stdout_color_sinks.h>

#include <string>

#include "core/error.h"

namespace sluice {

spdlog::logger& log() {
  static const std::shared_ptr<spdlog::logger> logger = [] {
    auto made = std::make_shared<spdlog::logger>("sluice", std::make_shared<spdlog::sinks::stderr_color_sink_mt>());
    made->set_pattern("sluice: %^%l%$: %v");
    return made;
  }();
  return *logger;
}

void set_log_level(std::string_view level) {
  for (const std::string_view known : {"debug", "info", "warn", "error", "off"})
    if (level == known) return log().set_level(spdlog::level::from_str(std::string(level)));
  fail(ErrorCode::kInvalidArgument, "'{}' is not a log level; use debug, info, warn, error or off", level);
}

}  // namespace sluice
