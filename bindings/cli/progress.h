#pragma once
#include <chrono>
#include <cstdio>
#include <string>

#include "models/run/trainer.h"

namespace sluice::cli {

enum class ProgressStyle { kBar, kLines, kNone };
// "auto" is a bar where `out` is a terminal, else lines. The other names are "bar", "lines" and "none".
ProgressStyle progress_style(const std::string& name, std::FILE* out);

// Formats one step as a line of at most `width` columns; 0: of any length. The most important parts come
// first, and parts that do not fit are left out.
std::string progress_text(const models::StepReport& report, double seconds_left, std::size_t width);
// Formats a duration as "1h02m", "3m07s" or "12s".
std::string format_duration(double seconds);

// Shows the progress of a run, at most about once a second: as one line that is rewritten, or as lines.
class Progress {
 public:
  Progress(std::FILE* out, ProgressStyle style) : out_(out), style_(style) {}
  ~Progress() { finish(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void step(const models::StepReport& report);
  void message(const std::string& text);  // prints a line of its own, above the bar
  void finish();                          // keeps the bar's last state, and begins a new line

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
