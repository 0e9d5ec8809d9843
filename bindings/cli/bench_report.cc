#include "bindings/cli/bench_report.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>

#include "core/bytes.h"
#include "core/error.h"
#include "core/printable.h"
#include "core/system.h"

namespace sluice::cli {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int kReportVersion = 1;
constexpr std::size_t kLeastRounds = 3;

std::string value_text(BenchUnit unit, double value) {
  if (unit == BenchUnit::kBytesPerSecond) return fmt::format("{:.2f} GB/s", value / 1e9);
  return value < 0.1 ? fmt::format("{:.3f} ms", 1e3 * value) : fmt::format("{:.3f} s", value);
}

Json row_json(const BenchRow& row) {
  Json json = row.more;
  json.update({{"name", row.name},
               {"unit", row.unit == BenchUnit::kSeconds ? "seconds" : "bytes_per_second"},
               {"reached", row.reached},
               {"limit", row.limit},
               {"limit_is", row.limit_is},
               {"ratio", ratio_of(row)}});
  return json;
}

}  // namespace

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

double ratio_of(const BenchRow& row) {
  return row.unit == BenchUnit::kSeconds ? row.limit / row.reached : row.reached / row.limit;
}

Json to_json(const BenchReport& report) {
  Json rows = Json::array();
  for (const BenchRow& row : report.rows) rows.push_back(row_json(row));
  return {{"version", kReportVersion},
          {"bench", report.bench},
          {"machine", {{"cpu", cpu_model()}, {"threads", report.threads}, {"kernel", kernel_version()}}},
          {"settings", report.settings},
          {"rows", rows},
          {"notes", report.notes}};
}

std::string to_text(const BenchReport& report) {
  std::size_t width = 4;
  for (const BenchRow& row : report.rows) width = std::max(width, row.name.size());
  std::string text = fmt::format("{:<{}}  {:>12}  {:>12}  {:>5}  limit is\n", report.bench, width, "reached",
                                 "limit", "ratio");
  for (const BenchRow& row : report.rows)
    text += fmt::format("{:<{}}  {:>12}  {:>12}  {:>5.2f}  {}\n", row.name, width,
                        value_text(row.unit, row.reached), value_text(row.unit, row.limit), ratio_of(row),
                        row.limit_is);
  for (const std::string& note : report.notes) text += note + "\n";
  return text;
}

BenchProgress::BenchProgress() : terminal_(::isatty(STDERR_FILENO) != 0) {}

BenchProgress::~BenchProgress() {
  if (shown_) tell_on_stderr("\r\x1b[K");
}

void BenchProgress::show(const std::string& text) {
  if (!terminal_) return;
  tell_on_stderr(fmt::format("\r{}\x1b[K", text));
  shown_ = true;
}

std::vector<std::vector<double>> medians_in_turn(const std::vector<BenchWork>& works, double seconds,
                                                 BenchProgress& progress) {
  std::vector<std::vector<std::vector<double>>> found(works.size());  // by work, result and round
  const Clock::time_point begin = Clock::now();
  const auto passed = [&] { return std::chrono::duration<double>(Clock::now() - begin).count(); };
  for (std::size_t round = 0; round <= kLeastRounds || passed() < seconds; ++round)
    for (std::size_t w = 0; w < works.size(); ++w) {
      progress.show(fmt::format("{}: {} {} ({:.0f} of {:.0f} s)", works[w].name,
                                round == 0 ? "warming up" : "round", round == 0 ? "" : std::to_string(round),
                                passed(), std::max(seconds, passed())));
      const std::vector<double> numbers = works[w].round();
      found[w].resize(numbers.size());
      for (std::size_t n = 0; round > 0 && n < numbers.size(); ++n) found[w][n].push_back(numbers[n]);
    }
  std::vector<std::vector<double>> medians(works.size());
  for (std::size_t w = 0; w < works.size(); ++w)
    for (std::vector<double>& numbers : found[w]) medians[w].push_back(median(std::move(numbers)));
  return medians;
}

void require_free_memory(std::uint64_t bytes, const std::string& remedy) {
  const std::uint64_t available = memory_state().available;
  if (bytes <= available) return;
  fail(ErrorCode::kBudget, "this measurement needs {} of memory, but {} are free: {}", format_size(bytes),
       format_size(available), remedy);
}

void check_seconds(double seconds) {
  if (!(seconds > 0 && seconds <= 3600))
    fail(ErrorCode::kInvalidArgument, "--seconds: {} was given; a time above 0 and up to 3600 is needed",
         seconds);
}

}  // namespace sluice::cli
