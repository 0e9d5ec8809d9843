#pragma once
#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "allocator/ledger.h"
#include "core/json.h"
#include "core/trace.h"
#include "models/run/trainer.h"

namespace sluice::models {

// The first bytes of a report's file.
inline constexpr std::string_view kProfileBeginning = "<!DOCTYPE html>\n<!-- sluice profile -->";

// Limits on what a run records for its report, so that memory does not grow with the run's length.
inline constexpr std::size_t kProfileEvents = 20'000;  // of the trace
inline constexpr std::size_t kProfileParts = 1024;     // of the ledger's timeline
// The bytes of all that is recorded, and of the report's text while it is written.
inline constexpr std::uint64_t kProfileBytes = std::uint64_t{8} << 20;

// A time series of a run's steps: one row for each step at first; once there are too many, a row is the mean
// of several steps. Thread rule: one thread at a time.
class StepSeries {
 public:
  using Clock = std::chrono::steady_clock;
  explicit StepSeries(std::size_t limit = 1000) : limit_(limit) {}

  void add(const StepReport& report, Clock::time_point begin, Clock::time_point end);
  // The columns of docs/formats/profile.md.
  Json rows(Clock::time_point origin) const;
  Json windows(Clock::time_point origin) const;

 private:
  using Values = std::array<double, 7>;  // by kNames
  struct Row {
    std::uint64_t first, last, count;
    Clock::time_point begin, end;
    Values sums;
    std::uint64_t resident, peak;  // maxima
    std::uint64_t skipped;
    std::optional<double> loss_scale;  // of the last step
  };
  struct Window {
    std::uint64_t step;
    Clock::time_point begin, end;
  };
  static void join(Row& row, const Row& next);
  static constexpr std::array<const char*, std::tuple_size_v<Values>> kNames = {
      "loss", "seconds", "read_wait", "write_wait", "optimizer", "disk_read", "disk_written"};

  std::size_t limit_;
  std::uint64_t steps_a_row_ = 1;
  std::vector<Row> rows_;
  std::deque<Window> windows_;
};

// Return the contents of a ledger and a trace as the JSON columns of docs/formats/profile.md.
Json memory_columns(const allocator::Ledger& ledger, std::chrono::steady_clock::time_point origin);
Json ledger_peaks(const allocator::Ledger& ledger);
struct EventColumns {
  std::string events;  // JSON text: Json values would take ten times the memory
  Json lanes;
};
EventColumns event_columns(const Trace& trace, std::chrono::steady_clock::time_point origin);

}  // namespace sluice::models
