#include "engine/store/parameter_shards.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/error.h"

namespace sluice::engine {
namespace {

std::vector<std::optional<std::size_t>> sizes_of(const Layout& layout, const Plan& plan, const Ranks& ranks) {
  std::vector<std::optional<std::size_t>> sizes;
  for (UnitId unit = 0; unit < layout.units().size(); ++unit) {
    sizes.emplace_back();
    if (plan.units[unit].tier(Part::kParameters) == allocator::Tier::kRanks)
      sizes.back() = ranks.shard(unit, ranks.rank()).size() * size_of(layout.dtype(unit));
  }
  return sizes;
}

std::exception_ptr gone() {
  return std::make_exception_ptr(
      Error(ErrorCode::kState, "a shard is read, and the engine that had it is destroyed"));
}

// Calls `done` when it was called so often, with the first error.
Done after(int calls, Done done) {
  struct State {
    std::mutex mutex;
    int left;
    std::exception_ptr error;
  };
  auto state = std::make_shared<State>();
  state->left = calls;
  return [state, done = std::move(done)](std::exception_ptr error) {
    {
      const std::lock_guard lock(state->mutex);
      if (state->error == nullptr) state->error = std::move(error);
      if (--state->left > 0) return;
    }
    done(state->error);
  };
}

}  // namespace

// The parameters of a unit, of which each rank has a shard.
class ParameterShards::AllShards final : public Backing {
 public:
  AllShards(ParameterShards& shards, UnitId unit) : shards_(shards), unit_(unit) {}

  void fetch(std::uint64_t offset, std::span<std::byte> into, Done done) override {
    ensure(offset == 0, "a partitioned unit is fetched from byte {} on", offset);
    Ranks& ranks = shards_.ranks_;
    const Done part = after(ranks.size(), std::move(done));
    const std::size_t size = shards_.element_bytes(unit_);
    for (int rank = 0; rank < ranks.size(); ++rank) {
      const ElementRange shard = ranks.shard(unit_, rank);
      const std::span<std::byte> bytes = into.subspan(shard.begin * size, shard.size() * size);
      if (rank == ranks.rank()) {
        std::memcpy(bytes.data(), shards_.data(unit_), bytes.size());
        part(nullptr);
      } else {
        ranks.communicator().read(rank, unit_, shards_.expected_[unit_], 0, bytes, part);
      }
    }
  }
  void store(std::uint64_t, std::span<const std::byte>, Done) override { never_stored(); }
  void store(std::uint64_t, std::span<const std::byte>, Threads&, Done) override { never_stored(); }
  void fetch_unchecked(std::uint64_t offset, std::span<std::byte> into, Done done) override {
    fetch(offset, into, std::move(done));
  }
  void check(std::uint64_t, std::span<const std::byte>, Threads&) override {}

 private:
  [[noreturn]] static void never_stored() {
    fail(ErrorCode::kInternal, "partitioned parameters are stored as a whole");
  }
  ParameterShards& shards_;
  const UnitId unit_;
};

ParameterShards::ParameterShards(const Layout& layout, const Plan& plan, Ranks& ranks)
    : layout_(layout),
      ranks_(ranks),
      memory_(sizes_of(layout, plan, ranks)),
      expected_(layout.units().size()),
      published_(layout.units().size()) {}

void ParameterShards::start(allocator::Ledger& ledger) {
  memory_.start(ledger, allocator::Purpose::kParameter);
  reads_->shards = this;
  ranks_.communicator().serve([reads = reads_](const comm::Read& read, comm::Answer answer) {
    const std::lock_guard lock(reads->serving);
    if (reads->shards != nullptr) return reads->shards->answer(read, std::move(answer));
    answer({}, gone(), {});
  });
}

ParameterShards::~ParameterShards() {
  std::vector<Question> unanswered;
  {
    const std::lock_guard lock(reads_->serving);
    if (reads_->shards == nullptr) return;
    reads_->shards = nullptr;
    unanswered = std::move(waiting_);
  }
  ranks_.communicator().serve({});
  for (const Question& question : unanswered) question.answer({}, gone(), {});
  std::unique_lock lock(reads_->counting);
  reads_->ended.wait(lock, [this] { return reads_->under_way == 0; });
}

std::unique_ptr<Backing> ParameterShards::make_backing(UnitId unit) {
  return std::make_unique<AllShards>(*this, unit);
}

void ParameterShards::take(UnitId unit, const std::byte* values) {
  std::memcpy(data(unit), values + own(unit).begin * element_bytes(unit),
              own(unit).size() * element_bytes(unit));
}

void ParameterShards::expect(UnitId unit) { ++expected_[unit]; }

void ParameterShards::publish(UnitId unit) {
  std::vector<Question> now;
  {
    const std::lock_guard lock(mutex_);
    published_[unit] = expected_[unit];
    const auto later = std::partition(waiting_.begin(), waiting_.end(), [&](const Question& question) {
      return question.read.key != unit || question.read.version != published_[unit];
    });
    std::move(later, waiting_.end(), std::back_inserter(now));
    waiting_.erase(later, waiting_.end());
  }
  for (const Question& question : now) answer_now(question);
}

void ParameterShards::answer(const comm::Read& read, comm::Answer answer) {
  if (read.key >= layout_.units().size() || !has(static_cast<UnitId>(read.key)))
    return answer(
        {}, std::make_exception_ptr(Error(ErrorCode::kState, "a unit is read that is not partitioned")), {});
  Question question{read, std::move(answer)};
  {
    const std::lock_guard lock(mutex_);
    if (read.version > published_[read.key]) return waiting_.push_back(std::move(question));
  }
  answer_now(question);
}

void ParameterShards::answer_now(const Question& question) {
  const auto unit = static_cast<UnitId>(question.read.key);
  const std::size_t bytes = own(unit).size() * element_bytes(unit);
  if (question.read.offset != 0 || question.read.bytes != bytes)
    return question.answer(
        {}, std::make_exception_ptr(Error(ErrorCode::kState, "a shard is read as if it had another size")),
        {});
  {
    const std::lock_guard lock(reads_->counting);
    ++reads_->under_way;
  }
  question.answer({data(unit), bytes}, nullptr, [reads = reads_](std::exception_ptr) {
    const std::lock_guard lock(reads->counting);
    --reads->under_way;
    reads->ended.notify_all();
  });
}

}  // namespace sluice::engine
