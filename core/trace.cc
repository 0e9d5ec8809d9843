#include "core/trace.h"

#include <fmt/ranges.h>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <utility>

#include "core/error.h"
#include "core/text_file.h"

namespace sluice {
namespace {

using Time = Trace::Clock::time_point;

constexpr std::size_t kBytesPerPart = 64 * 1024;
constexpr std::array<const char*, Trace::kLanes> kNames = {
    "compute", "read", "write", "optimizer", "read wait", "write wait", "rank wait", "message", "save"};

std::size_t index_of(const Trace::Event& event) { return static_cast<std::size_t>(event.lane); }

// Times are written as whole nanoseconds, so that begin plus length is exactly the end.
std::string microseconds(Trace::Clock::duration d) {
  const auto whole = std::chrono::duration_cast<std::chrono::nanoseconds>(d).count();
  return fmt::format("{:.3f}", static_cast<double>(whole) / 1e3);
}

// Assigns the events of one lane to rows. Events are stored by their ends, and are assigned from the latest
// to the earliest, so that there are only as many rows as events overlap at once.
class Rows {
 public:
  // Returns the first row in which no event begins before `end`.
  std::size_t take(Time begin, Time end) {
    std::size_t row = 0;
    while (row < begins_.size() && begins_[row] < end) ++row;
    if (row == begins_.size()) begins_.push_back(begin);
    begins_[row] = begin;
    return row;
  }
  std::size_t count() const { return std::max<std::size_t>(1, begins_.size()); }

 private:
  std::vector<Time> begins_;  // by row: the begin of the event assigned last
};

std::string process_name(const TraceProcess& process) {
  return nlohmann::json{
      {"ph", "M"}, {"pid", process.id}, {"name", "process_name"}, {"args", {{"name", process.name}}}}
      .dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::string thread_name(int process, std::size_t thread, const std::string& lane, std::size_t row) {
  const nlohmann::json name = {{"name", row == 0 ? lane : fmt::format("{} {}", lane, row + 1)}};
  return nlohmann::json{{"ph", "M"},   {"pid", process},        {"tid", thread},
                        {"cat", lane}, {"name", "thread_name"}, {"args", name}}
      .dump();
}

}  // namespace

void Trace::add(Lane lane, std::string name, Clock::time_point begin, Clock::time_point end,
                std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  Event event{std::move(name), begin, end, bytes, lane};
  if (events_.size() < limit_) return events_.push_back(std::move(event));
  if (limit_ > 0) events_[dropped_ % limit_] = std::move(event);
  ++dropped_;
}

const char* Trace::name_of(Lane lane) { return kNames[static_cast<std::size_t>(lane)]; }

void Trace::for_each(const std::function<void(const Event&)>& use) const {
  const std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < events_.size(); ++i) use(kept(i));
}

std::uint64_t Trace::dropped() const {
  const std::lock_guard lock(mutex_);
  return dropped_;
}

void Trace::save(const std::string& path) const {
  TraceText text(*this, {});
  write_trace(path, dropped_, "", {[&] { return text.next(); }});
}

TraceText::TraceText(const Trace& trace, TraceProcess process)
    : lock_(trace.mutex_), trace_(trace), process_(std::move(process)), rows_(trace.events_.size()) {
  std::array<Rows, Trace::kLanes> lanes;
  for (std::size_t i = rows_.size(); i-- > 0;) {
    const Trace::Event& event = trace.kept(i);
    rows_[i] = static_cast<std::uint32_t>(lanes[index_of(event)].take(event.begin, event.end));
  }
  // A process without other ranks lacks these lanes.
  const auto left_out = [&](std::size_t lane) {
    const bool of_ranks = lane == static_cast<std::size_t>(Trace::Lane::kRankWait) ||
                          lane == static_cast<std::size_t>(Trace::Lane::kMessage);
    return of_ranks && std::ranges::none_of(
                           trace.events_, [&](const Trace::Event& event) { return index_of(event) == lane; });
  };
  std::size_t threads = 0;
  for (std::size_t lane = 0; lane < Trace::kLanes; ++lane) {
    first_threads_[lane] = threads + 1;
    row_counts_[lane] = left_out(lane) ? 0 : lanes[lane].count();
    threads += row_counts_[lane];
  }
}

std::string TraceText::names() const {
  std::vector<std::string> names;
  if (!process_.name.empty()) names.push_back(process_name(process_));
  for (std::size_t lane = 0; lane < Trace::kLanes; ++lane)
    for (std::size_t row = 0; row < row_counts_[lane]; ++row)
      names.push_back(thread_name(process_.id, first_threads_[lane] + row, kNames[lane], row));
  return fmt::format("{}", fmt::join(names, ",\n"));
}

std::string TraceText::text_of(const Trace::Event& event, std::size_t thread) const {
  const auto since = [&](Time time) {
    return process_.since_beginning ? process_.since_beginning(time) : time - trace_.start_;
  };
  const Trace::Clock::duration begin = since(event.begin);
  const std::string bytes = event.bytes == 0 ? "" : fmt::format(R"(,"args":{{"bytes":{}}})", event.bytes);
  return fmt::format(R"({{"ph":"X","pid":{},"tid":{},"cat":"{}","name":{},"ts":{},"dur":{}{}}})", process_.id,
                     thread, kNames[index_of(event)], nlohmann::json(event.name).dump(), microseconds(begin),
                     microseconds(since(event.end) - begin), bytes);
}

std::string TraceText::next() {
  std::string part = std::exchange(begun_, true) ? std::string() : names();
  for (; done_ < rows_.size() && part.size() < kBytesPerPart; ++done_) {
    const Trace::Event& event = trace_.kept(done_);
    part += ",\n" + text_of(event, first_threads_[index_of(event)] + rows_[done_]);
  }
  return part;
}

void write_trace(const std::string& path, std::uint64_t dropped, const std::string& more,
                 const std::vector<std::function<std::string()>>& processes) {
  std::string start =
      fmt::format("{{\"otherData\":{{\"dropped_events\":{}{}}},\"traceEvents\":[\n", dropped, more);
  std::size_t process = 0;
  bool ended = false;
  write_text_file(path, [&] {
    std::string part = std::exchange(start, std::string());
    while (process < processes.size()) {
      const std::string text = processes[process]();
      if (!text.empty()) return part + text;
      if (++process < processes.size()) part += ",\n";
    }
    return part + (std::exchange(ended, true) ? "" : "\n]}\n");
  });
}

}  // namespace sluice
