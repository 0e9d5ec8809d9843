#include "engine/step/update_pipeline.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "core/bytes.h"
#include "core/error.h"
#include "engine/kind.h"
#include "engine/step/running_update.h"

namespace sluice::engine {

// Counts the arithmetic of an update while it lives.
class UpdatePipeline::Timer {
 public:
  Timer(UpdatePipeline& pipeline, const Update& update)
      : pipeline_(pipeline), name_(pipeline.layout_.units()[update.unit].name) {}
  ~Timer() {
    const auto end = Trace::Clock::now();
    pipeline_.seconds_ += std::chrono::duration<double>(end - start_).count();
    if (Trace* trace = pipeline_.tools_.trace; trace != nullptr)
      trace->add(Trace::Lane::kOptimizer, name_, start_, end);
  }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

 private:
  UpdatePipeline& pipeline_;
  const std::string& name_;
  const Trace::Clock::time_point start_ = Trace::Clock::now();
};

UpdatePipeline::UpdatePipeline(const Layout& layout, const optim::Optimizer& optimizer, StateStore& states,
                               const WholeStore& wholes, const Tools& tools)
    : layout_(layout),
      optimizer_(optimizer),
      states_(states),
      wholes_(wholes),
      rounds_(optimizer.rounds()),
      tools_(tools) {}

UpdatePipeline::~UpdatePipeline() {
  std::unique_lock lock(mutex_);
  error_ =
      std::make_exception_ptr(Error(ErrorCode::kState, "the engine is closed"));  // no further reads begin
  changed_.wait(lock, [&] { return transfers_ == 0; });
}

std::size_t UpdatePipeline::slot_bytes(const StateFormat& format) {
  return round_up(format.most_chunk_bytes(), offload::RecordStore::kBlock) +
         round_up(format.chunk_elements() * sizeof(float), offload::RecordStore::kBlock);
}

void UpdatePipeline::start(allocator::Ledger& ledger, std::size_t slots) {
  set_slots(ledger, slots);
  round_memory_ =
      allocator::Region(ledger, allocator::Purpose::kWorkspace, rounds_need(layout_, optimizer_).bytes);
}

void UpdatePipeline::set_slots(allocator::Ledger& ledger, std::size_t slots) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return transfers_ == 0; });
  slots_.clear();
  staging_ = {};  // before the next is taken
  const std::size_t bytes = slot_bytes(states_.format());
  staging_ = allocator::Region(ledger, allocator::Purpose::kStaging, slots * bytes);
  slots_.resize(own_slots_ = slots);
  for (std::size_t i = 0; i < slots; ++i) slots_[i].data = staging_.data() + i * bytes;
}

std::byte* UpdatePipeline::gradient_part(const Slot& slot) const {
  return slot.data + round_up(states_.format().most_chunk_bytes(), offload::RecordStore::kBlock);
}

void UpdatePipeline::add(const Update& update, std::function<void()> on_applied) {
  std::unique_ptr<Running> added;
  Running* running = foreseen(update.unit);
  if (running == nullptr) {
    added = std::make_unique<Running>();
    running = added.get();
    running->batches = batches_of(layout_, optimizer_, update.unit, states_.format().chunk_elements());
    running->streamed = !states_.resident(update.unit) || update.gradient.data == nullptr;
    if (update.pass) running->round = update.pass->round;
  }
  if (running->streamed)
    ensure(own_slots_ > 0, "the plan has no staging memory, and an update must be streamed");
  std::vector<Reading> gradients;  // of chunks whose state was read ahead
  {
    const std::lock_guard lock(mutex_);
    running->update = update;
    running->on_applied = std::move(on_applied);
    running->decided = true;
    for (Slot& slot : slots_)
      if (update.gradient.data == nullptr && slot.stage != Stage::kFree && slot.update == running)
        gradients.push_back(begin_reading(slot, false, true));
    if (added) updates_.push_back(std::move(added));
  }
  for (const Reading& reading : gradients) read(reading);
  issue_reads();
}

bool UpdatePipeline::under_way(UnitId unit) const {
  return std::any_of(updates_.begin(), updates_.end(),
                     [&](const auto& running) { return running->decided && running->update.unit == unit; });
}

bool UpdatePipeline::idle() const {
  return std::none_of(updates_.begin(), updates_.end(), [](const auto& running) { return running->decided; });
}

std::size_t UpdatePipeline::unapplied() const {
  return static_cast<std::size_t>(std::count_if(updates_.begin(), updates_.end(), [](const auto& running) {
    return running->decided && !running->applied();
  }));
}

void UpdatePipeline::apply_ready_slot(std::size_t index) {
  Slot& slot = slots_[index];  // nobody else touches a slot that is ready
  Running& running = *slot.update;
  const Update& update = running.update;
  const bool on_disk = !states_.resident(update.unit);
  std::byte* state = on_disk ? slot.data : states_.chunk_data(update.unit, slot.chunk);
  const ConstArray gradient = update.gradient.data != nullptr
                                  ? update.gradient.at(slot.chunk * states_.format().chunk_elements())
                                  : ConstArray{gradient_part(slot), update.gradient_type};
  check(slot);
  work_on_chunk(running, slot.chunk, state, gradient);
  const bool writes = on_disk && running.applies();
  {
    const std::lock_guard lock(mutex_);
    slot.stage = writes ? Stage::kWriting : Stage::kFree;
    if (writes) {
      ++running.writes;
      ++transfers_;
    }
  }
  finish_chunk(running);
  if (!writes) return issue_reads();
  const auto done = [this, index](std::exception_ptr error) { on_written(index, std::move(error)); };
  const StateFormat& format = states_.format();
  try {
    states_.backing(update.unit)
        .store(format.chunk_offset(update.unit, slot.chunk),
               {slot.data, format.chunk_bytes(update.unit, slot.chunk)}, tools_.threads, done);
  } catch (...) {
    done(std::current_exception());
  }
}

bool UpdatePipeline::apply_in_memory(Running& running) {
  if (running.streamed || running.applied() || !may_run(running)) return false;
  while (!running.applied()) {
    const std::size_t chunk = running.next_work;
    work_on_chunk(running, chunk, states_.chunk_data(running.update.unit, chunk),
                  running.update.gradient.at(chunk * states_.format().chunk_elements()));
    finish_chunk(running);
  }
  issue_reads();  // of those that waited for its rounds
  return true;
}

bool UpdatePipeline::may_run(const Running& running) const {
  if (rounds_ == 0) return true;
  const auto first =
      std::find_if(updates_.begin(), updates_.end(), [](const auto& u) { return !u->applied(); });
  return first != updates_.end() && first->get() == &running;
}

// Elements may be updated in any order; statistics have one.
bool UpdatePipeline::workable(const Slot& slot) const {
  return slot.stage == Stage::kReady && slot.update->decided &&
         (rounds_ == 0 || (slot.chunk == slot.update->next_work && may_run(*slot.update)));
}

bool UpdatePipeline::needs_parameters(UnitId unit, const std::optional<Pass>& pass) const {
  return !pass || pass->round == rounds_ ||
         (optimizer_.reads_values(pass->round) && !states_.has_master(unit));
}

void UpdatePipeline::finish_chunk(Running& running) {
  const bool last = running.next_work + 1 == running.batch().end_chunk;
  if (last && !running.applies() && running.ends_round()) combine(running);
  const std::lock_guard lock(mutex_);
  ++running.next_work;
  if (last) next_pass(running);
}

void UpdatePipeline::next_pass(Running& running) const {
  if (running.applies() || running.update.pass) {
    ++running.index;
    running.round = 0;
  } else {
    ++running.round;
  }
  if (!running.applied()) running.next_read = running.next_work = running.batch().first_chunk;
}

void UpdatePipeline::combine(const Running& running) {
  const Timer timer(*this, running.update);
  const Update& update = running.update;
  const std::vector<optim::Whole> wholes = wholes_of(running.batch());
  for (ParameterId p = running.batch().first; p < running.batch().end; ++p) {
    const optim::Whole& whole = wholes[p - running.batch().first];
    if (has_step(update, p) && optimizer_.has_rounds(whole.kind))
      optimizer_.combine(tools_.threads, tools_.products, running.round, hyperparameters_of(update, p),
                         whole);
  }
}

bool UpdatePipeline::has_step(const Update& update, ParameterId parameter) const {
  return update.parameter_updates[parameter - layout_.first_parameter(update.unit)].step > 0;
}

std::vector<optim::Whole> UpdatePipeline::wholes_of(const Batch& batch) const {
  std::vector<optim::Whole> wholes;
  std::byte* scratch = round_memory_.data();
  std::byte* const workspace = scratch + batch.scratch_bytes;
  for (ParameterId p = batch.first; p < batch.end; ++p) {
    const optim::Kind kind = kind_of(layout_.spec(p));
    wholes.push_back({kind, wholes_.data(p), reinterpret_cast<double*>(scratch), workspace});
    scratch += scratch_bytes(optimizer_, kind);
  }
  return wholes;
}

optim::Hyperparameters UpdatePipeline::hyperparameters_of(const Update& update, ParameterId parameter) const {
  const ParameterUpdate& own = update.parameter_updates[parameter - layout_.first_parameter(update.unit)];
  optim::Hyperparameters hyperparameters = update.groups[layout_.spec(parameter).group];
  hyperparameters.step = own.step;
  hyperparameters.gradient_factor *= own.gradient_factor;
  return hyperparameters;
}

// The part of a parameter that lies in a chunk; it may be empty.
optim::Span UpdatePipeline::span_of(const Update& update, ParameterId parameter, std::size_t chunk,
                                    std::byte* state, ConstArray gradient) const {
  const StateFormat& format = states_.format();
  const std::size_t begin = chunk * format.chunk_elements();
  const std::size_t elements = format.chunk_size(update.unit, chunk);
  const Layout::Place& place = layout_.place(parameter);
  const std::size_t from = std::max(begin, place.offset);
  const std::size_t to = std::min(begin + elements, place.offset + place.elements);
  optim::Span span;
  if (from >= to) return span;
  const auto part = [&](std::size_t array) {
    if (!format.has(array, parameter)) return optim::StatePart{};
    return format.part(state, update.unit, chunk, array, from - begin);
  };
  span.count = to - from;
  span.first_index = layout_.spec(parameter).span_first + from - place.offset;
  span.parameter_index = layout_.logical_index(parameter);
  const Array values = update.parameters.data != nullptr ? update.parameters.at(from) : update.parameters;
  if (values.type != Dtype::kF32) span.parameter = values;
  if (format.has_master(update.unit))
    span.master = part(0).values.f32();
  else if (values.type == Dtype::kF32)
    span.master = values.f32();
  span.gradient = gradient.at(from - begin);
  for (std::size_t a = format.masters(); a < format.arrays(); ++a) span.state.push_back(part(a));
  return span;
}

// Cuts the chunk at the borders of parameters and gives the optimizer each part.
void UpdatePipeline::work_on_chunk(Running& running, std::size_t chunk, std::byte* state,
                                   ConstArray gradient) {
  const Timer timer(*this, running.update);
  const Update& update = running.update;
  const Batch& batch = running.batch();
  const std::vector<optim::Whole> wholes = wholes_of(batch);
  if (running.begins_rounds() && chunk == batch.first_chunk && batch.scratch_bytes > 0)
    std::memset(round_memory_.data(), 0, batch.scratch_bytes);
  for (ParameterId p = batch.first; p < batch.end; ++p) {
    if (!has_step(update, p)) continue;
    optim::Span span = span_of(update, p, chunk, state, gradient);
    if (span.count == 0) continue;
    span.whole = wholes[p - batch.first];
    if (running.applies())
      optimizer_.apply(tools_.threads, hyperparameters_of(update, p), span);
    else if (optimizer_.has_rounds(span.whole.kind))
      optimizer_.statistics(tools_.threads, running.round, hyperparameters_of(update, p), span);
  }
}

void UpdatePipeline::finish_applied() {
  for (auto& running : updates_) {
    if (running->reported || !running->applied()) continue;
    running->reported = true;
    running->on_applied();
  }
  const std::lock_guard lock(mutex_);
  if (error_) std::rethrow_exception(error_);  // the write that has just ended may be the one that failed
  std::erase_if(updates_, [](const auto& running) { return running->done(); });
}

bool UpdatePipeline::pump() {
  bool worked = false;
  for (auto& running : updates_) worked |= apply_in_memory(*running);
  while (true) {
    std::size_t index = slots_.size();
    {
      const std::lock_guard lock(mutex_);
      if (error_) std::rethrow_exception(error_);
      const auto ready =
          std::find_if(slots_.begin(), slots_.end(), [this](const Slot& slot) { return workable(slot); });
      index = static_cast<std::size_t>(ready - slots_.begin());
    }
    if (index == slots_.size()) break;
    apply_ready_slot(index);
    worked = true;
  }
  const std::size_t before = updates_.size();
  finish_applied();
  return worked || updates_.size() != before;
}

bool UpdatePipeline::reading() const {
  const std::lock_guard lock(mutex_);
  return std::any_of(slots_.begin(), slots_.end(),
                     [](const Slot& slot) { return slot.stage == Stage::kReading; });
}

bool UpdatePipeline::has_work() const {
  return std::any_of(slots_.begin(), slots_.end(), [this](const Slot& slot) { return workable(slot); }) ||
         std::any_of(updates_.begin(), updates_.end(), [](const auto& u) { return u->done(); });
}

void UpdatePipeline::wait(std::size_t lent_until) {
  std::unique_lock lock(mutex_);
  const auto is_lent = [&](const Slot& slot) {
    return slot.position < lent_until && slot.stage != Stage::kFree;
  };
  changed_.wait(lock, [&] {
    return error_ || transfers_ == 0 || has_work() ||
           (lent_until > 0 && std::none_of(slots_.begin(), slots_.end(), is_lent));
  });
  if (error_) std::rethrow_exception(error_);
}

}  // namespace sluice::engine
