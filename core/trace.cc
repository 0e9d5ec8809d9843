#include "core/trace.h"

#include <nlohmann/json.hpp>

#include <array>

#include "core/text_file.h"

namespace sluice {

void Trace::add(Lane lane, std::string name, Clock::time_point begin, Clock::time_point end, std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  if (events_.size() >= limit_) {
    ++dropped_;
    return;
  }
  events_.push_back({std::move(name), begin, end, bytes, lane});
}

void Trace::save(const std::string& path) const {
  static constexpr std::array<const char*, 4> kLanes = {"compute", "read", "write", "optimizer"};
  const auto microseconds = [&](Clock::duration d) { return std::chrono::duration<double, std::micro>(d).count(); };
  nlohmann::json events = nlohmann::json::array();
  for (std::size_t lane = 0; lane < kLanes.size(); ++lane)
    events.push_back({{"ph", "M"}, {"name", "thread_name"}, {"pid", 1}, {"tid", lane + 1}, {"args", {{"name", kLanes[lane]}}}});
  const std::lock_guard lock(mutex_);
  for (const Event& event : events_) {
    nlohmann::json row = {{"ph", "X"}, {"pid", 1}, {"tid", static_cast<int>(event.lane) + 1}, {"name", event.name},
                          {"ts", microseconds(event.begin - start_)}, {"dur", microseconds(event.end - event.begin)}};
    if (event.bytes != 0) row["args"] = {{"bytes", event.bytes}};
    events.push_back(std::move(row));
  }
  write_text_file(path, nlohmann::json{{"traceEvents", std::move(events)}, {"otherData", {{"dropped_events", dropped_}}}}.dump());
}

}  // namespace sluice
