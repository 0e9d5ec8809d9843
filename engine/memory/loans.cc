#include "engine/memory/loans.h"

#include <chrono>
#include <memory>
#include <span>
#include <utility>

#include "core/error.h"

namespace sluice::engine {

std::exception_ptr shards_are_gone() {
  return std::make_exception_ptr(
      Error(ErrorCode::kState, "a shard is read, and the engine that had it is destroyed"));
}

Pieces::Use Loans::lend(const std::byte* memory, comm::Answer answer) {
  return [this, memory, answer = std::move(answer)](std::span<const std::byte> piece,
                                                    std::exception_ptr error, const Done& used) {
    if (error != nullptr) return answer({}, std::move(error), {});
    const auto loan = std::make_shared<Loan>();
    loan->offset = static_cast<std::uint64_t>(piece.data() - memory);
    if (!note(*loan, used)) {
      used(nullptr);
      return answer({}, shards_are_gone(), {});
    }
    answer(std::as_bytes(std::span(loan.get(), 1)), nullptr, [loan](const std::exception_ptr&) {});
  };
}

// Returns false where loans are no longer returned.
bool Loans::note(Loan& loan, const Done& used) {
  const std::lock_guard lock(mutex_);
  if (ends_) return false;
  loan.number = next_++;
  loans_[loan.number] = used;
  return true;
}

void Loans::give_back(std::uint64_t number) {
  Done used;
  {
    const std::lock_guard lock(mutex_);
    const auto loan = loans_.find(number);
    if (loan == loans_.end()) return;
    used = std::move(loan->second);
    loans_.erase(loan);
    returned_.notify_all();
  }
  used(nullptr);
}

void Loans::end(const std::function<bool()>& has_failed) {
  constexpr auto kPause = std::chrono::milliseconds(1);
  std::map<std::uint64_t, Done> loans;
  {
    std::unique_lock lock(mutex_);
    ends_ = true;
    while (!returned_.wait_for(lock, kPause, [this] { return loans_.empty(); }))
      if (has_failed()) break;
    loans = std::move(loans_);
  }
  for (const auto& [number, used] : loans) used(nullptr);
}

}  // namespace sluice::engine
