#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "allocator/ledger.h"
#include "core/serial_queue.h"
#include "engine/memory/backing.h"
#include "engine/memory/passed_shards.h"
#include "engine/memory/relayed_shards.h"
#include "engine/memory/shard_memory.h"
#include "engine/memory/stored_shards.h"
#include "engine/plan/plan.h"
#include "engine/ranks/ranks.h"

namespace sluice::engine {

// This rank's shards of the parameters that are partitioned over the ranks, in memory or, where the plan says
// so, on disk. A whole unit is put together from the shards of all ranks wherever one needs it; to the pager
// that is a fetch. Each change of a unit makes a new *version* of it, which the ranks count alike: a rank
// that asks for a version waits until the owner of the shard has it. What ranks of other hosts have comes
// through those that relay it (RelayedShards). A shard is changed after all ranks have added to the unit's
// gradient, so nobody reads the version before any more. Thread rule: one thread; it answers the other ranks
// on the communicator's, and beside GPUs on one of its own.
class ParameterShards {
 public:
  // Both arguments outlive it.
  ParameterShards(const Layout& layout, const Plan& plan, Ranks& ranks);
  // Waits until what the other ranks read now has been sent. Later reads wait for the next engine of the
  // ranks, which begins when all have destroyed theirs.
  ~ParameterShards();
  ParameterShards(const ParameterShards&) = delete;
  ParameterShards& operator=(const ParameterShards&) = delete;
  void define(Backings& backings);  // the records of shards on disk; before start()
  // Takes the memory, and answers the other ranks from then on. gpu: null where the CPU computes; else it
  // outlives this, and share() is called next.
  void start(allocator::Ledger& ledger, DeviceWork* gpu = nullptr);
  bool on_one_host() const { return ranks_.communicator().hosts().all_on_one(); }  // whether all ranks are
  // Collective: lets the GPUs of all ranks of one host copy from the shards of all (RankMemory, PeerMemory).
  void share();
  bool is_shared() const { return memory_.is_shared(); }
  // Whether all shards are in the memory of GPUs, from where only GPUs copy them.
  bool on_gpus() const { return place_ == ShardPlace::kGpu; }
  // Whether this rank's GPU brings its shards for the GPUs of all ranks.
  bool are_passed() const { return passed_.has_value(); }

  std::size_t units() const { return partitioned_.size(); }   // all of the model
  bool has(UnitId unit) const { return partitioned_[unit]; }  // whether the unit is partitioned
  // REQUIRES, for all below: has(unit).
  bool on_disk(UnitId unit) const { return on_disk_[unit]; }
  std::byte* data(UnitId unit) const { return memory_.data(unit); }  // REQUIRES: it is not on disk
  // For who updates a shard on disk, from the call of expect() to that of publish().
  Backing& backing(UnitId unit) const { return stored_.backing(unit); }
  std::size_t backing_bytes(UnitId unit) const { return StoredShards::backing_bytes(bytes(unit)); }
  // Copies bytes of the own shard, wherever it is; `offset` is a multiple of StoredShards::kPiece.
  void read(UnitId unit, std::size_t offset, std::span<std::byte> into, Done done);
  // Copies the shard from a whole unit, which is where the shard is: in host memory, or a GPU's, where the
  // copy is queued. May wait for the disk.
  void take(UnitId unit, const std::byte* values);
  void expect(UnitId unit);  // a change of the unit will follow
  // The change is made, or queued where shards are on GPUs: the shard is the version that is expected, which
  // others are told of when it is there.
  void publish(UnitId unit);
  // The same of a shard in host memory, of which this version is there. Thread rule: any thread.
  void publish(UnitId unit, std::uint64_t version);
  bool was_published(UnitId unit) const { return expected_[unit] > 0; }
  std::unique_ptr<Backing> make_backing(UnitId unit);

  // The pieces, of so many bytes at most, in which a whole unit is put together: bytes of a rank's shard, and
  // where they are in the unit. Those of this rank come last.
  struct Piece {
    int owner;
    std::size_t offset, bytes, in_unit;
  };
  std::vector<Piece> pieces_of(UnitId unit, std::size_t most = StoredShards::kPiece) const;
  std::uint64_t expected(UnitId unit) const { return expected_[unit]; }  // the version, for the next one
  // Brings a piece of that version. Thread rule: any thread.
  void read(UnitId unit, std::uint64_t version, const Piece& piece, std::span<std::byte> into, Done done);
  // Ends when that rank has the version. Thread rule: any thread.
  void await(UnitId unit, std::uint64_t version, int owner, Done done);
  // A piece of a shard where its owner has it, whatever its version. REQUIRES: is_shared().
  std::span<const std::byte> place_of(UnitId unit, const Piece& piece) const {
    const std::size_t shard = places_[static_cast<std::size_t>(piece.owner)].offset(unit);
    return {memory_.of(piece.owner, shard + piece.offset), piece.bytes};
  }

  // Lends the place of a piece of that version on the owner's GPU, as this one's sees it, until `used` is
  // called. The pieces are those of at most PassedShards::kMostBytes. REQUIRES: are_passed(). Thread rule:
  // any thread; `use` is called on the communicator's, or on one of this class.
  void borrow(UnitId unit, std::uint64_t version, const Piece& piece, Pieces::Use use);

  // Another plan. What will be on disk gets a record first (see StateStore). Between pause() and resume() the
  // other ranks wait, and shards are moved through a piece of the caller's memory: leave_memory() writes
  // those that leave, enter_memory() reads those that enter. REQUIRES: this rank fetches nothing.
  bool define_backing(UnitId unit, const UnitPlan& placed, Backings& backings);
  void forget_backing(UnitId unit) { stored_.undefine(unit); }
  void pause();
  // Others may wait for longer than --patience, so each piece that has moved is reported as work.
  void leave_memory(const Plan& next, allocator::Ledger& ledger, std::byte* piece);
  void enter_memory(const Plan& next, allocator::Ledger& ledger, std::byte* piece);
  void resume();

 private:
  class AllShards;
  // Outlives the shards, since the communicator may call when they are gone.
  struct Reads {
    std::mutex serving;  // is held while a read is answered
    ParameterShards* shards = nullptr;
    std::atomic<bool> ends = false;  // what is refused from now on is the reader's alone
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
  std::size_t bytes(UnitId unit, int rank) const {
    return ranks_.shard(unit, rank).size() * element_bytes(unit);
  }
  std::size_t bytes(UnitId unit) const { return bytes(unit, ranks_.rank()); }
  void fetch(const comm::Read& piece, std::span<std::byte> into, Done done);
  // The keys of what is read of a rank besides its shards, which have the numbers of their units: of the
  // places that it lends, and of an empty read, by which a place is given back.
  std::uint64_t key_of_place(UnitId unit) const { return units() + unit; }
  std::uint64_t key_of_return() const { return 2 * units(); }
  bool is_possible(const comm::Read& read) const;
  std::size_t room_of_all() const;
  void define(UnitId unit, Backings& backings);
  void answer(const comm::Read& read, comm::Answer answer);
  std::vector<Question> take_answerable();
  void answer_now(const Question& question);

  const Layout& layout_;
  Ranks& ranks_;
  // By unit. The second changes only while the reads of other ranks are paused.
  std::vector<bool> partitioned_, on_disk_;
  const ShardPlace place_;
  DeviceWork* gpu_ = nullptr;
  ShardMemory memory_;
  std::vector<ShardMemory> places_;  // by rank: where in its memory each shard is; these take none
  StoredShards stored_;
  std::vector<std::uint64_t> expected_;  // by unit
  const std::shared_ptr<Reads> reads_ = std::make_shared<Reads>();

  // mutex_ guards what follows.
  std::mutex mutex_;
  std::vector<std::uint64_t> published_;  // by unit
  std::vector<Question> waiting_;         // for versions that are still to come, or for resume()
  bool paused_ = false;

  RelayedShards relayed_;
  std::optional<PassedShards> passed_;
  std::optional<SerialQueue> published_by_gpu_;  // what waits for a GPU, and then publishes
};

}  // namespace sluice::engine
