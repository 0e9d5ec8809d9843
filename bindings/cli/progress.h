#pragma once
#include <chrono>
#include <cstdio>
#include <string>

#include "models/run/trainer.h"

namespace sluice::cli {

enum class ProgressStyle { kBar, kLines, kNone };
// "auto" is a bar where `out` is a terminal, and else lines. The other names are "bar", "lines" and "none".
ProgressStyle progress_style(const std::string& name, std::FILE* out);

// Writes one step as a line of at most `width` columns, or of any length where width is 0. The most important
// parts come first, and those that do not fit are left out.
std::string progress_text(const models::StepReport& report, double seconds_left, std::size_t width);
// Writes "1h02m", "3m07s" or "12s".
std::string format_duration(double seconds);

// Shows the progress of a run, about once a second at most: as one line that is rewritten, or as lines.
class Progress {
 public:
  Progress(std::FILE* out, ProgressStyle style) : out_(out), style_(style) {}
  ~Progress() { finish(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void step(const models::StepReport& report);
  void message(const std::string& text);  // prints a line of its own, above the bar
  void finish();                          // leaves the bar as it is, and begins a new line

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
