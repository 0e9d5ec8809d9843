#pragma once
#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

namespace sluice {

// Notes what happened when, and writes it as the Trace Event JSON that Perfetto and chrome://tracing open. An
// event belongs to a lane ("compute", "read", ...), which is its "cat" in the file. Events of a lane that
// overlap in time are written to rows of their own ("read", "read 2", ...), since viewers expect the events
// of a row to follow each other. The latest `limit` events are kept, in memory that is taken at the start;
// the file says how many earlier ones were dropped. Thread rule: all functions from any thread.
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
  void for_each(const std::function<void(const Event&)>& use) const;  // the kept events, the oldest first
  std::uint64_t dropped() const;                                      // how many earlier events were dropped
  Clock::time_point start() const { return start_; }
  // Writes the file whole or not at all, a small part at a time. Throws Error(kIo).
  void save(const std::string& path) const;

 private:
  std::size_t limit_;
  Clock::time_point start_;
  mutable std::mutex mutex_;
  // Event 0 is the oldest.
  const Event& kept(std::size_t i) const { return events_[(dropped_ + i) % events_.size()]; }
  friend class TraceText;
  std::vector<Event> events_;  // a ring once it is full: the oldest is at dropped_ % limit_
  std::uint64_t dropped_ = 0;
};

// A process of a trace's file.
struct TraceProcess {
  int id = 1;
  std::string name = {};  // empty: none is written
  // How long after the beginning of the file a time of the trace is; does not descend. Null: since
  // Trace::start().
  std::function<Trace::Clock::duration(Trace::Clock::time_point)> since_beginning = {};
};

// The events of a trace as elements of "traceEvents", separated by commas, a small part of the text at a
// time. Trace::add() waits until this is destroyed, so that the events stay as they are; the trace outlives
// it. Thread rule: one thread, from construction to destruction.
class TraceText {
 public:
  static constexpr std::size_t kMostBytes = std::size_t{1} << 20;  // of a part
  TraceText(const Trace& trace, TraceProcess process);
  std::string next();  // empty: the end

 private:
  std::string text_of(const Trace::Event& event, std::size_t thread) const;
  std::string names() const;

  std::unique_lock<std::mutex> lock_;
  const Trace& trace_;
  TraceProcess process_;
  std::vector<std::uint32_t> rows_;                         // of each event, within its lane
  std::array<std::size_t, Trace::kLanes> row_counts_ = {};  // 0: the lane is left out
  std::array<std::size_t, Trace::kLanes> first_threads_ = {};
  std::size_t done_ = 0;
  bool begun_ = false;
};

// Writes a file, whole or not at all, of processes whose text comes as from TraceText::next(). `more` has
// further members of "otherData", as JSON, each after a comma. Throws Error(kIo), and what a source throws.
void write_trace(const std::string& path, std::uint64_t dropped, const std::string& more,
                 const std::vector<std::function<std::string()>>& processes);

// Adds an event that lasts from construction to destruction. Does nothing where trace is null.
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
