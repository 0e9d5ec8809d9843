#include "models/run/profile.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>

namespace sluice::models {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::size_t kWindows = 64;

// Rounds to microseconds, which suffice for a chart and keep the text short.
double seconds_between(Clock::time_point from, Clock::time_point to) {
  return static_cast<double>(std::chrono::duration_cast<std::chrono::microseconds>(to - from).count()) / 1e6;
}

// Adds up the time in which at least one event is in progress. REQUIRES: events come ordered by their ends,
// the latest first.
class Busy {
 public:
  void add(Clock::time_point begin, Clock::time_point end) {
    end = std::min(end, begin_);
    if (begin >= end) return;
    seconds_ += std::chrono::duration<double>(end - begin).count();
    begin_ = begin;
  }
  double seconds() const { return seconds_; }

 private:
  Clock::time_point begin_ = Clock::time_point::max();  // beginning of the time added so far
  double seconds_ = 0;
};

}  // namespace

void StepSeries::join(Row& row, const Row& next) {
  row.last = next.last;
  row.count += next.count;
  row.end = next.end;
  for (std::size_t i = 0; i < kNames.size(); ++i) row.sums[i] += next.sums[i];
  row.resident = std::max(row.resident, next.resident);
  row.peak = std::max(row.peak, next.peak);
  row.skipped += next.skipped;
  row.loss_scale = next.loss_scale;
}

void StepSeries::add(const StepReport& r, Clock::time_point begin, Clock::time_point end) {
  windows_.push_back({r.step, begin, end});
  if (windows_.size() > kWindows) windows_.pop_front();
  const Row row = {r.step,
                   r.step,
                   1,
                   begin,
                   end,
                   {r.loss, r.seconds, r.read_wait_seconds, r.write_wait_seconds, r.optimizer_seconds,
                    static_cast<double>(r.disk_read), static_cast<double>(r.disk_written)},
                   r.memory,
                   r.peak_memory,
                   r.skipped ? std::uint64_t{1} : 0,
                   r.loss_scale};
  if (!rows_.empty() && rows_.back().count < steps_a_row_) return join(rows_.back(), row);
  if (rows_.size() == limit_) {
    steps_a_row_ *= 2;
    for (std::size_t i = 0; i < rows_.size(); ++i)
      if (i % 2 == 0)
        rows_[i / 2] = rows_[i];
      else
        join(rows_[i / 2], rows_[i]);
    rows_.resize((rows_.size() + 1) / 2);
    if (rows_.back().count < steps_a_row_) return join(rows_.back(), row);
  }
  rows_.push_back(row);
}

Json StepSeries::rows(Clock::time_point origin) const {
  Json columns;
  for (const char* name : {"first", "last", "begin", "end", "resident", "peak", "loss_scale", "skipped"})
    columns[name] = Json::array();
  for (const char* name : kNames) columns[name] = Json::array();
  for (const Row& row : rows_) {
    columns["first"].push_back(row.first);
    columns["last"].push_back(row.last);
    columns["begin"].push_back(seconds_between(origin, row.begin));
    columns["end"].push_back(seconds_between(origin, row.end));
    for (std::size_t i = 0; i < kNames.size(); ++i)
      columns[kNames[i]].push_back(row.sums[i] / static_cast<double>(row.count));
    columns["resident"].push_back(row.resident);
    columns["peak"].push_back(row.peak);
    columns["loss_scale"].push_back(row.loss_scale ? Json(*row.loss_scale) : Json());
    columns["skipped"].push_back(row.skipped);
  }
  return columns;
}

Json StepSeries::windows(Clock::time_point origin) const {
  Json columns = {{"step", Json::array()}, {"begin", Json::array()}, {"end", Json::array()}};
  for (const Window& window : windows_) {
    columns["step"].push_back(window.step);
    columns["begin"].push_back(seconds_between(origin, window.begin));
    columns["end"].push_back(seconds_between(origin, window.end));
  }
  return columns;
}

Json memory_columns(const allocator::Ledger& ledger, Clock::time_point origin) {
  using allocator::Ledger;
  Json tiers;
  for (const allocator::Tier tier : allocator::kTiersOfCpu) {
    Json times = Json::array();
    std::array<Json, allocator::kPurposes> held;
    held.fill(Json::array());
    const auto add = [&](Clock::time_point when, const Ledger::TierTimeline::Held& state) {
      times.push_back(seconds_between(origin, when));
      for (std::size_t p = 0; p < allocator::kPurposes; ++p) held[p].push_back(state[p]);
    };
    for (const auto& part : ledger.timeline(tier)) {
      add(part.begin, part.most);
      add(part.end, part.last);
    }
    Json& columns = tiers[std::string(name_of(tier))];
    columns["time"] = std::move(times);
    for (std::size_t p = 0; p < allocator::kPurposes; ++p)
      columns[std::string(name_of(static_cast<allocator::Purpose>(p)))] = std::move(held[p]);
  }
  return tiers;
}

Json ledger_peaks(const allocator::Ledger& ledger) {
  const allocator::Ledger::Snapshot snapshot = ledger.snapshot();
  Json tiers;
  for (const allocator::Tier of : allocator::kTiersOfCpu) {
    const auto t = static_cast<std::size_t>(of);
    Json& tier = tiers[std::string(name_of(of))];
    tier["total"] = snapshot.total[t].peak;
    for (std::size_t p = 0; p < allocator::kPurposes; ++p)
      tier[std::string(name_of(static_cast<allocator::Purpose>(p)))] = snapshot.lines[t][p].peak;
  }
  return tiers;
}

EventColumns event_columns(const Trace& trace, Clock::time_point origin) {
  std::vector<Trace::Event> events;
  std::uint64_t dropped = trace.dropped();
  std::size_t all = 0, index = 0;
  trace.for_each([&](const Trace::Event&) { ++all; });
  trace.for_each([&](const Trace::Event& event) {
    if (index++ + kProfileEvents < all)
      ++dropped;
    else
      events.push_back(event);
  });
  std::map<std::string, std::size_t> numbers;
  std::array<Busy, Trace::kLanes> busy;
  std::array<std::uint64_t, Trace::kLanes> counts = {}, bytes = {};
  std::vector<std::size_t> by_end(events.size());
  for (std::size_t i = 0; i < events.size(); ++i) by_end[i] = i;
  std::ranges::sort(by_end, [&](std::size_t a, std::size_t b) { return events[a].end > events[b].end; });
  for (const std::size_t i : by_end) {
    const auto lane = static_cast<std::size_t>(events[i].lane);
    busy[lane].add(events[i].begin, events[i].end);
    ++counts[lane];
    bytes[lane] += events[i].bytes;
  }

  std::array<std::string, 5> columns;
  Json names = Json::array(), lanes = Json::array();
  for (const Trace::Event& event : events) {
    const auto [name, is_new] = numbers.emplace(event.name, numbers.size());
    if (is_new) names.push_back(event.name);
    const auto add = [&](std::size_t column, const std::string& value) {
      columns[column] += (columns[column].empty() ? "" : ",") + value;
    };
    add(0, std::to_string(static_cast<std::size_t>(event.lane)));
    add(1, std::to_string(name->second));
    add(2, fmt::format("{:.6f}", seconds_between(origin, event.begin)));
    add(3, fmt::format("{:.6f}", seconds_between(event.begin, event.end)));
    add(4, std::to_string(event.bytes));
  }
  EventColumns result;
  for (std::size_t lane = 0; lane < Trace::kLanes; ++lane) {
    const char* name = Trace::name_of(static_cast<Trace::Lane>(lane));
    lanes.push_back(name);
    result.lanes[name] = {{"events", counts[lane]}, {"busy", busy[lane].seconds()}, {"bytes", bytes[lane]}};
  }
  result.events = fmt::format(
      R"({{"dropped":{},"lanes":{},"names":{},"lane":[{}],"name":[{}],"begin":[{}],"seconds":[{}],"bytes":[{}]}})",
      dropped, lanes.dump(), names.dump(), columns[0], columns[1], columns[2], columns[3], columns[4]);
  return result;
}

}  // namespace sluice::models
