#pragma once
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "allocator/memory.h"
#include "core/threads.h"
#include "core/trace.h"
#include "engine/layout.h"
#include "engine/step/batches.h"
#include "engine/step/update_executor.h"
#include "engine/store/state_store.h"
#include "optim/optimizer.h"

namespace sluice::engine {

// Streams updates in chunks through a fixed pool of staging slots: while chunk k is updated, k + 1 is read
// and k - 1 is written. Transfers chain on the I/O threads; pump() gives what has arrived to the executor.
// A client may lend memory that it does not need for a while: what is known to be updated soon is read ahead
// into it, before the update itself is known.
// Where the optimizer has rounds, an update goes over its batches of parameters, one after another: it reads
// a batch's chunks once for each round, in ascending order, and once to apply it. Such updates follow one
// another: what the rounds hand on is there once. Of an update that units have together each pass is one
// here, and they come in the order of passes_of(), with nothing between them. Thread rule: the public
// functions from one thread.
class UpdatePipeline {
 public:
  // They outlive it.
  UpdatePipeline(const Layout& layout, const optim::Optimizer& optimizer, StateStore& states,
                 UpdateExecutor& executor);
  ~UpdatePipeline();  // waits for transfers
  UpdatePipeline(const UpdatePipeline&) = delete;
  UpdatePipeline& operator=(const UpdatePipeline&) = delete;

  static std::size_t slot_bytes(const StateFormat& format);
  // Whether that pass over the unit looks at parameters, or writes them.
  bool needs_parameters(UnitId unit, const std::optional<Pass>& pass) const;

  // Takes the staging memory, or gives some back. Before the first update with a streamed part.
  // REQUIRES: idle, and nothing is lent.
  void set_slots(allocator::Ledger& ledger, std::size_t slots);

  // on_applied: called once from pump(), when parameters and gradient are no longer needed by the update.
  // REQUIRES: no update of that unit is under way.
  void add(const Update& update, std::function<void()> on_applied);
  bool under_way(UnitId unit) const;  // its transfers included
  bool idle() const;                  // no update is
  std::size_t unapplied() const;      // updates under way that still need parameters and gradient

  // The memory that will be lent. with_gradients: some of those are streamed, too. It stays until nothing of
  // it is used any more. REQUIRES: idle.
  void set_lendable(std::span<std::byte> memory, bool with_gradients);
  std::size_t lendable_slots() const { return slots_.size() - own_slots_; }
  void lend(std::size_t from);  // its bytes from there on
  void stop_lending();          // nothing goes there any more; what is there stays until it was written
  bool uses_before(std::size_t until) const;
  void wait_for_lent() noexcept;  // until no transfer uses it
  // Begins to read the unit's state into what is lent: its update will come by add(), which goes on with it.
  // For optimizers without rounds. Nothing happens where the state is in memory.
  // REQUIRES: no update of the unit is under way.
  void foresee(UnitId unit);
  void forget_foreseen();  // those that did not come; waits for their reads

  // Gives the executor all that has arrived. Returns false where nothing could be done. Throws the error of a
  // transfer, or of the executor's.
  bool pump();
  bool reading() const;  // else what is under way is written
  // Waits until pump() can do something, or everything has ended, or nothing lent before that byte is used.
  void wait(std::size_t lent_until = 0);

  // The staging memory, for other streams while the pipeline is idle.
  std::size_t slots() const { return own_slots_; }
  std::byte* slot(std::size_t index) const { return slots_[index].data; }
  // Beside what slots take of the state: a chunk of f32. REQUIRES: slots() > 0.
  float* scratch() const { return reinterpret_cast<float*>(gradient_part(slots_.front())); }

 private:
  struct Running;
  enum class Stage : std::uint8_t { kFree, kReading, kReady, kWorking, kWriting };
  static constexpr std::size_t kOwn = SIZE_MAX;
  struct Slot {
    std::byte* data = nullptr;
    std::size_t position = kOwn;  // in the memory that is lent
    Stage stage = Stage::kFree;
    Running* update = nullptr;
    std::size_t chunk = 0;
    int reads = 0;  // under way
    bool is_foreseen() const;
  };
  struct Reading {  // into a slot
    std::size_t slot, chunk;
    UnitId unit;
    bool state, gradient;
    Backing* gradient_backing;
    Dtype gradient_type;
  };

  void issue_reads();
  std::optional<Reading> next_reading();
  Reading begin_reading(Slot& slot, bool state, bool gradient);
  Reading reading_of(const Slot& slot, bool state, bool gradient) const;
  struct Piece {
    Backing& backing;
    std::size_t offset;
    std::span<std::byte> bytes;
  };
  std::vector<Piece> pieces_of(const Reading& reading) const;
  void read(const Reading& reading);
  void check(const Slot& slot) const;
  Running* foreseen(UnitId unit) const;
  void on_read(std::size_t slot_index, std::exception_ptr error);
  void on_written(std::size_t slot_index, std::exception_ptr error);
  void give_slot(std::size_t slot_index);
  bool give_without_slots(Running& update);
  ChunkWork work_of(const Running& update, std::optional<std::size_t> chunk) const;
  void go_on(Running& update);
  void on_worked(Running& update, std::optional<std::size_t> slot_index, bool writes,
                 std::exception_ptr error);
  void write(std::size_t slot_index);
  bool may_run(const Running& update) const;
  bool has_turn_to_read(const Running& update) const;
  bool may_read(const Running& update) const;
  bool reads_state(const Running& update) const;
  bool workable(const Slot& slot) const;
  bool has_work() const;
  bool finish_applied();
  std::byte* gradient_part(const Slot& slot) const;

  const Layout& layout_;
  const optim::Optimizer& optimizer_;
  StateStore& states_;
  UpdateExecutor& executor_;
  const int rounds_;
  allocator::Region staging_;
  std::size_t own_slots_ = 0;  // the first ones

  // Shared with the I/O threads.
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Slot> slots_;
  std::size_t lent_from_ = kOwn;  // slots with this position or a later one may be taken
  std::deque<std::unique_ptr<Running>> updates_;
  std::exception_ptr error_;
  int under_way_ = 0;  // transfers and works
};

}  // namespace sluice::engine
