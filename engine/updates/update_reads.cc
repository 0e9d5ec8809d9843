#include <algorithm>

#include "core/bytes.h"
#include "core/error.h"
#include "engine/updates/running_update.h"

// The slots of the pipeline, and how chunks are read into them.
namespace sluice::engine {

void UpdatePipeline::set_lendable(std::span<std::byte> memory, bool with_gradients) {
  const StateFormat& format = states_.format();
  const std::size_t bytes = with_gradients || streams_parameters_
                                ? slot_bytes(format, layout_, streams_parameters_)
                                : round_up(format.most_chunk_bytes(), kDiskBlock);
  const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
  const std::lock_guard lock(mutex_);
  slots_.resize(own_slots_);
  if (own_slots_ == 0 || format.most_chunk_bytes() == 0) return;  // no update is streamed
  for (std::size_t at = round_up(address, kDiskBlock) - address; at + bytes <= memory.size(); at += bytes)
    slots_.push_back({memory.data() + at, at});
}

void UpdatePipeline::lend(std::size_t from) {
  {
    const std::lock_guard lock(mutex_);
    lent_from_ = from;
  }
  issue_reads();
}

void UpdatePipeline::stop_lending() {
  const std::lock_guard lock(mutex_);
  lent_from_ = kOwn;
}

bool UpdatePipeline::uses_before(std::size_t until) const {
  const std::lock_guard lock(mutex_);
  return std::any_of(slots_.begin(), slots_.end(),
                     [&](const Slot& slot) { return slot.position < until && slot.stage != Stage::kFree; });
}

void UpdatePipeline::wait_for_lent() noexcept {
  std::unique_lock lock(mutex_);
  lent_from_ = kOwn;
  changed_.wait(lock, [&] {
    return std::none_of(slots_.begin(), slots_.end(), [](const Slot& slot) {
      return slot.position != kOwn && slot.stage != Stage::kFree && slot.stage != Stage::kReady;
    });
  });
}

bool UpdatePipeline::Slot::is_foreseen() const { return stage != Stage::kFree && !update->decided; }

UpdatePipeline::Running* UpdatePipeline::foreseen(UnitId unit) const {
  const auto found = std::find_if(updates_.begin(), updates_.end(), [&](const auto& running) {
    return !running->decided && running->update.unit == unit;
  });
  return found == updates_.end() ? nullptr : found->get();
}

void UpdatePipeline::foresee(UnitId unit) {
  if (rounds_ > 0 || lendable_slots() == 0 || states_.resident(unit) || foreseen(unit) != nullptr) return;
  auto running = std::make_unique<Running>();
  running->update.unit = unit;
  running->buckets = buckets_of(layout_, optimizer_, states_.format().shards(), unit);
  running->streamed = true;
  {
    const std::lock_guard lock(mutex_);
    updates_.push_back(std::move(running));
  }
  issue_reads();
}

void UpdatePipeline::forget_foreseen() {
  std::unique_lock lock(mutex_);
  for (auto& running : updates_)
    if (!running->decided) running->streamed = false;  // no further read of it begins
  changed_.wait(lock, [&] {
    return std::none_of(slots_.begin(), slots_.end(),
                        [](const Slot& slot) { return slot.stage == Stage::kReading && slot.is_foreseen(); });
  });
  if (error_) std::rethrow_exception(error_);
  for (Slot& slot : slots_) {
    if (!slot.is_foreseen()) continue;
    check_read(slot.update->update.unit, fetches_of(reading_of(slot, read_parts(*slot.update))));
    slot.stage = Stage::kFree;
  }
  std::erase_if(updates_, [](const auto& running) { return !running->decided; });
}

// Runs on the caller's thread and on I/O threads.
void UpdatePipeline::issue_reads() {
  while (const std::optional<Reading> next = next_reading()) read(*next);
}

// Decided updates come first. Foreseen ones never take the pipeline's own slots, and have few reads in
// flight, so that the pager's reads do not queue behind many.
std::optional<UpdatePipeline::Reading> UpdatePipeline::next_reading() {
  const std::lock_guard lock(mutex_);
  if (error_) return std::nullopt;
  for (const bool decided : {true, false}) {
    const auto slot_for = [&](const Running& running) {
      return next_slot([&](const Slot& slot) {
        return slot.stage == Stage::kFree && slot.position >= lent_from_ &&
               (decided || slot.position != kOwn) && slot.of_cpu == states_.by_cpu(running.update.unit);
      });
    };
    const auto may_begin = [&](const auto& u) {
      return u->decided == decided && u->streamed && has_turn_to_read(*u) && may_read(*u) &&
             slot_for(*u).has_value();
    };
    auto waiting = std::ranges::find_if(
        updates_, [&](const auto& u) { return u->update.unit == hurried_ && may_begin(u); });
    if (waiting == updates_.end()) waiting = std::ranges::find_if(updates_, may_begin);
    if (waiting == updates_.end()) continue;
    const auto ahead = std::count_if(slots_.begin(), slots_.end(), [](const Slot& slot) {
      return slot.stage == Stage::kReading && slot.is_foreseen();
    });
    if (!decided && static_cast<std::size_t>(ahead) >= divide_up(own_slots_, 2)) return std::nullopt;
    Running& running = **waiting;
    Slot& free = slots_[*slot_for(running)];
    free.update = &running;
    free.chunk = running.next_read++;
    if (gpu_.work != nullptr) free.turn = ++turns_;
    return begin_reading(free, read_parts(running));
  }
  return std::nullopt;
}

UpdatePipeline::Streamed UpdatePipeline::read_parts(const Running& running) const {
  return {reads_state(running), running.decided && running.update.gradient.data == nullptr,
          running.decided && reads_parameters(running)};
}

UpdatePipeline::Reading UpdatePipeline::begin_reading(Slot& slot, const Streamed& parts) {
  const int reads = (parts.state ? 1 : 0) + (parts.gradient ? 1 : 0) + (parts.parameters ? 1 : 0);
  if (slot.stage != Stage::kReading) slot.reads = 0;
  slot.stage = slot.reads + reads > 0 ? Stage::kReading : Stage::kReady;
  slot.reads += reads;
  under_way_ += reads;
  return reading_of(slot, parts);
}

UpdatePipeline::Reading UpdatePipeline::reading_of(const Slot& slot, const Streamed& parts) const {
  const Update& update = slot.update->update;
  return {
      static_cast<std::size_t>(&slot - slots_.data()),
      slot.chunk,
      update.unit,
      parts,
      {update.gradient_backing, update.gradient_backing_bytes, update.gradient_type, update.whole_gradient},
      {update.parameters_backing, update.parameters_backing_bytes, update.parameters.type,
       update.whole_parameters}};
}

std::vector<UpdatePipeline::Fetch> UpdatePipeline::fetches_of(const Reading& reading) const {
  const StateFormat& format = states_.format();
  const Slot& slot = slots_[reading.slot];
  const ElementRange here = format.shards().here(reading.unit);
  std::vector<Fetch> fetches;
  const auto stream = [&](const Source& source, std::byte* part) {
    const std::size_t size = size_of(source.type);
    // A part of a whole backing is not on disk, so that it need not be whole blocks.
    const bool in_blocks = !source.whole || here.size() == layout_.unit_elements(reading.unit);
    const ElementRange chunk = format.shards().chunk(reading.unit, reading.chunk);
    const std::size_t offset = (chunk.begin - (source.whole ? 0 : here.begin)) * size;
    const std::size_t bytes =
        in_blocks ? round_up(chunk.size() * size, offload::RecordStore::kBlock) : chunk.size() * size;
    fetches.push_back({*source.backing, offset, {part, std::min(bytes, source.bytes - offset)}});
  };
  if (reading.parts.state)
    fetches.push_back({states_.backing(reading.unit),
                       format.chunk_offset(reading.unit, reading.chunk),
                       {slot.data, format.chunk_bytes(reading.unit, reading.chunk)}});
  if (reading.parts.gradient) stream(reading.gradient, gradient_part(slot));
  if (reading.parts.parameters) stream(reading.parameters, parameters_part(slot));
  return fetches;
}

void UpdatePipeline::read(const Reading& reading) {
  const auto done = [this, index = reading.slot](std::exception_ptr error) {
    on_read(index, std::move(error));
  };
  for (const Fetch& fetch : fetches_of(reading)) {
    try {
      fetch.backing.fetch_unchecked(fetch.offset, fetch.bytes, done);
    } catch (...) {
      done(std::current_exception());
    }
  }
}

// Verifies the checksums of what was read, on the threads that will compute with it.
void UpdatePipeline::check_read(UnitId unit, const std::vector<Fetch>& fetches) const {
  for (const Fetch& fetch : fetches)
    fetch.backing.check(fetch.offset, fetch.bytes, executor_of(unit).threads());
}

void UpdatePipeline::on_read(std::size_t index, std::exception_ptr error) {
  bool was_foreseen = false;
  {
    const std::lock_guard lock(mutex_);
    Slot& slot = slots_[index];
    if (error && !error_) error_ = std::move(error);
    was_foreseen = slot.is_foreseen();
    if (--slot.reads == 0) slot.stage = Stage::kReady;
  }
  if (was_foreseen) issue_reads();
  if (slots_[index].of_cpu) give_to_cpu();
  const std::lock_guard lock(mutex_);
  --under_way_;  // comes last, because the destructor waits for it
  changed_.notify_all();
}

void UpdatePipeline::on_written(std::size_t index, std::exception_ptr error) {
  std::function<void()> on_changed;
  {
    const std::lock_guard lock(mutex_);
    if (error && !error_) error_ = std::move(error);
    if (--slots_[index].writes > 0) return;
    Running& running = *slots_[index].update;
    slots_[index].stage = Stage::kFree;
    --running.writes;
    on_changed = take_on_changed(running);
  }
  if (on_changed) on_changed();
  issue_reads();
  const std::lock_guard lock(mutex_);
  --under_way_;  // comes last, because the destructor waits for it
  changed_.notify_all();
}

bool UpdatePipeline::reads_state(const Running& running) const {
  const UnitId unit = running.update.unit;
  const auto round_reads = [&](int round) {
    return optimizer_.reads_state(round) || (states_.has_master(unit) && optimizer_.reads_values(round));
  };
  return !states_.resident(unit) && (running.applies() || round_reads(running.round));
}

bool UpdatePipeline::reads_values(const Running& running) const {
  return optimizer_.reads_values(running.round) && !states_.has_master(running.update.unit);
}

// With masters the application overwrites all of a chunk, unless some of its parameters are not updated, or
// belong to another bucket.
bool UpdatePipeline::reads_parameters(const Running& running) const {
  if (running.update.parameters_backing == nullptr) return false;
  if (!running.applies()) return reads_values(running);
  const auto is_updated = [](const ParameterUpdate& update) { return update.step > 0; };
  return !states_.has_master(running.update.unit) || running.buckets.size() > 1 ||
         !std::ranges::all_of(running.update.parameter_updates, is_updated);
}

// Padding that was not read would otherwise keep the slot's former bytes.
void UpdatePipeline::clear_padding(const Slot& slot) const {
  const Update& update = slot.update->update;
  const std::size_t size = size_of(update.parameters.type);
  const std::span<std::byte> part = fetches_of(reading_of(slot, {.parameters = true})).front().bytes;
  std::size_t end = 0;
  for (const Slice& slice : states_.format().shards().slices(update.unit, slot.chunk)) {
    std::fill(part.begin() + static_cast<std::ptrdiff_t>(end),
              part.begin() + static_cast<std::ptrdiff_t>(slice.in_chunk * size), std::byte{0});
    end = (slice.in_chunk + slice.count) * size;
  }
  std::fill(part.begin() + static_cast<std::ptrdiff_t>(end), part.end(), std::byte{0});
}

// An update that reads its chunks again for each round keeps the slots until it is applied. A pass of a joint
// update reads them once, so that the next pass may read ahead.
bool UpdatePipeline::has_turn_to_read(const Running& running) const {
  if (rounds_ == 0 || may_run(running)) return true;
  for (const auto& before : updates_) {
    if (before.get() == &running) return running.update.pass.has_value();
    if (!before->given() && !before->update.pass) return false;
  }
  return false;
}

// The previous bucket may still write the chunk in which this one begins. And the CPU's executor beside a GPU
// verifies a chunk only when its work runs; until then nothing else may use the chunk's record.
bool UpdatePipeline::may_read(const Running& running) const {
  if (running.given() || running.next_read == running.bucket().end_chunk) return false;
  const auto is_unchecked = [&](const Slot& slot) {
    return slot.of_cpu && (slot.stage == Stage::kReady || slot.stage == Stage::kWorking) &&
           slot.update->update.unit == running.update.unit && slot.chunk == running.next_read;
  };
  if (std::ranges::any_of(slots_, is_unchecked)) return false;
  const bool begins = running.round == 0 && running.next_read == running.bucket().first_chunk;
  return !begins || running.writes == 0;
}

}  // namespace sluice::engine
