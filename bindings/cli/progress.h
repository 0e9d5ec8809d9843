#pragma once
#include <chrono>
#include <cstdio>
#include <string>

#include "models/run/trainer.h"

namespace sluice::cli {

enum class ProgressStyle { kBar, kLines, kNone };
// "auto": a bar where `out` is a terminal, lines elsewhere; "bar", "lines", "none".
ProgressStyle progress_style(const std::string& name, std::FILE* out);

// One step as a line of at most `width` columns: what fits, the most important first. A width of 0 is without
// limit.
std::string progress_text(const models::StepReport& report, double seconds_left, std::size_t width);
// "1h02m", "3m07s", "12s".
std::string format_duration(double seconds);

// Shows how a run goes on: one line that is rewritten, or lines, at most about one a second.
class Progress {
 public:
  Progress(std::FILE* out, ProgressStyle style) : out_(out), style_(style) {}
  ~Progress() { finish(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void step(const models::StepReport& report);
  void message(const std::string& text);  // a line of its own, above the bar
  void finish();                          // leaves the bar as it is, and goes to the next line

 private:
  using Clock = std::chrono::steady_clock;
  void show_bar(const models::StepReport& report, double seconds_left);

  std::FILE* out_;
  ProgressStyle style_;
  double seconds_per_step_ = 0;
  Clock::time_point last_line_ = {};
  std::string bar_;
};

}  // namespace sluice::cli
