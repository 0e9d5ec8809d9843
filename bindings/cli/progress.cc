#include "bindings/cli/progress.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "core/bytes.h"
#include "core/error.h"

namespace sluice::cli {
namespace {

std::size_t terminal_width(std::FILE* out) {
  winsize size = {};
  if (::ioctl(::fileno(out), TIOCGWINSZ, &size) != 0 || size.ws_col < 20) return 80;
  return size.ws_col;
}

std::string rate_text(std::uint64_t bytes, double seconds) {
  return fmt::format("{:.2f}", seconds > 0 ? static_cast<double>(bytes) / seconds / 1e9 : 0.0);
}

std::string memory_text(const models::StepReport& report) {
  constexpr double kUnit = static_cast<double>(kMiB);
  return fmt::format("mem {:.0f}/{:.0f}/{:.0f} MiB", static_cast<double>(report.memory) / kUnit,
                     static_cast<double>(report.peak_memory) / kUnit,
                     static_cast<double>(report.budget) / kUnit);
}

}  // namespace

ProgressStyle progress_style(const std::string& name, std::FILE* out) {
  if (name == "bar") return ProgressStyle::kBar;
  if (name == "lines") return ProgressStyle::kLines;
  if (name == "none") return ProgressStyle::kNone;
  return ::isatty(::fileno(out)) != 0 ? ProgressStyle::kBar : ProgressStyle::kLines;
}

std::string format_duration(double seconds) {
  const auto whole = static_cast<std::uint64_t>(std::max(0.0, seconds) + 0.5);
  if (whole >= 86400) return fmt::format("{}d{:02}h", whole / 86400, whole % 86400 / 3600);
  if (whole >= 3600) return fmt::format("{}h{:02}m", whole / 3600, whole % 3600 / 60);
  if (whole >= 60) return fmt::format("{}m{:02}s", whole / 60, whole % 60);
  return fmt::format("{}s", whole);
}

std::string progress_text(const models::StepReport& report, double seconds_left, std::size_t width) {
  const int digits = static_cast<int>(std::to_string(report.steps).size());
  std::vector<std::string> parts = {fmt::format("step {:>{}}/{}", report.step, digits, report.steps),
                                    fmt::format("loss {:.4f}", report.loss)};
  if (report.validation_loss) parts.push_back(fmt::format("valid {:.4f}", *report.validation_loss));
  if (report.loss_scale)
    parts.push_back(fmt::format("scale {}{}", *report.loss_scale, report.skipped ? ", skipped" : ""));
  parts.push_back(fmt::format("{:.0f} tok/s", report.tokens_per_second));
  parts.push_back(format_duration(seconds_left) + " left");
  parts.push_back(memory_text(report));
  parts.push_back(fmt::format("disk r {} w {} GB/s", rate_text(report.disk_read, report.seconds),
                              rate_text(report.disk_written, report.seconds)));
  std::string line = parts.front();
  for (std::size_t i = 1; i < parts.size(); ++i) {
    if (width != 0 && line.size() + 2 + parts[i].size() > width) break;
    line += "  " + parts[i];
  }
  return width == 0 ? line : line.substr(0, width);
}

void Progress::show_bar(const models::StepReport& report, double seconds_left) {
  const std::size_t width = terminal_width(out_) - 1;
  std::string text = progress_text(report, seconds_left, width);
  if (const std::size_t room = width - text.size(); room >= 14) {
    const std::size_t cells = std::min<std::size_t>(room - 3, 40);
    const std::size_t full =
        report.steps == 0 ? 0 : cells * std::min(report.step, report.steps) / report.steps;
    text = fmt::format("[{}{}] {}", std::string(full, '#'), std::string(cells - full, '.'), text);
  }
  bar_ = text;
  fmt::print(out_, "{}\x1b[K\r", text);
  std::fflush(out_);
}

void Progress::step(const models::StepReport& report) {
  // A moving average, because the first steps of a run are slower than the rest.
  seconds_per_step_ =
      seconds_per_step_ == 0 ? report.seconds : 0.9 * seconds_per_step_ + 0.1 * report.seconds;
  const double left =
      seconds_per_step_ * static_cast<double>(report.steps - std::min(report.step, report.steps));
  const bool last = report.step >= report.steps;
  if (style_ == ProgressStyle::kNone) return;
  const Clock::time_point now = Clock::now();
  const double since = std::chrono::duration<double>(now - last_line_).count();
  if (style_ == ProgressStyle::kBar) {
    if (since < 0.1 && !last) return;
    show_bar(report, left);
  } else {
    if (since < 1.0 && !last && !report.validation_loss) return;
    fmt::print(out_, "{}\n", progress_text(report, left, 0));
    std::fflush(out_);
  }
  last_line_ = now;
}

void Progress::message(const std::string& text) {
  if (style_ == ProgressStyle::kNone) return;
  if (bar_.empty()) {
    fmt::print(out_, "{}\n", text);
  } else {
    fmt::print(out_, "{}\x1b[K\n{}\x1b[K\r", text, bar_);
  }
  std::fflush(out_);
}

void Progress::finish() {
  if (bar_.empty()) return;
  bar_.clear();
  fmt::print(out_, "\n");
  std::fflush(out_);
}

}  // namespace sluice::cli
