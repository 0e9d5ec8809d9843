#pragma once
#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

namespace sluice {

// Records events with their times, and writes them as Trace Event JSON, which Perfetto and chrome://tracing
// open. An event belongs to a lane ("compute", "read", ...), its "cat" in the file. Overlapping events of a
// lane are written to separate rows ("read", "read 2", ...), since viewers expect the events of a row not to
// overlap. The latest `limit` events are kept, in memory that is allocated at the start; the file says how
// many earlier ones were dropped. Thread rule: all functions from any thread.
class Trace {
 public:
  using Clock = std::chrono::steady_clock;  // CLOCK_MONOTONIC
  enum class Lane : std::uint8_t {
    kCompute,
    kRead,
    kWrite,
    kOptimizer,
    kReadWait,
    kWriteWait,
    kRankWait,
    kMessage,
    kSave
  };
  static constexpr std::size_t kLanes = 9;
  static const char* name_of(Lane lane);

  explicit Trace(std::size_t limit = 1'000'000) : limit_(limit), start_(Clock::now()) {
    events_.reserve(limit);
  }
  void add(Lane lane, std::string name, Clock::time_point begin, Clock::time_point end,
           std::uint64_t bytes = 0);
  struct Event {
    std::string name;
    Clock::time_point begin, end;
    std::uint64_t bytes;
    Lane lane;
  };
  void for_each(const std::function<void(const Event&)>& use) const;  // visits kept events, oldest first
  std::uint64_t dropped() const;  // the number of earlier events that were dropped
  Clock::time_point start() const { return start_; }
  // Writes the file whole or not at all, a small part at a time. Throws Error(kIo).
  void save(const std::string& path) const;

 private:
  std::size_t limit_;
  Clock::time_point start_;
  mutable std::mutex mutex_;
  // Event 0 is the oldest one that is kept.
  const Event& kept(std::size_t i) const { return events_[(dropped_ + i) % events_.size()]; }
  friend class TraceText;
  std::vector<Event> events_;  // once full, a ring whose oldest event is at dropped_ % limit_
  std::uint64_t dropped_ = 0;
};

// One process in a trace file.
struct TraceProcess {
  int id = 1;
  std::string name = {};  // empty: no name is written
  // Converts a time of the trace to the time since the file's beginning; must be monotonic. Null: the time
  // since Trace::start().
  std::function<Trace::Clock::duration(Trace::Clock::time_point)> since_beginning = {};
};

// Produces the events of a trace as elements of "traceEvents", separated by commas, in parts of limited size.
// Trace::add() blocks until this object is destroyed, so that the events do not change; the trace outlives
// it. Thread rule: one thread, from construction to destruction.
class TraceText {
 public:
  static constexpr std::size_t kMostBytes = std::size_t{1} << 20;  // of one part
  TraceText(const Trace& trace, TraceProcess process);
  std::string next();  // returns an empty string at the end

 private:
  std::string text_of(const Trace::Event& event, std::size_t thread) const;
  std::string names() const;

  std::unique_lock<std::mutex> lock_;
  const Trace& trace_;
  TraceProcess process_;
  std::vector<std::uint32_t> rows_;                         // by event: its row within its lane
  std::array<std::size_t, Trace::kLanes> row_counts_ = {};  // 0: the lane has no events and is left out
  std::array<std::size_t, Trace::kLanes> first_threads_ = {};
  std::size_t done_ = 0;
  bool begun_ = false;
};

// Writes a trace file, whole or not at all, from several processes, each given by a function like
// TraceText::next(). `more` has further members of "otherData", as JSON, each after a comma. Throws
// Error(kIo), and whatever these functions throw.
void write_trace(const std::string& path, std::uint64_t dropped, const std::string& more,
                 const std::vector<std::function<std::string()>>& processes);

// Adds an event that lasts from construction to destruction, unless trace is null.
class TraceScope {
 public:
  TraceScope(Trace* trace, Trace::Lane lane, std::string name)
      : trace_(trace), lane_(lane), name_(std::move(name)), begin_(Trace::Clock::now()) {}
  ~TraceScope() {
    if (trace_ != nullptr) trace_->add(lane_, std::move(name_), begin_, Trace::Clock::now());
  }
  TraceScope(const TraceScope&) = delete;
  TraceScope& operator=(const TraceScope&) = delete;

 private:
  Trace* trace_;
  Trace::Lane lane_;
  std::string name_;
  Trace::Clock::time_point begin_;
};

}  // namespace sluice
