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

constexpr std::size_t kBytesPerWrite = 64 * 1024;
constexpr std::array<const char*, Trace::kLanes> kNames = {
    "compute", "read", "write", "optimizer", "read wait", "write wait", "rank wait", "save"};

std::size_t index_of(const Trace::Event& event) { return static_cast<std::size_t>(event.lane); }

// Times are written in whole nanoseconds, so that a reader's sum of begin and length is exactly the end.
std::string microseconds(Trace::Clock::duration d) {
  const auto whole = std::chrono::duration_cast<std::chrono::nanoseconds>(d).count();
  return fmt::format("{:.3f}", static_cast<double>(whole) / 1e3);
}

// Assigns the events of one lane to rows. Events are kept in the order of their ends, and are assigned from
// the latest to the first, so that there are no more rows than events that overlap at once.
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
  std::vector<Time> begins_;  // of each row's event that was assigned last
};

std::string thread_name(std::size_t thread, const std::string& lane, std::size_t row) {
  const nlohmann::json name = {{"name", row == 0 ? lane : fmt::format("{} {}", lane, row + 1)}};
  return nlohmann::json{{"ph", "M"},   {"pid", 1}, {"tid", thread}, {"cat", lane}, {"name", "thread_name"},
                        {"args", name}}
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

std::string Trace::text_of(const Event& event, std::size_t thread) const {
  const std::string bytes = event.bytes == 0 ? "" : fmt::format(R"(,"args":{{"bytes":{}}})", event.bytes);
  return fmt::format(R"({{"ph":"X","pid":1,"tid":{},"cat":"{}","name":{},"ts":{},"dur":{}{}}})", thread,
                     kNames[index_of(event)], nlohmann::json(event.name).dump(),
                     microseconds(event.begin - start_), microseconds(event.end - event.begin), bytes);
}

void Trace::save(const std::string& path) const {
  const std::lock_guard lock(mutex_);
  std::array<Rows, kLanes> lanes;
  std::vector<std::uint32_t> rows(events_.size());
  for (std::size_t i = rows.size(); i-- > 0;)
    rows[i] = static_cast<std::uint32_t>(lanes[index_of(kept(i))].take(kept(i).begin, kept(i).end));

  std::array<std::size_t, kLanes> first_thread = {};
  std::vector<std::string> names;
  const bool has_ranks =
      std::ranges::any_of(events_, [](const Event& event) { return event.lane == Lane::kRankWait; });
  for (std::size_t lane = 0; lane < kLanes; ++lane) {
    first_thread[lane] = names.size() + 1;
    if (lane == static_cast<std::size_t>(Lane::kRankWait) && !has_ranks) continue;
    for (std::size_t row = 0; row < lanes[lane].count(); ++row)
      names.push_back(thread_name(names.size() + 1, kNames[lane], row));
  }
  std::string start = fmt::format("{{\"otherData\":{{\"dropped_events\":{}}},\"traceEvents\":[\n{}", dropped_,
                                  fmt::join(names, ",\n"));
  std::size_t done = 0;
  bool ended = false;
  write_text_file(path, [&] {
    std::string part = std::exchange(start, std::string());
    for (; done < rows.size() && part.size() < kBytesPerWrite; ++done)
      part += ",\n" + text_of(kept(done), first_thread[index_of(kept(done))] + rows[done]);
    if (done == rows.size() && !std::exchange(ended, true)) part += "\n]}\n";
    return part;
  });
}

}  // namespace sluice
