#pragma once
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/call.h"
#include "core/error.h"
#include "engine/layout/layout.h"

namespace sluice::engine {

// A read of another rank's optimizer state: of a chunk of a unit, or of the arrays of a whole parameter, as
// they are after so many changes of the unit's state, which all ranks count alike.
struct StateRead {
  UnitId unit = 0;
  std::size_t chunk = 0;
  std::optional<ParameterId> whole = {};  // instead of unit and chunk
  std::uint64_t changes = 0;
  std::uint64_t key() const;
};

// The other rank cannot give what was read, and all ranks may go on.
class StateRefused : public Error {
 public:
  using Error::Error;
};

// Reads of this rank's state by a rank that takes it while this one makes no call for that. They wait until
// the engine answers them, one after another. And on the rank that takes state: the others' questions whether
// it has, which wait until it tells them. Thread rule: any thread.
class StateReads : public std::enable_shared_from_this<StateReads> {
 public:
  static bool is_of_state(std::uint64_t key);
  void ask(const comm::Read& read, const comm::Answer& answer);
  // The read to answer next; nothing: there is none, or an answer is being sent.
  std::optional<StateRead> next() const;
  // Answer it, unless end() has. REQUIRES, for both: next(), and no other thread answers. The bytes do not
  // change before wait_until_sent(), or, where they lie in no slot of updates, before all ranks have summed
  // another gradient of the unit.
  void answer(std::span<const std::byte> bytes) { tell(bytes, nullptr); }
  void refuse(std::exception_ptr why) { tell({}, std::move(why)); }
  void wait_until_sent();
  bool wait();           // until there is one to answer; false after end()
  void wait_a_moment();  // the same, but for a few milliseconds at most
  // How long the one to answer next has waited. REQUIRES: next().
  std::chrono::steady_clock::duration waited() const;
  // This rank has taken the state after so many steps, or could not; error: why, or empty. counts: also for
  // ranks that ask later. (Where another rank refused, all may take the state together next.)
  void tell_taken(std::uint64_t steps, const std::string& error, bool counts);
  void end();  // refuses what comes from now on, and waits until answers have left

 private:
  struct Question {
    StateRead read;
    comm::Answer answer;
    std::chrono::steady_clock::time_point asked = std::chrono::steady_clock::now();
  };
  // Whether this rank has taken the state as it is after so many steps for the number-th time.
  struct TakenQuestion {
    std::uint64_t steps = 0, number = 0;
    comm::Answer answer;
  };
  void ask_taken(TakenQuestion question);
  bool is_answered(const TakenQuestion& question) const {
    return question.steps < steps_ || (question.steps == steps_ && question.number <= times_);
  }
  void tell(std::span<const std::byte> bytes, std::exception_ptr error);

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Question> waiting_;
  std::vector<TakenQuestion> waiting_until_taken_;
  // After how many steps this rank has taken the state last, how often so, and why that failed in the end.
  std::uint64_t steps_ = 0, times_ = 0;
  std::string error_;
  bool sending_ = false, ended_ = false;
};

}  // namespace sluice::engine
