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
#include "engine/memory/loans.h"
#include "engine/memory/passed_shards.h"
#include "engine/memory/relayed_shards.h"
#include "engine/memory/shard_memory.h"
#include "engine/memory/stored_shards.h"
#include "engine/plan/plan.h"
#include "engine/ranks/ranks.h"

namespace sluice::engine {

// This rank's shards of the parameters that are partitioned over the ranks, in memory or, where the plan says
// so, on disk. A whole unit is all-gathered from the shards of all ranks wherever it is needed; to the pager
// that is a fetch. Each change of a unit makes a new *version*, which all ranks count alike: a read of a
// version waits until the shard's owner has published it. Shards on other hosts arrive through the ranks that
// relay them (RelayedShards). A shard changes only after all ranks have added to the unit's gradient, so no
// rank still reads the previous version. Thread rule: one thread; reads of other ranks are answered on the
// communicator's thread, and beside GPUs on one of this class.
class ParameterShards {
 public:
  // Both arguments outlive it.
  ParameterShards(const Layout& layout, const Plan& plan, Ranks& ranks);
  // Waits until answers that are being sent have left. Later reads wait for the ranks' next engine, which
  // begins when all have destroyed this one.
  ~ParameterShards();
  ParameterShards(const ParameterShards&) = delete;
  ParameterShards& operator=(const ParameterShards&) = delete;
  void define(Backings& backings);  // the disk records of shards; before start()
  // Takes the memory, and answers reads of other ranks from then on. gpu: null where the CPU computes; else
  // it outlives this, and share() must follow.
  void start(allocator::Ledger& ledger, DeviceWork* gpu = nullptr);
  bool on_one_host() const { return ranks_.communicator().hosts().all_on_one(); }  // all ranks
  // Collective: lets the GPUs of all ranks of one host copy from all shards (RankMemory, PeerMemory), and
  // from the pieces of shards on disk.
  void share();
  bool is_shared() const { return memory_.is_shared() && (!stores_any_ || stored_.is_shared()); }
  // Whether all shards are in GPU memory, which only GPUs read.
  bool on_gpus() const { return place_ == ShardPlace::kGpu; }
  // Whether this rank's GPU copies its shards out of host memory for the GPUs of all ranks (PassedShards).
  bool are_passed() const { return passed_.has_value(); }
  // Whether that rank lends its shard of the unit piece by piece: GPUs pass it, or it is on disk; and whether
  // any rank lends any. REQUIRES: share() was called.
  bool lends(UnitId unit, int owner) const {
    return are_passed() || on_disk_of_ranks_[static_cast<std::size_t>(owner)][unit];
  }
  bool lends_any() const { return are_passed() || stores_any_; }
  std::size_t most_lent() const { return are_passed() ? PassedShards::kMostBytes : StoredShards::kPiece; }

  std::size_t units() const { return partitioned_.size(); }   // all of the model
  bool has(UnitId unit) const { return partitioned_[unit]; }  // whether it is partitioned
  // REQUIRES, for all below: has(unit).
  bool on_disk(UnitId unit) const { return on_disk_[unit]; }
  std::byte* data(UnitId unit) const { return memory_.data(unit); }  // REQUIRES: it is not on disk
  // For updating a shard on disk, between expect() and publish().
  Backing& backing(UnitId unit) const { return stored_.backing(unit); }
  std::size_t backing_bytes(UnitId unit) const { return StoredShards::backing_bytes(bytes(unit)); }
  // Copies bytes of this rank's shard, wherever it is; `offset` is a multiple of StoredShards::kPiece.
  void read(UnitId unit, std::size_t offset, std::span<std::byte> into, Done done);
  // Copies this rank's shard out of a whole unit, which must be where the shard is: in host memory, or in GPU
  // memory, where the copy is queued. May wait for the disk.
  void take(UnitId unit, const std::byte* values);
  // Copies a part of this rank's shard out of host memory: from `offset` on, a multiple of
  // StoredShards::kPiece, to another one or to the shard's end. REQUIRES: !on_gpus().
  void take(UnitId unit, std::size_t offset, std::span<const std::byte> values);
  void expect(UnitId unit);  // announces a change of the unit
  // Publishes the announced version of this rank's shard, whose change is made, or queued where shards are in
  // GPU memory; other ranks may read it once it is complete.
  void publish(UnitId unit);
  // Publishes that version of a shard in host memory, where it is complete. Thread rule: any thread.
  void publish(UnitId unit, std::uint64_t version);
  bool was_published(UnitId unit) const { return expected_[unit] > 0; }
  std::unique_ptr<Backing> make_backing(UnitId unit);

  // The pieces, of at most `most` bytes, in which a whole unit is gathered: a range of the owner's shard, and
  // its offset in the unit. This rank's own pieces come last.
  struct Piece {
    int owner;
    std::size_t offset, bytes, in_unit;
  };
  std::vector<Piece> pieces_of(UnitId unit, std::size_t most = StoredShards::kPiece) const;
  std::uint64_t expected(UnitId unit) const { return expected_[unit]; }  // the version to fetch next
  // Reads a piece of that version. Thread rule: any thread.
  void read(UnitId unit, std::uint64_t version, const Piece& piece, std::span<std::byte> into, Done done);
  // Calls `done` when the owner has published the version. Thread rule: any thread.
  void await(UnitId unit, std::uint64_t version, int owner, Done done);
  // A piece in its owner's memory, whatever its version. REQUIRES: is_shared(), and the owner does not lend
  // it.
  std::span<const std::byte> place_of(UnitId unit, const Piece& piece) const {
    const std::size_t shard = places_[static_cast<std::size_t>(piece.owner)].offset(unit);
    return {memory_.of(piece.owner, shard + piece.offset), piece.bytes};
  }

  // Lends memory that has a piece of that version, until `used` is called: of the owner's GPU, as an address
  // of this rank's, or registered memory of the host. The pieces are those of at most most_lent() bytes.
  // REQUIRES: the owner lends the shard. Thread rule: any thread; `use` is called on the communicator's
  // thread, or on one of this class or of the disk.
  void borrow(UnitId unit, std::uint64_t version, const Piece& piece, Pieces::Use use);

  // A change of plan. A shard that goes to disk gets a record first (see StateStore). Between pause() and
  // resume() reads of other ranks wait, and shards move through a piece of the caller's memory:
  // leave_memory() writes shards to disk, enter_memory() reads shards into memory. REQUIRES: this rank
  // fetches nothing.
  bool define_backing(UnitId unit, const UnitPlan& placed, Backings& backings);
  void forget_backing(UnitId unit) { stored_.undefine(unit); }
  void pause();
  // Each moved piece is reported as work, since other ranks may wait for longer than --patience.
  void leave_memory(const Plan& next, allocator::Ledger& ledger, std::byte* piece);
  void enter_memory(const Plan& next, allocator::Ledger& ledger, std::byte* piece);
  void resume();

 private:
  class AllShards;
  // Outlives the shards, since the communicator may call after they are destroyed.
  struct Reads {
    std::mutex serving;  // held while a read is answered
    ParameterShards* shards = nullptr;
    std::atomic<bool> ends = false;  // errors from now on concern only the reader
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
  void read_own(UnitId unit, std::uint64_t version, std::size_t offset, std::span<std::byte> into, Done done);
  void fetch(const comm::Read& piece, std::span<std::byte> into, Done done);
  // The keys of reads that are not of shards, whose keys are unit numbers: a read of a place that is lent,
  // and an empty read, which returns a place.
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
  // By unit. on_disk_ changes only while reads of other ranks are paused.
  const std::vector<bool> partitioned_;
  std::vector<bool> on_disk_;
  const ShardPlace place_;
  DeviceWork* gpu_ = nullptr;
  ShardMemory memory_;
  // What share() has found, by rank: the layout of its shards (these take no memory), and whether they are on
  // disk, by unit.
  std::vector<ShardMemory> places_;
  std::vector<std::vector<bool>> on_disk_of_ranks_;
  bool stores_any_ = false;  // whether any is
  StoredShards stored_;
  std::vector<std::uint64_t> expected_;  // by unit
  const std::shared_ptr<Reads> reads_ = std::make_shared<Reads>();

  // mutex_ guards what follows.
  std::mutex mutex_;
  std::vector<std::uint64_t> published_;  // by unit
  std::vector<Question> waiting_;         // reads of versions that are not published yet, or until resume()
  bool paused_ = false;

  RelayedShards relayed_;
  Loans loans_;
  std::optional<PassedShards> passed_;
  std::optional<SerialQueue> published_by_gpu_;  // waits for the GPU, then publishes
};

}  // namespace sluice::engine
