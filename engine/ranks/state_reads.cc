#include "engine/ranks/state_reads.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "engine/ranks/call_id.h"

namespace sluice::engine {
namespace {

constexpr int kChunkBits = 24, kKindBits = 8;

CallKind kind_of(std::uint64_t key) { return static_cast<CallKind>(key >> (64 - kKindBits)); }
std::uint64_t index_of(std::uint64_t key) { return key << kKindBits >> kKindBits; }

StateRead read_of(const comm::Read& read) {
  const std::uint64_t index = index_of(read.key);
  StateRead wanted{.changes = read.version};
  if (kind_of(read.key) == CallKind::kWhole) {
    wanted.whole = static_cast<ParameterId>(index);
  } else {
    wanted.unit = static_cast<UnitId>(index >> kChunkBits);
    wanted.chunk = index & ((std::uint64_t{1} << kChunkBits) - 1);
  }
  return wanted;
}

std::exception_ptr engine_has_ended() {
  return std::make_exception_ptr(
      Error(ErrorCode::kState, "optimizer state is read of a rank whose engine has ended"));
}

}  // namespace

std::uint64_t StateRead::key() const {
  return whole ? call_id(CallKind::kWhole, *whole)
               : call_id(CallKind::kState, std::uint64_t{unit} << kChunkBits | chunk);
}

bool StateReads::is_of_state(std::uint64_t key) {
  const CallKind kind = kind_of(key);
  return kind == CallKind::kState || kind == CallKind::kWhole || kind == CallKind::kStateTaken;
}

void StateReads::ask(const comm::Read& read, const comm::Answer& answer) {
  if (kind_of(read.key) == CallKind::kStateTaken)
    return ask_taken({.steps = read.version, .number = index_of(read.key), .answer = answer});
  std::unique_lock lock(mutex_);
  if (!ended_) waiting_.push_back({read_of(read), answer});
  const bool refuses = ended_;
  lock.unlock();
  if (refuses) return answer({}, engine_has_ended(), {});
  changed_.notify_all();
}

std::optional<StateRead> StateReads::next() const {
  const std::lock_guard lock(mutex_);
  return waiting_.empty() || sending_ ? std::nullopt : std::optional(waiting_.front().read);
}

void StateReads::tell(std::span<const std::byte> bytes, std::exception_ptr error) {
  comm::Answer answer;
  {
    const std::lock_guard lock(mutex_);
    if (waiting_.empty()) return;  // end() has refused it
    answer = std::move(waiting_.front().answer);
    waiting_.pop_front();
    sending_ = true;
  }
  answer(bytes, std::move(error), [self = shared_from_this()](const std::exception_ptr&) {
    {
      const std::lock_guard lock(self->mutex_);
      self->sending_ = false;
    }
    self->changed_.notify_all();
  });
}

void StateReads::wait_until_sent() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return !sending_; });
}

bool StateReads::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return ended_ || (!waiting_.empty() && !sending_); });
  return !ended_;
}

void StateReads::wait_a_moment() {
  constexpr std::chrono::milliseconds kMost{5};
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, kMost, [this] { return ended_ || (!waiting_.empty() && !sending_); });
}

std::chrono::steady_clock::duration StateReads::waited() const {
  const std::lock_guard lock(mutex_);
  return waiting_.empty() ? std::chrono::steady_clock::duration{}
                          : std::chrono::steady_clock::now() - waiting_.front().asked;
}

namespace {

std::exception_ptr not_taken(const std::string& error) {
  return error.empty() ? nullptr : std::make_exception_ptr(Error(ErrorCode::kState, error));
}

void nothing_sent(const std::exception_ptr&) {}

}  // namespace

void StateReads::ask_taken(TakenQuestion question) {
  std::unique_lock lock(mutex_);
  if (!ended_ && !is_answered(question)) return waiting_until_taken_.push_back(std::move(question));
  const std::exception_ptr error = ended_ ? engine_has_ended() : not_taken(error_);
  lock.unlock();
  question.answer({}, error, nothing_sent);
}

void StateReads::tell_taken(std::uint64_t steps, const std::string& error, bool counts) {
  std::vector<TakenQuestion> answered;
  {
    const std::lock_guard lock(mutex_);
    if (counts) {
      times_ = steps == steps_ ? times_ + 1 : 1;
      steps_ = steps;
      error_ = error;
    }
    const auto open = std::ranges::stable_partition(waiting_until_taken_, [&](const TakenQuestion& question) {
      return !counts || is_answered(question);
    });
    std::ranges::move(waiting_until_taken_.begin(), open.begin(), std::back_inserter(answered));
    waiting_until_taken_.erase(waiting_until_taken_.begin(), open.begin());
  }
  for (const TakenQuestion& question : answered) question.answer({}, not_taken(error), nothing_sent);
}

void StateReads::end() {
  std::deque<Question> unanswered;
  std::vector<TakenQuestion> not_told;
  {
    const std::lock_guard lock(mutex_);
    ended_ = true;
    unanswered.swap(waiting_);
    not_told.swap(waiting_until_taken_);
  }
  changed_.notify_all();
  for (const Question& question : unanswered) question.answer({}, engine_has_ended(), {});
  for (const TakenQuestion& question : not_told) question.answer({}, engine_has_ended(), {});
  wait_until_sent();
}

}  // namespace sluice::engine
