#include "engine/updates/update_queue.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace sluice::engine {
namespace {

// One update is applied while the next one is read.
constexpr std::size_t kRunning = 2;

}  // namespace

UpdateQueue::UpdateQueue(const Layout& layout, const optim::Optimizer& optimizer, Pager& pager,
                         Gradients& gradients, UpdatePipeline& pipeline, Waits& waits,
                         const std::vector<HoldingId>& parameters, const Parts& parts)
    : layout_(layout),
      optimizer_(optimizer),
      pager_(pager),
      gradients_(gradients),
      pipeline_(pipeline),
      waits_(waits),
      parameters_(parameters),
      parts_(parts),
      ordered_(parts.ranks != nullptr && (optimizer.rounds() > 0 || parts.on_gpu != nullptr)),
      phases_(layout.units().size(), Phase::kCurrent),
      due_(layout.units().size()) {}

void UpdateQueue::add(UnitRange units, std::vector<Due> due) {
  for (UnitId unit = units.first; unit < units.end; ++unit) {
    phases_[unit] = Phase::kWaiting;
    due_[unit] = std::move(due[unit - units.first]);
    if (parts_.on_gpu != nullptr && is_gathered(unit)) to_gather_.push_back(unit);
  }
  if (units.size() == 1) waiting_.push_back({units.first});
  for (const auto& [unit, pass] : passes_of(optimizer_, units)) waiting_.push_back({unit, pass});
}

bool UpdateQueue::start(const Task& task, bool wait) {
  const UnitId unit = task.unit;
  if (pipeline_.under_way(unit) || (starting_ && (task.pass || *starting_ == task))) return false;
  const HoldingId values = parameters_[unit];
  const HoldingId gradient = gradients_.holding(unit, 0);
  const bool applies = !task.pass || task.pass->round == optimizer_.rounds();
  const Pager::Use use = applies ? Pager::Use::kModify : Pager::Use::kRead;
  const auto bring_in = [&](HoldingId holding, Pager::Use as) {
    if (!wait) return pager_.try_acquire(holding, as);
    starting_ = task;
    pager_.acquire(holding, as);
    starting_.reset();
    return true;
  };
  Pins pins;
  const bool by_cpu = pipeline_.by_cpu(unit);
  pins.parameters = !partitions_parameters(unit) && pipeline_.needs_parameters(unit, task.pass) &&
                    needs_frames(unit, values);
  if (pins.parameters && !bring_in(values, use)) return false;
  const bool in_part = has_gradient_part(unit);
  // A GPU's update streams this rank's shard from a record in host memory. A record on disk is read in
  // blocks, so that all of it is brought in.
  const bool streams_part = !by_cpu && pipeline_.on_gpu() && !pager_.resident(gradient) &&
                            pager_.stored(gradient) && pager_.backing(gradient).for_cpu().data != nullptr;
  pins.gradient = parts_.whole_gradients && !in_part && !streams_part && needs_frames(unit, gradient);
  if (pins.gradient && !bring_in(gradient, Pager::Use::kRead)) {
    if (pins.parameters) pager_.release(values);
    return false;
  }
  Update update;
  update.unit = unit;
  update.pass = task.pass;
  update.groups = due_[unit].groups;
  update.parameter_updates = due_[unit].parameters;
  update.refused = due_[unit].refused;
  update.parameters = {pins.parameters ? pager_.data(values) : nullptr, layout_.dtype(unit)};
  if (partitions_parameters(unit)) {
    update.first_parameter = parts_.ranks->own(unit).begin;
    if (parts_.parameters->on_disk(unit)) {
      update.parameters_backing = &parts_.parameters->backing(unit);
      update.parameters_backing_bytes = parts_.parameters->backing_bytes(unit);
    } else {
      update.parameters.data = parts_.parameters->data(unit);
    }
  }
  update.gradient_type = gradients_.final_type(unit);
  if (!pins.gradient && !in_part && pager_.present(gradient)) {
    pager_.acquire(gradient, Pager::Use::kRead);
    pins.gradient = true;
  }
  if (by_cpu) {
    start_by_cpu(task, update, pins);
  } else if (in_part && parts_.gradients->in_memory(unit)) {
    update.gradient = {parts_.gradients->data(unit), update.gradient_type};
  } else if (in_part) {
    update.gradient_backing = parts_.gradients->record(unit);
    update.gradient_backing_bytes =
        final_gradient_bytes(parts_.ranks->own(unit).size(), update.gradient_type);
  } else if (pins.gradient && parts_.whole_gradients) {
    update.gradient =
        ConstArray{pager_.data(gradient), update.gradient_type}.at(parts_.ranks->own(unit).begin);
  } else if (pins.gradient) {
    update.gradient = {pager_.data(gradient), update.gradient_type};
  } else {
    update.whole_gradient = parts_.whole_gradients;
    update.gradient_backing = &pager_.backing(gradient);
    update.gradient_backing_bytes = pager_.backing_bytes(gradient);
  }
  if (applies && goes_on_alone(unit))
    update.on_changed = [shards = parts_.parameters, unit, version = parts_.parameters->expected(unit)] {
      shards->publish(unit, version);
    };
  if (applies) phases_[unit] = Phase::kRunning;
  pipeline_.add(update, [this, task, pins] { on_applied(task, pins); });
  return true;
}

// Beside a GPU the CPU updates records in host memory in place, and streams others through its slots. It
// streams a record on disk only where it updates the whole unit, since a shard does not begin at a block.
bool UpdateQueue::needs_frames(UnitId unit, HoldingId holding) const {
  if (!pipeline_.by_cpu(unit) || pager_.resident(holding)) return true;
  return is_cut(unit) && (!pager_.stored(holding) || pager_.backing(holding).for_cpu().data == nullptr);
}

void UpdateQueue::start_by_cpu(const Task& task, Update& update, const Pins& pins) {
  const UnitId unit = task.unit;
  const HoldingId values = parameters_[unit], gradient = gradients_.holding(unit, 0);
  const std::size_t first = is_cut(unit) ? parts_.ranks->own(unit).begin : 0;
  const auto for_cpu = [&](HoldingId holding, bool on_gpu) {
    return on_gpu ? Backing::ForCpu{nullptr, &pager_.gpu_memory(holding)} : pager_.backing(holding).for_cpu();
  };
  update.whole_gradient = true;
  if (has_gradient_part(unit)) {
    update.gradient = {parts_.gradients->record(unit)->for_cpu().data, update.gradient_type};
  } else {
    const Backing::ForCpu from = for_cpu(gradient, pins.gradient);
    update.gradient = {from.data, update.gradient_type};
    if (from.data != nullptr) update.gradient = update.gradient.at(first);
    update.gradient_backing = from.backing;
    update.gradient_backing_bytes = pins.gradient ? pager_.bytes(gradient) : pager_.backing_bytes(gradient);
  }
  if (partitions_parameters(unit) || !pipeline_.needs_parameters(unit, task.pass)) return;
  const Backing::ForCpu to = for_cpu(values, pins.parameters);
  update.parameters.data = to.data;
  update.whole_parameters = true;
  update.parameters_backing = to.backing;
  update.parameters_backing_bytes = pins.parameters ? pager_.bytes(values) : pager_.backing_bytes(values);
}

void UpdateQueue::on_applied(const Task& task, const Pins& pins) {
  const UnitId unit = task.unit;
  if (pins.gradient) pager_.release(gradients_.holding(unit, 0));
  if (phases_[unit] != Phase::kRunning) {
    if (pins.parameters) pager_.release(parameters_[unit]);
    return;
  }
  if (partitions_parameters(unit) && !goes_on_alone(unit)) parts_.parameters->publish(unit);
  if (is_gathered(unit)) return begin_gather(unit, pins.parameters);
  complete(unit, pins.parameters);
}

// held: the parameters have changed in memory that is held; else in their record, or in this rank's shard.
void UpdateQueue::complete(UnitId unit, bool held) {
  if (held) {
    pager_.written(parameters_[unit], pager_.bytes(parameters_[unit]));
    pager_.release(parameters_[unit]);
  } else {
    pager_.unpark(parameters_[unit]);
  }
  finish(unit);
}

void UpdateQueue::begin_gather(UnitId unit, bool held) {
  phases_[unit] = Phase::kGathering;
  const ElementRange all{0, layout_.unit_elements(unit)};
  if (parts_.on_gpu == nullptr) {
    gathers_.push_back({unit, held});
    return parts_.ranks->gather_in(unit, all, {pager_.data(parameters_[unit]), layout_.dtype(unit)},
                                   gathers_.back().group.add());
  }
  may_gather_[unit] = held;
  for (; !to_gather_.empty() && may_gather_.contains(to_gather_.front()); to_gather_.pop_front()) {
    const UnitId next = to_gather_.front();
    gathers_.push_back({next, may_gather_.extract(next).mapped()});
    gather_beside_gpu(gathers_.back());
  }
}

// Parameters that the CPU has updated in host memory are gathered there.
void UpdateQueue::gather_beside_gpu(Gather& gather) {
  const UnitId unit = gather.unit;
  const ElementRange own = parts_.ranks->own(unit);
  DeviceRanks::Call call;
  call.type = call.given = layout_.dtype(unit);
  call.elements = {0, layout_.unit_elements(unit)};
  if (gather.held) {
    call.data = pager_.data(parameters_[unit]);
    call.in = {{0, own.begin}, {own.end, call.elements.end}};
  } else {
    call.data = pager_.backing(parameters_[unit]).for_cpu().data;
    call.in_host = true;
  }
  call.out = {own};
  call.may_share = true;
  call.unit = unit;
  call.end = [this, unit](ElementRange piece, Array values, std::span<const ConstArray> of_ranks) {
    take_of_others(*parts_.ranks, unit, piece, values, of_ranks, *parts_.threads);
  };
  call.make = [this, unit](ElementRange piece, Array values, std::span<const ConstArray> of_ranks, double*) {
    take_of_others(*parts_.ranks, unit, piece, values, of_ranks, *parts_.gpu);
  };
  call.begin = [this, unit](ElementRange piece, Array values, Done done) {
    parts_.ranks->gather_in(unit, piece, values, std::move(done));
  };
  parts_.on_gpu->add(std::move(call), gather.group.add());
}

bool UpdateQueue::finish_gathers() {
  bool any = false;
  for (auto gather = gathers_.begin(); gather != gathers_.end();) {
    if (!gather->group.finished()) {
      ++gather;
      continue;
    }
    any = true;
    gather->group.wait();
    const auto [unit, held] = std::pair(gather->unit, gather->held);
    gather = gathers_.erase(gather);
    complete(unit, held);
  }
  return any;
}

bool UpdateQueue::go_on() {
  struct Within {
    explicit Within(bool& flag) : within(flag), before(std::exchange(flag, true)) {}
    ~Within() { within = before; }
    bool& within;
    const bool before;
  } const here(going_on_);
  const bool gathered = finish_gathers();
  return pipeline_.pump() || gathered;
}

void UpdateQueue::finish(UnitId unit) {
  const HoldingId gradient = gradients_.holding(unit, 0);
  if (due_[unit].holds_parameters) pager_.release(parameters_[unit]);
  if (due_[unit].holds_gradient) pager_.release(gradient);
  if (gradients_.any(unit))  // the client keeps the gradient over the step
    pager_.unpark(gradient);
  else
    pager_.discard(gradient);
  phases_[unit] = Phase::kCurrent;
}

// Updates by the CPU beside a GPU need none of the GPU's frames. So any number may be in progress, and none
// waits for the GPU's updates, unless the order is fixed.
void UpdateQueue::start_waiting() {
  const auto is_cpus = [&](const Task& task) {
    return pipeline_.by_cpu(task.unit) && !task.pass && !ordered_;
  };
  const auto may_start = [&](const Task& task) { return is_cpus(task) || pipeline_.unapplied() < kRunning; };
  while (!waiting_.empty() && may_start(waiting_.front()) && start(waiting_.front(), false))
    waiting_.pop_front();
  for (auto task = waiting_.begin(); task != waiting_.end() && !task->pass;)
    task = is_cpus(*task) && start(*task, false) ? waiting_.erase(task) : std::next(task);
}

// Repeats while an update has started, or has made room for another one.
void UpdateQueue::start_all() {
  std::size_t waited = 0, running = 0;
  do {
    waited = waiting_.size();
    start_waiting();
    running = pipeline_.unapplied();
    go_on();
  } while (!waiting_.empty() && (waiting_.size() < waited || pipeline_.unapplied() < running));
}

// A pass whose parts are all in memory has work as soon as it is started.
void UpdateQueue::advance() {
  do start_waiting();
  while (go_on() && !waiting_.empty() && waiting_.front().pass);
}

void UpdateQueue::advance_while_waiting() {
  if (!going_on_) advance();
}

void UpdateQueue::serve_ranks() {
  advance();
  if (parts_.ranks != nullptr && pipeline_.idle() && !waiting_.empty() && !starting_)
    start_for(waiting_.front().unit);
}

void UpdateQueue::ensure_updated(UnitId unit) {
  if (current(unit)) return;
  pipeline_.hurry(unit);
  while (!current(unit)) {
    if (phases_[unit] == Phase::kWaiting) start_for(unit);
    // Another rank may wait for a unit that is further ahead, or the GPU may have nothing to do.
    if (parts_.ranks != nullptr || pipeline_.on_gpu()) start_waiting();
    if (!go_on()) wait();
  }
  pipeline_.hurry({});
}

// Starts the unit's update before its turn, unless the order is fixed or a joint update is in the way.
void UpdateQueue::start_for(UnitId unit) {
  const auto own =
      std::find_if(waiting_.begin(), waiting_.end(), [&](const Task& task) { return task.unit == unit; });
  const bool in_turn = ordered_ || own->pass || waiting_.front().goes_on();
  if (in_turn) start_waiting();
  if (in_turn && (waiting_.empty() || pipeline_.unapplied() > 0)) return;
  const Task task = in_turn ? waiting_.front() : *own;
  if (start(task, true)) std::erase(waiting_, task);
}

void UpdateQueue::start_shared() {
  const auto is_shared = [](const Task& task) { return task.pass.has_value(); };
  while (std::any_of(waiting_.begin(), waiting_.end(), is_shared)) {
    start_for(std::find_if(waiting_.begin(), waiting_.end(), is_shared)->unit);
    if (!go_on()) wait();
  }
}

void UpdateQueue::wait(std::size_t lent_until) {
  if (pipeline_.idle() && !gathers_.empty())
    return waits_.during(Waits::For::kRanks, "updates of other ranks",
                         [&] { (void)gathers_.front().group.wait_for(std::chrono::milliseconds(1)); });
  waits_.during(pipeline_.reading() ? Waits::For::kReads : Waits::For::kWrites, "updates",
                [&] { pipeline_.wait(lent_until); });
}

bool UpdateQueue::finish_some() {
  start_waiting();
  // The first update may wait for memory that a later one holds.
  if (!ordered_ && pipeline_.idle() && (waiting_.empty() || !waiting_.front().goes_on()))
    std::erase_if(waiting_, [&](const Task& task) {
      return !task.pass && pipeline_.unapplied() < kRunning && start(task, false);
    });
  if (idle()) return false;
  if (!go_on()) {
    wait();
    go_on();
  }
  return true;
}

template <class Condition>
void UpdateQueue::settle_until(const Condition& is_settled) {
  while (!is_settled()) {
    start_waiting();
    if (go_on()) continue;
    if (idle())
      ensure_updated(waiting_.front().unit);
    else
      wait();
  }
}

void UpdateQueue::settle() {
  settle_until([this] { return settled(); });
}

void UpdateQueue::settle_for_others() {
  settle_until([this] {
    for (UnitId unit = 0; unit < phases_.size(); ++unit)
      if (!current(unit) && !is_alone(unit)) return false;
    return true;
  });
}

void UpdateQueue::end_what_goes_on_alone() noexcept {
  try {
    for (UnitId unit = 0; unit < phases_.size(); ++unit)
      while (is_alone(unit))
        if (!go_on()) wait();
  } catch (const std::exception&) {  // whoever waits for the engine learns of the error
  }
}

// A foreseen update is in the queue by now, or it will not come.
void UpdateQueue::take_back(std::size_t until) {
  pipeline_.stop_lending();
  while (pipeline_.uses_before(until)) {
    start_waiting();
    if (go_on()) continue;
    if (!idle())
      wait(until);
    else if (!waiting_.empty())
      ensure_updated(waiting_.front().unit);
    else
      pipeline_.forget_foreseen();
  }
}

}  // namespace sluice::engine
