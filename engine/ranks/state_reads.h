#pragma once
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <span>

#include "comm/call.h"
#include "core/error.h"
#include "engine/layout/layout.h"

namespace sluice::engine {

// What a rank reads of another one's optimizer state: a chunk of a unit, or the arrays of a whole parameter,
// as they are after so many changes of the unit's state, which all ranks count alike.
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
// the engine answers them, one after another. Thread rule: any thread.
class StateReads : public std::enable_shared_from_this<StateReads> {
 public:
  static bool is_of_state(std::uint64_t key);
  void ask(const comm::Read& read, const comm::Answer& answer);
  // The read to answer next; nothing: there is none, or an answer is being sent.
  std::optional<StateRead> next() const;
  // Answer it, unless end() has. REQUIRES, for both: next(), and no other thread answers. The bytes do not
  // change before wait_until_sent(), or before all ranks have summed another gradient of the unit.
  void answer(std::span<const std::byte> bytes) { tell(bytes, nullptr); }
  void refuse(std::exception_ptr why) { tell({}, std::move(why)); }
  void wait_until_sent();
  bool wait();           // until there is one to answer; false after end()
  void wait_a_moment();  // the same, but for a few milliseconds at most
  void end();            // refuses what comes from now on, and waits until answers have left

 private:
  struct Question {
    StateRead read;
    comm::Answer answer;
  };
  void tell(std::span<const std::byte> bytes, std::exception_ptr error);

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Question> waiting_;
  bool sending_ = false, ended_ = false;
};

}  // namespace sluice::engine
