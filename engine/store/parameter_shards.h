#pragma once
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "allocator/ledger.h"
#include "engine/plan/plan.h"
#include "engine/ranks.h"
#include "engine/store/backing.h"
#include "engine/store/shard_memory.h"

namespace sluice::engine {

// This rank's shards of the parameters that are partitioned over the ranks. A whole unit is put together from
// the shards of all ranks wherever one needs it; to the pager that is a fetch. Each change of a unit makes a
// new *version* of it, which the ranks count alike: a rank that asks for a version waits until the owner of
// the shard has it. A shard is changed after all ranks have added to the unit's gradient, so nobody reads the
// version before any more. Thread rule: one thread; it answers the other ranks on the communicator's.
class ParameterShards {
 public:
  // Both arguments outlive it.
  ParameterShards(const Layout& layout, const Plan& plan, Ranks& ranks);
  // Waits until what the other ranks read now has been sent. Later reads wait for the next engine of the
  // ranks, which begins when all have destroyed theirs.
  ~ParameterShards();
  ParameterShards(const ParameterShards&) = delete;
  ParameterShards& operator=(const ParameterShards&) = delete;
  void start(allocator::Ledger& ledger);  // takes the memory, and answers the other ranks from then on

  bool has(UnitId unit) const { return memory_.has(unit); }  // whether the unit is partitioned
  // REQUIRES, for all below: has(unit).
  std::byte* data(UnitId unit) const { return memory_.data(unit); }
  void take(UnitId unit, const std::byte* values);  // copies the shard from a whole unit
  void expect(UnitId unit);                         // a change of the unit will follow
  void publish(UnitId unit);  // the change is made: the shard is the version that is expected
  std::unique_ptr<Backing> make_backing(UnitId unit);

 private:
  class AllShards;
  // Outlives the shards, since the communicator may call when they are gone.
  struct Reads {
    std::mutex serving;  // is held while a read is answered
    ParameterShards* shards = nullptr;
    std::mutex counting;
    std::condition_variable ended;
    int under_way = 0;  // answers that are still being sent
  };
  struct Question {
    comm::Read read;
    comm::Answer answer;
  };
  ElementRange own(UnitId unit) const { return ranks_.shard(unit, ranks_.rank()); }
  std::size_t element_bytes(UnitId unit) const { return size_of(layout_.dtype(unit)); }
  void answer(const comm::Read& read, comm::Answer answer);
  void answer_now(const Question& question);

  const Layout& layout_;
  Ranks& ranks_;
  ShardMemory memory_;
  std::vector<std::uint64_t> expected_;  // by unit
  const std::shared_ptr<Reads> reads_ = std::make_shared<Reads>();

  // mutex_ guards what follows.
  std::mutex mutex_;
  std::vector<std::uint64_t> published_;  // by unit
  std::vector<Question> waiting_;         // for versions that are still to come
};

}  // namespace sluice::engine
