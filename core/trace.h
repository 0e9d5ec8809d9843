#pragma once
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
  using Clock = std::chrono::steady_clock;
  enum class Lane : std::uint8_t {
    kCompute,
    kRead,
    kWrite,
    kOptimizer,
    kReadWait,
    kWriteWait,
    kRankWait,
    kSave
  };
  static constexpr std::size_t kLanes = 8;
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
  // Writes the file whole or not at all, a small part at a time. Throws Error(kIo).
  void save(const std::string& path) const;

 private:
  std::size_t limit_;
  Clock::time_point start_;
  mutable std::mutex mutex_;
  // Event 0 is the oldest.
  const Event& kept(std::size_t i) const { return events_[(dropped_ + i) % events_.size()]; }
  std::string text_of(const Event& event, std::size_t thread) const;
  std::vector<Event> events_;  // a ring once it is full: the oldest is at dropped_ % limit_
  std::uint64_t dropped_ = 0;
};

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
