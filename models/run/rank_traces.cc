#include "models/run/rank_traces.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <span>
#include <utility>

#include "core/error.h"
#include "core/json.h"
#include "core/system.h"
#include "engine/ranks/agreement.h"
#include "engine/ranks/call_id.h"
#include "models/run/rank_files.h"

namespace sluice::models {
namespace {

using std::chrono::nanoseconds;

constexpr const char* kLength = "the length of a part of a trace";
constexpr const char* kPart = "a part of a trace";

std::int64_t nanoseconds_of(Trace::Clock::time_point time) {
  return nanoseconds(time.time_since_epoch()).count();
}

double microseconds(std::int64_t time) { return static_cast<double>(time) / 1e3; }

std::string about_text(const Json& ranks) {
  return fmt::format(R"(,"clock":"CLOCK_MONOTONIC of rank 0","ranks":{})",
                     ranks.dump(-1, ' ', false, Json::error_handler_t::replace));
}

}  // namespace

// A rank's trace as the other ranks know it.
struct RankTraces::Member {
  std::string host;
  std::uint64_t dropped = 0;
  std::int64_t start = 0;  // of its trace, by its own clock
};

// Files from an earlier run's failure would be mistaken for a part of this run, since rank 0's is replaced.
RankTraces::RankTraces(comm::Communicator* communicator, std::string path, std::string place,
                       std::function<std::int64_t()> clock)
    : communicator_(communicator != nullptr && communicator->size() > 1 ? communicator : nullptr),
      path_(std::move(path)),
      place_(std::move(place)),
      clock_(std::move(clock)) {
  if (path_.empty()) return;
  if (communicator_ == nullptr || communicator_->rank() == 0)
    remove_files_of_absent_ranks(path_, communicator_ == nullptr ? 1 : communicator_->size(),
                                 kTraceBeginning);
  if (communicator_ == nullptr) return;
  first_ = last_ = engine::read_clocks(*communicator_, clock_);
  const std::string own = communicator_->rank() == 0 ? "" : path_of_rank(path_, communicator_->rank());
  std::error_code ignored;
  if (!own.empty() && may_be_replaced(own, kTraceBeginning)) std::filesystem::remove(own, ignored);
}

std::vector<RankTraces::Member> RankTraces::members(const Trace& trace) {
  const Json own = {
      {"host", host_name()}, {"dropped_events", trace.dropped()}, {"start", nanoseconds_of(trace.start())}};
  const std::string name = "the traces";
  std::vector<Member> members;
  for (const std::string& text :
       engine::exchange(*communicator_, name, own.dump(-1, ' ', false, Json::error_handler_t::replace))) {
    const Json json = parse_json(text, name);
    members.push_back({json_field<std::string>(json, "host", name),
                       json_field<std::uint64_t>(json, "dropped_events", name),
                       json_field<std::int64_t>(json, "start", name)});
  }
  return members;
}

std::int64_t RankTraces::to_first(int rank, std::int64_t time) const {
  const auto r = static_cast<std::size_t>(rank);
  return engine::time_of_first(first_[r], last_[r], time);
}

// The file begins with the trace that began first.
std::int64_t RankTraces::beginning_of(const std::vector<Member>& members) const {
  std::int64_t beginning = members[0].start;
  for (int rank = 1; rank < communicator_->size(); ++rank)
    beginning = std::min(beginning, to_first(rank, members[static_cast<std::size_t>(rank)].start));
  return beginning;
}

TraceProcess RankTraces::process(const std::string& host, std::int64_t beginning) const {
  const int rank = communicator_->rank();
  return {rank + 1, fmt::format("rank {} on {}{}{}", rank, host, place_.empty() ? "" : ", ", place_),
          [this, rank, beginning](Trace::Clock::time_point time) {
            return nanoseconds(to_first(rank, nanoseconds_of(time)) - beginning);
          }};
}

Json RankTraces::about(int rank, const Member& member) const {
  const engine::ClockReading &first = first_[static_cast<std::size_t>(rank)],
                             &last = last_[static_cast<std::size_t>(rank)];
  return {{"rank", rank},
          {"host", member.host},
          {"dropped_events", member.dropped},
          {"clock_ahead_us", {microseconds(first.ahead), microseconds(last.ahead)}},
          {"uncertainty_us", microseconds(std::max(first.uncertainty, last.uncertainty))}};
}

void RankTraces::send(TraceText& text) {
  for (bool more = true; more;) {
    const std::string part = text.next();
    const std::uint64_t length = part.size();
    more = length > 0;
    TransferGroup group;
    communicator_->send(0, engine::call_id(kLength), kLength, std::as_bytes(std::span(&length, 1)),
                        group.add());
    if (more)
      communicator_->send(0, engine::call_id(kPart), kPart, std::as_bytes(std::span(part)), group.add());
    group.wait();
  }
}

std::string RankTraces::receive(int rank) {
  communicator_->report_work();  // ranks whose turn comes later wait
  std::uint64_t length = 0;
  TransferGroup lengths, parts;
  communicator_->receive(rank, engine::call_id(kLength), kLength,
                         std::as_writable_bytes(std::span(&length, 1)), lengths.add());
  lengths.wait();
  if (length > TraceText::kMostBytes)
    fail(ErrorCode::kCorrupt, "rank {} sends {} bytes of its trace at once, of at most {}", rank, length,
         TraceText::kMostBytes);
  std::string part(length, '\0');
  if (length == 0) return part;
  communicator_->receive(rank, engine::call_id(kPart), kPart, std::as_writable_bytes(std::span(part)),
                         parts.add());
  parts.wait();
  return part;
}

void RankTraces::save(const Trace* trace) {
  if (path_.empty()) return;
  if (communicator_ == nullptr) return trace->save(path_);
  last_ = engine::read_clocks(*communicator_, clock_);
  const std::vector<Member> all = members(*trace);
  const int own = communicator_->rank();
  TraceText text(*trace, process(all[static_cast<std::size_t>(own)].host, beginning_of(all)));
  if (own == 0) {
    std::vector<std::function<std::string()>> processes = {[&] { return text.next(); }};
    for (int rank = 1; rank < communicator_->size(); ++rank)
      processes.emplace_back([this, rank] { return receive(rank); });
    std::uint64_t dropped = 0;
    Json ranks = Json::array();
    for (int rank = 0; rank < communicator_->size(); ++rank) {
      const Member& member = all[static_cast<std::size_t>(rank)];
      dropped += member.dropped;
      ranks.push_back(about(rank, member));
    }
    write_trace(path_, dropped, about_text(ranks), processes);
  } else {
    send(text);
  }
  // No rank leaves while rank 0 still receives from others.
  engine::exchange(*communicator_, "the end of the traces", {});
}

void RankTraces::save_alone(const Trace* trace) const {
  if (path_.empty()) return;
  if (communicator_ == nullptr) return trace->save(path_);
  const int rank = communicator_->rank();
  const std::string path = rank == 0 ? path_ : place_of_rank(path_, rank);
  if (path.empty()) return;  // for a pipe or a device
  if (rank > 0 && !may_be_replaced(path, kTraceBeginning))
    fail(ErrorCode::kIo, "'{}' is there already and is not a trace; move it away", path);
  const Member own{host_name(), trace->dropped(), 0};
  TraceText text(*trace, process(own.host, first_[0].time));
  write_trace(path, own.dropped, about_text(Json::array({about(rank, own)})), {[&] { return text.next(); }});
}

}  // namespace sluice::models
