#include "engine/updates/update_pipeline.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "core/bytes.h"
#include "core/error.h"
#include "engine/gradients/device_gradients.h"
#include "engine/layout/kind.h"
#include "engine/updates/running_update.h"

namespace sluice::engine {

UpdatePipeline::UpdatePipeline(const Layout& layout, const optim::Optimizer& optimizer, StateStore& states,
                               UpdateExecutor& executor, bool streams_parameters, const UpdatesByGpu& gpu)
    : layout_(layout),
      optimizer_(optimizer),
      states_(states),
      executor_(executor),
      rounds_(optimizer.rounds()),
      streams_parameters_(streams_parameters),
      gpu_(gpu) {}

UpdatePipeline::~UpdatePipeline() {
  std::unique_lock lock(mutex_);
  error_ =
      // No further read begins after an error.
      std::make_exception_ptr(Error(ErrorCode::kState, "the engine is closed"));
  changed_.wait(lock, [&] { return under_way_ == 0; });
  if (gpu_.work != nullptr) gpu_.work->finish();
}

// Parameters come last, with room for the model's widest type.
std::size_t UpdatePipeline::slot_bytes(const StateFormat& format, const Layout& layout,
                                       bool streams_parameters) {
  constexpr std::size_t kBlock = offload::RecordStore::kBlock;
  const std::size_t elements = format.shards().chunk_elements();
  std::size_t widest = 0;
  for (UnitId unit = 0; unit < layout.units().size() && streams_parameters; ++unit)
    widest = std::max(widest, size_of(layout.dtype(unit)));
  return state_part_bytes(format) + round_up(elements * sizeof(float), kBlock) +
         round_up(elements * widest, kBlock);
}

std::size_t UpdatePipeline::state_part_bytes(const StateFormat& format) {
  return round_up(format.most_chunk_bytes(), offload::RecordStore::kBlock);
}

std::size_t UpdatePipeline::cpu_slot_bytes(const StateFormat& format, const Layout& layout,
                                           bool streams_state) {
  return slot_bytes(format, layout, true) - (streams_state ? 0 : state_part_bytes(format));
}

bool UpdatePipeline::cpu_streams_state() const {
  for (UnitId unit = 0; unit < layout_.units().size(); ++unit)
    if (states_.by_cpu(unit) && !states_.resident(unit)) return true;
  return false;
}

void UpdatePipeline::set_slots(allocator::Ledger& ledger, std::size_t slots) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return under_way_ == 0; });
  slots_.clear();
  staging_ = {};  // the old memory is given back before the new is taken
  const std::size_t bytes = slot_bytes(states_.format(), layout_, streams_parameters_);
  staging_ = ComputeRegion(ledger, gpu_.work, allocator::Purpose::kStaging, slots * bytes);
  slots_.resize(own_slots_ = slots);
  for (std::size_t i = 0; i < slots; ++i) {
    slots_[i].data = staging_.data() + i * bytes;
    if (gpu_.work == nullptr) continue;
    // State may arrive from the disk while a gradient arrives from host memory.
    const std::size_t state = state_part_bytes(states_.format());
    if (state > 0) gpu_.work->add({slots_[i].data, state}, state);
    gpu_.work->add({slots_[i].data + state, bytes - state}, bytes - state);
  }
}

void UpdatePipeline::set_cpu_slots(allocator::Ledger& ledger, std::size_t slots) {
  if (slots == 0) return;
  const std::lock_guard lock(mutex_);
  cpu_slots_have_state_ = cpu_streams_state();
  const std::size_t bytes = cpu_slot_bytes(states_.format(), layout_, cpu_slots_have_state_);
  cpu_staging_ = RegisteredRegion(ledger, gpu_.work->device(), allocator::Purpose::kStaging, slots * bytes);
  own_slots_ += cpu_slots_ = slots;
  for (std::size_t i = 0; i < slots; ++i) {
    Slot slot{cpu_staging_.data() + i * bytes};
    slot.of_cpu = true;
    // The GPU uses a slot's gradient and its parameters at different times.
    const std::size_t gradient = static_cast<std::size_t>(parameters_part(slot) - gradient_part(slot));
    gpu_.work->add({gradient_part(slot), gradient}, gradient);
    const std::size_t parameters = static_cast<std::size_t>(slot.data + bytes - parameters_part(slot));
    gpu_.work->add({parameters_part(slot), parameters}, parameters);
    slots_.push_back(slot);
  }
}

std::byte* UpdatePipeline::gradient_part(const Slot& slot) const {
  return slot.data + (slot.of_cpu && !cpu_slots_have_state_ ? 0 : state_part_bytes(states_.format()));
}

std::byte* UpdatePipeline::parameters_part(const Slot& slot) const {
  return gradient_part(slot) +
         round_up(states_.format().shards().chunk_elements() * sizeof(float), offload::RecordStore::kBlock);
}

void UpdatePipeline::add(const Update& update, std::function<void()> on_applied) {
  std::unique_ptr<Running> added;
  Running* running = foreseen(update.unit);
  if (running == nullptr) {
    added = std::make_unique<Running>();
    running = added.get();
    running->buckets = buckets_of(layout_, optimizer_, states_.format().shards(), update.unit);
    running->streamed = !states_.resident(update.unit) || update.gradient.data == nullptr ||
                        update.parameters_backing != nullptr;
    if (update.pass) running->round = update.pass->round;
  }
  if (running->streamed)
    ensure(has_slots(update.unit), "an update must be streamed, and the plan has no staging memory");
  std::vector<Reading> rest;  // what chunks with prefetched state still need
  {
    const std::lock_guard lock(mutex_);
    running->update = update;
    running->on_applied = std::move(on_applied);
    running->decided = true;
    const Streamed parts = {false, update.gradient.data == nullptr, reads_parameters(*running)};
    for (Slot& slot : slots_)
      if ((parts.gradient || parts.parameters) && slot.stage != Stage::kFree && slot.update == running)
        rest.push_back(begin_reading(slot, parts));
    if (added) updates_.push_back(std::move(added));
  }
  for (const Reading& reading : rest) read(reading);
  issue_reads();
}

void UpdatePipeline::hurry(std::optional<UnitId> unit) {
  if (rounds_ > 0) return;
  {
    const std::lock_guard lock(mutex_);
    hurried_ = unit;
  }
  if (gpu_.cpu != nullptr) gpu_.cpu->hurry(unit);
}

bool UpdatePipeline::under_way(UnitId unit) const {
  return std::any_of(updates_.begin(), updates_.end(),
                     [&](const auto& running) { return running->decided && running->update.unit == unit; });
}

bool UpdatePipeline::idle() const {
  return std::none_of(updates_.begin(), updates_.end(), [](const auto& running) { return running->decided; });
}

std::size_t UpdatePipeline::unapplied() const {
  const std::lock_guard lock(mutex_);
  return static_cast<std::size_t>(
      std::count_if(updates_.begin(), updates_.end(), [this](const auto& running) {
        return running->decided && !running->applied() && !by_cpu(running->update.unit);
      }));
}

ChunkWork UpdatePipeline::work_of(const Running& running, std::optional<std::size_t> chunk) const {
  const Update& update = running.update;
  const Bucket& bucket = running.bucket();
  ChunkWork work{update, bucket, running.round, chunk};
  work.begins_round = (!chunk || *chunk == bucket.first_chunk) && (!update.pass || update.pass->first);
  work.ends_round = (!chunk || *chunk + 1 == bucket.end_chunk) && (!update.pass || update.pass->last);
  if (!chunk) return work;
  work.parameters = update.parameters;
  work.first_parameter = update.first_parameter;
  if (states_.resident(update.unit)) work.state = states_.chunk_data(update.unit, *chunk);
  const Shards& shards = states_.format().shards();
  if (update.gradient.data != nullptr)
    work.gradient =
        update.gradient.at(shards.chunk(update.unit, *chunk).begin - shards.here(update.unit).begin);
  return work;
}

void UpdatePipeline::give_slot(std::size_t index) {
  Slot& slot = slots_[index];  // no other thread uses a slot that is ready
  Running& running = *slot.update;
  ChunkWork work = work_of(running, slot.chunk);
  if (work.state == nullptr) work.state = slot.data;
  if (work.gradient.data == nullptr) work.gradient = {gradient_part(slot), running.update.gradient_type};
  const bool streams = running.update.parameters_backing != nullptr;
  bool clears = false;
  if (streams && (running.applies() || reads_parameters(running))) {
    work.parameters = {parameters_part(slot), running.update.parameters.type};
    work.first_parameter = states_.format().shards().chunk(running.update.unit, slot.chunk).begin;
    clears = !reads_parameters(running);
  }
  const auto check = [this, &slot, clears, unit = running.update.unit,
                      fetches = fetches_of(reading_of(slot, read_parts(running)))] {
    check_read(unit, fetches);
    if (clears) clear_padding(slot);
  };
  if (slot.of_cpu)
    work.prepare = [this, work, check] {
      wait_for_gpu(work);
      check();
    };
  else
    check();
  const bool writes = running.applies() && (streams || !states_.resident(running.update.unit));
  {
    const std::lock_guard lock(mutex_);
    slot.stage = Stage::kWorking;
    running.writes += writes ? 1 : 0;
  }
  go_on(running);
  executor_of(running.update.unit).begin(work, [this, &running, index, writes](std::exception_ptr error) {
    on_worked(running, index, writes, std::move(error));
  });
}

std::optional<std::size_t> UpdatePipeline::workable_slot(bool of_cpu) const {
  const std::lock_guard lock(mutex_);
  if (error_) return std::nullopt;
  return next_slot([&](const Slot& slot) { return slot.of_cpu == of_cpu && workable(slot); });
}

// The CPU takes chunks as they arrive, while nobody calls, so this also runs on the threads of transfers and
// works.
bool UpdatePipeline::give_to_cpu() {
  const std::lock_guard in_order(giving_);
  bool gave = false;
  while (const auto slot = workable_slot(true)) {
    give_slot(*slot);
    gave = true;
  }
  return gave;
}

// Gives the executor work that needs no slot: chunks in memory, and rounds of a bucket without elements here,
// since the ranks that have its elements wait for this one to take part.
bool UpdatePipeline::give_without_slots(Running& running) {
  bool gave = false;
  std::unique_lock in_order(giving_, std::defer_lock);
  if (states_.by_cpu(running.update.unit)) in_order.lock();
  while (running.decided && !running.given() && may_run(running)) {
    const bool is_empty = running.bucket().first_chunk == running.bucket().end_chunk;
    if (running.streamed && !is_empty) break;
    ChunkWork work = work_of(running, is_empty ? std::nullopt : std::optional(running.next_work));
    work.goes_on = !is_empty && running.next_work + 1 < running.bucket().end_chunk;
    if (states_.by_cpu(running.update.unit)) work.prepare = [this, work] { wait_for_gpu(work); };
    go_on(running);
    executor_of(running.update.unit).begin(work, [this, &running](std::exception_ptr error) {
      on_worked(running, std::nullopt, false, std::move(error));
    });
    gave = true;
  }
  if (in_order) in_order.unlock();
  if (gave) issue_reads();  // updates that waited for these rounds may read now
  return gave;
}

void UpdatePipeline::go_on(Running& running) {
  const std::lock_guard lock(mutex_);
  ++running.works;
  ++under_way_;
  const Bucket& bucket = running.bucket();
  if (bucket.first_chunk < bucket.end_chunk && ++running.next_work < bucket.end_chunk) return;
  if (running.applies() || running.update.pass) {
    ++running.index;
    running.round = 0;
  } else {
    ++running.round;
  }
  if (!running.given()) running.next_read = running.next_work = running.bucket().first_chunk;
}

void UpdatePipeline::on_worked(Running& running, std::optional<std::size_t> slot, bool writes,
                               std::exception_ptr error) {
  // The slot of a skipped update may lack what only the update writes.
  const bool goes_on =
      !error && writes && !(states_.by_cpu(running.update.unit) && running.update.is_refused());
  {
    const std::lock_guard lock(mutex_);
    if (error && !error_) error_ = std::move(error);
    if (slot) slots_[*slot].stage = goes_on ? Stage::kWriting : Stage::kFree;
    if (writes && !goes_on) --running.writes;
    if (goes_on) ++under_way_;
  }
  if (goes_on) write(*slot);
  if (slot && !goes_on) issue_reads();
  end_work(running);
}

// The update may be destroyed as soon as it has no more works.
void UpdatePipeline::end_work(Running& running) {
  std::function<void()> on_changed;
  {
    const std::lock_guard lock(mutex_);
    --running.works;
    on_changed = take_on_changed(running);
    changed_.notify_all();
  }
  if (on_changed) on_changed();
  const std::lock_guard lock(mutex_);
  --under_way_;  // comes last, because the destructor waits for it
  changed_.notify_all();
}

void UpdatePipeline::write(std::size_t index) {
  const auto done = [this, index](std::exception_ptr error) { on_written(index, std::move(error)); };
  std::vector<Fetch> stores;
  UnitId unit = 0;
  {
    const std::lock_guard lock(mutex_);
    Slot& slot = slots_[index];
    const Update& update = slot.update->update;
    unit = update.unit;
    stores = fetches_of(
        reading_of(slot, {!states_.resident(update.unit), false, update.parameters_backing != nullptr}));
    slot.writes = static_cast<int>(stores.size());
  }
  for (const Fetch& store : stores) {
    try {
      store.backing.store(store.offset, store.bytes, executor_of(unit).threads(), done);
    } catch (...) {
      done(std::current_exception());
    }
  }
}

// Waits until the CPU may read the GPU's check and the chunk's gradient, and may write its parameters.
void UpdatePipeline::wait_for_gpu(const ChunkWork& work) const {
  if (work.update.refused != nullptr)
    gpu_.work->wait(DeviceGradients::memory_of(work.update.refused), DeviceWork::Use::kRead);
  if (!work.chunk) return;
  const std::size_t elements = states_.format().shards().chunk(work.update.unit, *work.chunk).size();
  const auto wait = [&](const void* data, Dtype type, DeviceWork::Use use) {
    if (data != nullptr)
      gpu_.work->wait({static_cast<const std::byte*>(data), elements * size_of(type)}, use);
  };
  wait(work.gradient.data, work.gradient.type, DeviceWork::Use::kRead);
  const std::size_t first = states_.format().shards().chunk(work.update.unit, *work.chunk).begin;
  if (work.parameters.data != nullptr)
    wait(work.parameters.at(first - work.first_parameter).data, work.parameters.type,
         DeviceWork::Use::kWrite);
}

bool UpdatePipeline::may_run(const Running& running) const {
  if (rounds_ == 0) return true;
  const auto first =
      std::find_if(updates_.begin(), updates_.end(), [](const auto& u) { return !u->given(); });
  return first != updates_.end() && first->get() == &running;
}

// Without rounds chunks may be updated in any order; with them, statistics are added in ascending order.
bool UpdatePipeline::workable(const Slot& slot) const {
  return slot.stage == Stage::kReady && slot.update->decided &&
         (rounds_ == 0 || (slot.chunk == slot.update->next_work && may_run(*slot.update)));
}

bool UpdatePipeline::needs_parameters(UnitId unit, const std::optional<Pass>& pass) const {
  return !pass || pass->round == rounds_ ||
         (optimizer_.reads_values(pass->round) && !states_.has_master(unit));
}

// Streamed parameters may be read only when their backing has them.
bool UpdatePipeline::is_written(const Running& running) const {
  return running.applied() && (running.update.parameters_backing == nullptr || running.writes == 0);
}

// What the caller must call now, without the lock, since the parameters have changed; else null.
std::function<void()> UpdatePipeline::take_on_changed(Running& running) const {
  if (!is_written(running) || error_) return nullptr;
  return std::exchange(running.update.on_changed, nullptr);
}

bool UpdatePipeline::finish_applied() {
  const auto is_applied = [this](const Running& running) {
    const std::lock_guard lock(mutex_);
    return is_written(running) && !error_;
  };
  bool reported = false;
  for (auto& running : updates_) {
    if (running->reported || !is_applied(*running)) continue;
    running->reported = reported = true;
    running->on_applied();
  }
  const std::lock_guard lock(mutex_);
  // The write that has just ended may be the one that failed.
  if (error_) std::rethrow_exception(error_);
  return std::erase_if(updates_, [](const auto& running) { return running->done(); }) > 0 || reported;
}

// An update that is applied is reported before a later one is given: where ranks gather what has changed, one
// of them may wait for that before it has memory for the later update, whose sums the others would wait for.
bool UpdatePipeline::pump() {
  const auto give_some = [this] {
    for (auto& running : updates_)
      if (give_without_slots(*running)) return true;
    if (cpu_slots_ > 0 && give_to_cpu()) return true;
    const auto slot = workable_slot(false);
    if (slot) give_slot(*slot);
    return slot.has_value();
  };
  bool worked = false;
  for (; give_some(); worked = true) finish_applied();
  return finish_applied() || worked;
}

bool UpdatePipeline::reading() const {
  const std::lock_guard lock(mutex_);
  return std::any_of(slots_.begin(), slots_.end(),
                     [](const Slot& slot) { return slot.stage == Stage::kReading; });
}

bool UpdatePipeline::has_work() const {
  return std::any_of(slots_.begin(), slots_.end(), [this](const Slot& slot) { return workable(slot); }) ||
         std::any_of(updates_.begin(), updates_.end(),
                     [this](const auto& u) { return u->done() || (is_written(*u) && !u->reported); });
}

void UpdatePipeline::wait(std::size_t lent_until) {
  std::unique_lock lock(mutex_);
  const auto is_lent = [&](const Slot& slot) {
    return slot.position < lent_until && slot.stage != Stage::kFree;
  };
  changed_.wait(lock, [&] {
    return error_ || under_way_ == 0 || has_work() ||
           (lent_until > 0 && std::none_of(slots_.begin(), slots_.end(), is_lent));
  });
  if (error_) std::rethrow_exception(error_);
}

}  // namespace sluice::engine
