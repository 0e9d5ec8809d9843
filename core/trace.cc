#include "core/trace.h"

#include <nlohmann/json.hpp>

#include <array>
#include <utility>

#include "core/error.h"
#include "core/text_file.h"

namespace sluice {
namespace {

constexpr std::size_t kPiece = 64 * 1024;  // of what is written at a time

}  // namespace

void Trace::add(Lane lane, std::string name, Clock::time_point begin, Clock::time_point end, std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  Event event{std::move(name), begin, end, bytes, lane};
  if (events_.size() < limit_) return events_.push_back(std::move(event));
  if (limit_ > 0) events_[dropped_ % limit_] = std::move(event);
  ++dropped_;
}

std::string Trace::text_of(const Event& event) const {
  const auto microseconds = [](Clock::duration d) { return std::chrono::duration<double, std::micro>(d).count(); };
  nlohmann::json row = {{"ph", "X"}, {"pid", 1}, {"tid", static_cast<int>(event.lane) + 1}, {"name", event.name},
                        {"ts", microseconds(event.begin - start_)}, {"dur", microseconds(event.end - event.begin)}};
  if (event.bytes != 0) row["args"] = {{"bytes", event.bytes}};
  return row.dump();
}

void Trace::save(const std::string& path) const {
  static constexpr std::array<const char*, 4> kLanes = {"compute", "read", "write", "optimizer"};
  const std::lock_guard lock(mutex_);
  std::string start = fmt::format("{{\"otherData\":{{\"dropped_events\":{}}},\"traceEvents\":[", dropped_);
  for (std::size_t lane = 0; lane < kLanes.size(); ++lane)
    start += fmt::format("{}\n{}", lane == 0 ? "" : ",",
                         nlohmann::json{{"ph", "M"}, {"name", "thread_name"}, {"pid", 1}, {"tid", lane + 1},
                                        {"args", {{"name", kLanes[lane]}}}}.dump());
  std::size_t done = 0;
  bool ended = false;
  write_text_file(path, [&] {
    std::string piece = std::exchange(start, std::string());
    for (; done < events_.size() && piece.size() < kPiece; ++done)
      piece += ",\n" + text_of(events_[(dropped_ + done) % events_.size()]);
    if (done == events_.size() && !std::exchange(ended, true)) piece += "\n]}\n";
    return piece;
  });
}

}  // namespace sluice
