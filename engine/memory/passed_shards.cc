#include "engine/memory/passed_shards.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <utility>

#include "core/bytes.h"
#include "core/error.h"

namespace sluice::engine {
namespace {

constexpr std::size_t kUnitsPassed = 3;  // in flight at a time

}  // namespace

std::exception_ptr shards_are_gone() {
  return std::make_exception_ptr(
      Error(ErrorCode::kState, "a shard is read, and the engine that had it is destroyed"));
}

PassedShards::Need PassedShards::need_of(const Layout& layout, const Shards& all, UnitId unit, int rank,
                                         int ranks) {
  const auto shard = [&](int of) { return all.shard(unit, of).size() * size_of(layout.dtype(unit)); };
  std::size_t largest = 0;
  for (int of = 0; of < ranks; ++of) largest = std::max(largest, shard(of));
  const std::size_t places = std::max(std::size_t{1}, divide_up(shard(rank), kMostBytes));
  return {kUnitsPassed * places, std::min(kMostBytes, round_up(largest, kParameterAlignment))};
}

PassedShards::PassedShards(const Need& need, int ranks, Source source)
    : need_(need),
      source_(std::move(source)),
      pieces_(need.places, ranks, [this](const Pieces::Key& key, std::byte* into, Done done) {
        bring(key, into, std::move(done));
      }) {}

void PassedShards::end(const std::function<bool()>& has_failed) {
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

void PassedShards::start(allocator::Ledger& ledger, DeviceWork& gpu) {
  gpu_ = &gpu;
  places_ = {ledger, gpu.device(), allocator::Purpose::kStaging, need_.places * need_.bytes};
  pieces_.start(places_.data(), need_.bytes);
  bringing_.emplace();
}

void PassedShards::share(comm::Communicator& communicator, const std::string& name) {
  const std::string problem = places_.share(communicator, name);
  if (!problem.empty()) fail(ErrorCode::kIo, "{}: {}", name, PeerMemory::refusal(problem));
  for (int rank = 0; rank < communicator.size(); ++rank) gpu_->add(places_.memory_of(rank), need_.bytes);
}

void PassedShards::lend(UnitId unit, std::uint64_t version, std::size_t offset, std::size_t bytes,
                        Pieces::Use use) {
  pieces_.read({.unit = unit, .version = version, .index = offset / kMostBytes}, bytes, std::move(use));
}

void PassedShards::lend_to_other(UnitId unit, std::uint64_t version, std::size_t offset,
                                 comm::Answer answer) {
  lend(unit, version, offset, 0,
       [this, answer = std::move(answer)](std::span<const std::byte> place, std::exception_ptr error,
                                          const Done& used) {
         if (error != nullptr) return answer({}, std::move(error), {});
         const auto loan = std::make_shared<Loan>();
         loan->offset = static_cast<std::uint64_t>(place.data() - places_.data());
         if (!note(*loan, used)) {
           used(nullptr);
           return answer({}, shards_are_gone(), {});
         }
         answer(std::as_bytes(std::span(loan.get(), 1)), nullptr, [loan](const std::exception_ptr&) {});
       });
}

// Returns false where loans are no longer returned.
bool PassedShards::note(Loan& loan, const Done& used) {
  const std::lock_guard lock(mutex_);
  if (ends_) return false;
  loan.number = next_loan_++;
  loans_[loan.number] = used;
  return true;
}

void PassedShards::give_back(std::uint64_t number) {
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

void PassedShards::bring(const Pieces::Key& key, std::byte* into, Done done) {
  {
    const std::lock_guard lock(mutex_);
    if (ends_) std::rethrow_exception(shards_are_gone());
  }
  const auto work = [this, key, into](Done&) {
    const std::span<const std::byte> shard = source_(key.unit);
    const std::size_t offset = key.index * kMostBytes, bytes = std::min(kMostBytes, shard.size() - offset);
    gpu_->copy_in(into, shard.subspan(offset, bytes), DeviceWork::Flow::kPassed);
    gpu_->wait({into, bytes}, DeviceWork::Use::kRead);
  };
  bringing_->add(work, std::move(done));
}

}  // namespace sluice::engine
