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
#include "engine/layout/layout.h"
#include "engine/memory/compute_region.h"
#include "engine/memory/host_records.h"
#include "engine/memory/state_store.h"
#include "engine/updates/buckets.h"
#include "engine/updates/update_executor.h"
#include "optim/optimizer.h"

namespace sluice::engine {

// For a GPU: slots are in its memory, and the units that the CPU updates (StateStore::by_cpu()) have an
// executor of their own, with slots in host memory. cpu: null where there are none.
struct UpdatesByGpu {
  DeviceWork* work = nullptr;
  UpdateExecutor* cpu = nullptr;
};

// Streams updates in chunks through a fixed pool of staging slots: while chunk k is updated, k + 1 is read
// and k - 1 is written. The I/O threads begin each transfer when the one before it ends; pump() gives chunks
// that have arrived to the executor. A client may lend memory that it does not need for a while; the state of
// units that will be updated soon is then prefetched into it, before the update itself is known. Where the
// optimizer has rounds, an update takes one bucket of parameters after another: it reads the bucket's chunks
// once for each round, in ascending order, and once more to apply it. Such updates run one after another,
// because there is memory for the rounds of one. Each pass of a joint update is an update here; passes come
// in the order of passes_of(), with no other update between them. Thread rule: one thread calls the public
// functions.
class UpdatePipeline {
 public:
  // All arguments outlive it. streams_parameters: see set_streams_parameters(). gpu: with nulls where the CPU
  // computes.
  UpdatePipeline(const Layout& layout, const optim::Optimizer& optimizer, StateStore& states,
                 UpdateExecutor& executor, bool streams_parameters = false, const UpdatesByGpu& gpu = {});
  ~UpdatePipeline();  // waits for transfers
  UpdatePipeline(const UpdatePipeline&) = delete;
  UpdatePipeline& operator=(const UpdatePipeline&) = delete;

  static std::size_t slot_bytes(const StateFormat& format, const Layout& layout, bool streams_parameters);
  // The bytes of a slot for the CPU beside a GPU. streams_state: some units that it updates have state on
  // disk.
  static std::size_t cpu_slot_bytes(const StateFormat& format, const Layout& layout, bool streams_state);
  // Whether the unit's update, or this pass of it, reads or writes parameters.
  bool needs_parameters(UnitId unit, const std::optional<Pass>& pass) const;

  // Whether the CPU updates the unit, where a GPU computes with it.
  bool by_cpu(UnitId unit) const { return states_.by_cpu(unit); }

  // Takes or gives back staging memory to have `slots` slots. REQUIRES: the pipeline is idle, and nothing is
  // lent.
  void set_slots(allocator::Ledger& ledger, std::size_t slots);
  // Takes host memory for the CPU's slots, once, after set_slots().
  void set_cpu_slots(allocator::Ledger& ledger, std::size_t slots);
  // Whether slots also have room for parameters, which some updates stream. Call before set_slots().
  void set_streams_parameters(bool streams) { streams_parameters_ = streams; }

  // pump() calls on_applied once, when the update no longer needs parameters and gradient, and has written
  // the parameters that it streams. REQUIRES: no update of that unit is in progress.
  void add(const Update& update, std::function<void()> on_applied);
  // Chunks of this unit, if any, come before those of others, unless the optimizer has rounds.
  void hurry(std::optional<UnitId> unit);
  bool under_way(UnitId unit) const;  // including its last transfers
  bool idle() const;                  // no update is in progress
  bool on_gpu() const { return gpu_.work != nullptr; }
  // How many updates still need parameters and gradient, without those of the CPU beside a GPU.
  std::size_t unapplied() const;

  // Sets the memory that the client will lend. with_gradients: some updates in it also stream their gradient.
  // The memory stays valid until no transfer uses it. REQUIRES: the pipeline is idle.
  void set_lendable(std::span<std::byte> memory, bool with_gradients);
  std::size_t lendable_slots() const { return slots_.size() - own_slots_; }
  void lend(std::size_t from);  // lends the bytes from this offset on
  void stop_lending();  // begins no transfer into it any more; chunks in it stay until they are written
  bool uses_before(std::size_t until) const;  // whether any lent byte before this offset is in use
  void wait_for_lent() noexcept;              // until no transfer uses lent memory
  // Begins to prefetch the unit's state into lent memory. The update itself comes with add(), and uses what
  // was read. Does nothing where the optimizer has rounds, or the state is in memory. REQUIRES: no update of
  // the unit is in progress.
  void foresee(UnitId unit);
  void forget_foreseen();  // drops foreseen updates that were not added; waits for their reads

  // Gives the executor every chunk that has arrived. Returns false if there was nothing to do. Throws the
  // first error of a transfer or of the executor.
  bool pump();
  bool reading() const;  // whether a read is in flight
  // Waits until pump() has something to do, nothing is in flight, or no lent byte before lent_until is in
  // use.
  void wait(std::size_t lent_until = 0);

  // The staging memory of the device that computes, which others may use while the pipeline is idle.
  std::size_t slots() const { return own_slots_ - cpu_slots_; }
  std::byte* slot(std::size_t index) const { return slots_[index].data; }
  // Room for a chunk of f32, behind the state's part of a slot. REQUIRES: slots() > 0.
  float* scratch() const { return reinterpret_cast<float*>(gradient_part(slots_.front())); }
  // Room for a chunk of parameters in that slot. REQUIRES: parameters are streamed.
  std::byte* parameters(std::size_t index) const { return parameters_part(slots_[index]); }

 private:
  struct Running;
  enum class Stage : std::uint8_t { kFree, kReading, kReady, kWorking, kWriting };
  static constexpr std::size_t kOwn = SIZE_MAX;
  struct Slot {
    std::byte* data = nullptr;
    std::size_t position = kOwn;  // its offset in the lent memory; kOwn: the slot is not lent
    bool of_cpu = false;          // in host memory, while a GPU computes
    Stage stage = Stage::kFree;
    Running* update = nullptr;
    std::size_t chunk = 0;
    int reads = 0, writes = 0;  // in flight
    std::uint64_t turn = 0;     // on a GPU: the serial number of its last chunk
    bool is_foreseen() const;
  };
  // The parts of a chunk that are read into a slot, or written from it.
  struct Streamed {
    bool state = false, gradient = false, parameters = false;
  };
  // A streamed part: all of what this rank has of it, or, with `whole`, of the unit.
  struct Source {
    Backing* backing;
    std::size_t bytes;
    Dtype type;
    bool whole;
  };
  struct Reading {
    std::size_t slot, chunk;
    UnitId unit;
    Streamed parts;
    Source gradient, parameters;
  };

  void issue_reads();
  std::optional<Reading> next_reading();
  Reading begin_reading(Slot& slot, const Streamed& parts);
  Reading reading_of(const Slot& slot, const Streamed& parts) const;
  Streamed read_parts(const Running& update) const;
  struct Fetch {
    Backing& backing;
    std::size_t offset;
    std::span<std::byte> bytes;
  };
  std::vector<Fetch> fetches_of(const Reading& reading) const;
  void read(const Reading& reading);
  void check_read(UnitId unit, const std::vector<Fetch>& fetches) const;
  Running* foreseen(UnitId unit) const;
  void on_read(std::size_t slot_index, std::exception_ptr error);
  void on_written(std::size_t slot_index, std::exception_ptr error);
  // Returns the wanted slot that got its chunk first, on a GPU: work that is queued there makes its slot free
  // for the caller at once, so that the first slot would get every chunk, and each would come in only after
  // the one before went out. On the CPU returns the first wanted slot, which is seldom lent.
  template <class IsWanted>
  std::optional<std::size_t> next_slot(const IsWanted& is_wanted) const {
    std::optional<std::size_t> next;
    for (std::size_t i = 0; i < slots_.size(); ++i)
      if (is_wanted(slots_[i]) && (!next || slots_[i].turn < slots_[*next].turn)) next = i;
    return next;
  }
  std::optional<std::size_t> workable_slot(bool of_cpu) const;
  void give_slot(std::size_t slot_index);
  bool give_to_cpu();
  bool give_without_slots(Running& update);
  ChunkWork work_of(const Running& update, std::optional<std::size_t> chunk) const;
  void go_on(Running& update);
  void on_worked(Running& update, std::optional<std::size_t> slot_index, bool writes,
                 std::exception_ptr error);
  void end_work(Running& running);
  void write(std::size_t slot_index);
  bool may_run(const Running& update) const;
  bool has_turn_to_read(const Running& update) const;
  bool may_read(const Running& update) const;
  bool reads_state(const Running& update) const;
  bool reads_values(const Running& update) const;
  bool reads_parameters(const Running& update) const;
  bool is_written(const Running& update) const;
  std::function<void()> take_on_changed(Running& update) const;
  void clear_padding(const Slot& slot) const;
  UpdateExecutor& executor_of(UnitId unit) const { return states_.by_cpu(unit) ? *gpu_.cpu : executor_; }
  bool has_slots(UnitId unit) const { return (states_.by_cpu(unit) ? cpu_slots_ : slots()) > 0; }
  void wait_for_gpu(const ChunkWork& work) const;
  bool workable(const Slot& slot) const;
  bool has_work() const;
  bool finish_applied();
  static std::size_t state_part_bytes(const StateFormat& format);
  bool cpu_streams_state() const;
  std::byte* gradient_part(const Slot& slot) const;
  std::byte* parameters_part(const Slot& slot) const;

  const Layout& layout_;
  const optim::Optimizer& optimizer_;
  StateStore& states_;
  UpdateExecutor& executor_;
  const int rounds_;
  bool streams_parameters_;
  const UpdatesByGpu gpu_;
  ComputeRegion staging_;
  RegisteredRegion cpu_staging_;
  std::size_t own_slots_ = 0,
              cpu_slots_ = 0;  // the first slots are the pipeline's own, the last of them the CPU's
  bool cpu_slots_have_state_ = false;

  std::mutex giving_;  // held while the CPU's executor beside a GPU gets works, which are in order
  // mutex_ guards what follows, which the I/O threads use, too.
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Slot> slots_;
  std::uint64_t turns_ = 0;       // see Slot::turn
  std::size_t lent_from_ = kOwn;  // slots from this position on may be used
  std::deque<std::unique_ptr<Running>> updates_;
  std::optional<UnitId> hurried_;
  std::exception_ptr error_;
  int under_way_ = 0;  // transfers and works
};

}  // namespace sluice::engine
