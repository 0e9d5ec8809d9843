#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <map>
#include <utility>
#include <vector>

#include "bindings/cli/bench_report.h"
#include "bindings/cli/inspect.h"
#include "core/bytes.h"
#include "core/error.h"
#include "core/printable.h"
#include "models/data/token_files.h"
#include "models/data/tokens.h"

namespace sluice::cli {
namespace {

struct MetricsSummary {
  std::vector<std::uint64_t> steps;
  std::vector<double> losses, rates;
  std::uint64_t peak = 0, predicted = 0, read = 0, written = 0, skipped = 0;
  double seconds = 0;
};

void add_row(MetricsSummary& summary, const Json& row, const std::string& source) {
  summary.steps.push_back(json_field<std::uint64_t>(row, "step", source));
  // A skipped step's loss is null if it was not finite.
  if (!json_field<Json>(row, "loss", source).is_null())
    summary.losses.push_back(json_field<double>(row, "loss", source));
  summary.skipped += row.value("skipped", false) ? 1 : 0;
  summary.rates.push_back(json_field<double>(row, "tokens_per_second", source));
  summary.peak = std::max(summary.peak, json_field<std::uint64_t>(row, "peak_memory", source));
  summary.predicted = json_field<std::uint64_t>(row, "predicted_peak", source);
  summary.read += json_field<std::uint64_t>(row, "disk_read", source);
  summary.written += json_field<std::uint64_t>(row, "disk_written", source);
  summary.seconds += json_field<double>(row, "seconds", source);
}

MetricsSummary read_metrics(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) fail(ErrorCode::kNotFound, "cannot read '{}'", path);
  MetricsSummary summary;
  std::size_t number = 0;
  for (std::string line; std::getline(file, line);) {
    const std::string source = fmt::format("{}, line {}", path, ++number);
    if (file.eof()) break;  // an incomplete line: still being written, or cut off by a kill
    const Json row = parse_json(line, source);
    if (!row.is_object()) fail(ErrorCode::kInvalidArgument, "{}: the line is not a JSON object", source);
    add_row(summary, row, source);
  }
  if (summary.steps.empty()) fail(ErrorCode::kInvalidArgument, "'{}' holds no whole line of metrics", path);
  if (summary.losses.empty())
    fail(ErrorCode::kInvalidArgument, "'{}' holds no finite loss: every step was skipped", path);
  return summary;
}

struct Interval {
  double begin = 0, end = 0;  // in whole nanoseconds
};

struct Lane {
  std::int64_t process = 0;
  std::string name;
  std::vector<Interval> events;
  std::uint64_t bytes = 0;
};

struct Lanes {
  std::vector<Lane> lanes;
  std::map<std::int64_t, std::string> processes;  // only named ones
};

// Adds an event or row to a lane of its process, selected by its category ("cat").
void add_event(Lanes& all, const Json& event, const std::string& path) {
  std::vector<Lane>& lanes = all.lanes;
  const auto process = event.contains("pid") ? json_field<std::int64_t>(event, "pid", path) : 0;
  if (event.value("name", Json()) == "process_name") {
    const Json args = json_field<Json>(event, "args", path);
    all.processes[process] = json_field<std::string>(args, "name", path);
    return;
  }
  const auto name = json_field<std::string>(event, "cat", path);
  auto lane = std::find_if(lanes.begin(), lanes.end(),
                           [&](const Lane& l) { return l.process == process && l.name == name; });
  if (lane == lanes.end()) lane = lanes.insert(lane, Lane{process, name, {}, 0});
  if (json_field<std::string>(event, "ph", path) != "X") return;
  const double begin = std::round(json_field<double>(event, "ts", path) * 1e3);
  lane->events.push_back({begin, begin + std::round(json_field<double>(event, "dur", path) * 1e3)});
  lane->bytes += event.value("/args/bytes"_json_pointer, std::uint64_t{0});
}

// Returns the time during which at least one of the events was in progress.
double busy_seconds(std::vector<Interval> events) {
  std::sort(events.begin(), events.end(),
            [](const Interval& a, const Interval& b) { return a.begin < b.begin; });
  double busy = 0, end = -std::numeric_limits<double>::infinity();
  for (const Interval& event : events) {
    busy += std::max(0.0, event.end - std::max(event.begin, end));
    end = std::max(end, event.end);
  }
  return busy / 1e9;
}

// Returns the time from the first event's begin to the last event's end.
double wall_seconds(const std::vector<Lane>& lanes) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  Interval all = {kInfinity, -kInfinity};
  for (const Lane& lane : lanes)
    for (const Interval& event : lane.events)
      all = {std::min(all.begin, event.begin), std::max(all.end, event.end)};
  return std::max(0.0, all.end - all.begin) / 1e9;
}

}  // namespace

Report inspect_metrics(const std::string& path) {
  const MetricsSummary s = read_metrics(path);
  const double least = *std::min_element(s.losses.begin(), s.losses.end());
  Report report;
  report.json = {{"kind", "metrics"},
                 {"path", path},
                 {"lines", s.steps.size()},
                 {"first_step", s.steps.front()},
                 {"last_step", s.steps.back()},
                 {"first_loss", s.losses.front()},
                 {"last_loss", s.losses.back()},
                 {"least_loss", least},
                 {"skipped_steps", s.skipped},
                 {"seconds", s.seconds},
                 {"median_tokens_per_second", median(s.rates)},
                 {"peak_memory", s.peak},
                 {"predicted_peak", s.predicted},
                 {"disk_read", s.read},
                 {"disk_written", s.written}};
  report.text = fmt::format(
      "steps {} to {} ({} lines{}), {:.1f} s\nloss {:.4f} to {:.4f}, least {:.4f}\n{:.1f} tokens/s (median)\n"
      "peak memory {} ({} predicted)\ndisk: {} read, {} written\n",
      s.steps.front(), s.steps.back(), s.steps.size(),
      s.skipped == 0 ? "" : fmt::format(", {} skipped", s.skipped), s.seconds, s.losses.front(),
      s.losses.back(), least, median(s.rates), format_size(s.peak), format_size(s.predicted),
      format_size(s.read), format_size(s.written));
  return report;
}

Report inspect_trace(const std::string& path) {
  const Json trace = read_json_file(path);
  if (!trace.is_object() || !trace.contains("traceEvents"))
    fail(ErrorCode::kInvalidArgument, "'{}' is JSON, but not a trace: 'traceEvents' is missing", path);
  Lanes all;
  for (const Json& event : trace["traceEvents"]) {
    if (!event.is_object()) fail(ErrorCode::kInvalidArgument, "'{}': an event is not a JSON object", path);
    add_event(all, event, path);
  }
  const std::vector<Lane>& lanes = all.lanes;
  const auto dropped = trace.value("/otherData/dropped_events"_json_pointer, std::uint64_t{0});
  const double wall = wall_seconds(lanes);
  Report report;
  report.json = {{"kind", "trace"},
                 {"path", path},
                 {"wall_seconds", wall},
                 {"lanes", Json::array()},
                 {"dropped_events", dropped}};
  report.text = fmt::format("{:.3f} s\n", wall);
  std::string shown;  // the process whose lanes are listed
  for (const Lane& lane : lanes) {
    const double busy = busy_seconds(lane.events), share = wall > 0 ? busy / wall : 0;
    Json row = {{"name", lane.name},
                {"events", lane.events.size()},
                {"busy_seconds", busy},
                {"busy_share", share},
                {"bytes", lane.bytes}};
    if (const auto process = all.processes.find(lane.process); process != all.processes.end()) {
      row["process"] = process->second;
      if (std::exchange(shown, process->second) != process->second)
        report.text += printable(process->second) + "\n";
    }
    report.json["lanes"].push_back(std::move(row));
    report.text += fmt::format("{:<10} {:>8} events {:>10.3f} s busy ({:>3.0f}%)", printable(lane.name),
                               lane.events.size(), busy, share * 100);
    report.text += lane.bytes == 0 ? "\n" : fmt::format("  {}\n", format_size(lane.bytes));
  }
  if (dropped != 0) report.text += fmt::format("{} earlier events were dropped\n", dropped);
  return report;
}

Report inspect_tokens(const std::string& path) {
  const models::TokenFile file = models::find_token_file(path);
  const auto source = models::open_tokens({path});
  std::vector<std::int32_t> first(std::min<std::uint64_t>(16, file.count));
  source->read(0, first);
  Report report;
  report.json = {{"kind", "tokens"},
                 {"path", path},
                 {"tokens", file.count},
                 {"bytes_per_token", file.width},
                 {"header_bytes", file.header},
                 {"first", first}};
  report.text =
      fmt::format("{} tokens of {} bytes, {}\nfirst: {}\n", file.count, file.width,
                  file.header == 0 ? "no header (nanoGPT)" : "with llm.c's header", fmt::join(first, " "));
  return report;
}

}  // namespace sluice::cli
