#pragma once
#include <spdlog/spdlog.h>

namespace sluice {

// Messages for people go to the standard error stream, as "sluice: text". Libraries log warnings and above only where
// the caller must know; the result of a call is never a log line.
// level: "debug", "info", "warn", "error", "off"; Error(kInvalidArgument) otherwise.
void set_log_level(std::string_view level);
spdlog::logger& log();

}  // namespace sluice
