#include "engine/step/update_queue.h"

#include <utility>

namespace sluice::engine {
namespace {

// Updates that run at once: one whose chunks are applied, and one whose reads follow on.
constexpr std::size_t kRunning = 2;

}  // namespace

UpdateQueue::UpdateQueue(const Layout& layout, Pager& pager, Gradients& gradients, UpdatePipeline& pipeline,
                         Waits& waits, const std::vector<HoldingId>& parameters)
    : layout_(layout),
      pager_(pager),
      gradients_(gradients),
      pipeline_(pipeline),
      waits_(waits),
      parameters_(parameters),
      phases_(layout.units().size(), Phase::kCurrent),
      due_(layout.units().size()) {}

void UpdateQueue::add(UnitId unit, Due due) {
  phases_[unit] = Phase::kWaiting;
  due_[unit] = std::move(due);
  waiting_.push_back(unit);
}

bool UpdateQueue::start(UnitId unit, bool wait) {
  if (pipeline_.under_way(unit)) return false;
  const HoldingId values = parameters_[unit];
  const HoldingId gradient = gradients_.holding(unit, 0);
  if (wait)
    pager_.acquire(values, Pager::Use::kModify);
  else if (!pager_.try_acquire(values, Pager::Use::kModify))
    return false;
  Update update;
  update.unit = unit;
  update.groups = due_[unit].groups;
  update.parameter_updates = due_[unit].parameters;
  update.parameters = {pager_.data(values), layout_.dtype(unit)};
  update.gradient_type = gradients_.final_type(unit);
  const bool in_memory = pager_.present(gradient);
  if (in_memory)
    update.gradient = {pager_.acquire(gradient, Pager::Use::kRead), update.gradient_type};
  else
    update.gradient_record = pager_.record(gradient);
  phases_[unit] = Phase::kRunning;
  pipeline_.add(update, [this, unit, in_memory] { on_applied(unit, in_memory); });
  return true;
}

void UpdateQueue::on_applied(UnitId unit, bool gradient_in_memory) {
  const HoldingId gradient = gradients_.holding(unit, 0);
  pager_.written(parameters_[unit], pager_.bytes(parameters_[unit]));
  pager_.release(parameters_[unit]);
  if (gradient_in_memory) pager_.release(gradient);
  if (due_[unit].holds_parameters) pager_.release(parameters_[unit]);
  if (due_[unit].holds_gradient) pager_.release(gradient);
  if (gradients_.kept(unit))
    pager_.unpark(gradient);
  else
    pager_.discard(gradient);
  phases_[unit] = Phase::kCurrent;
}

void UpdateQueue::start_waiting() {
  while (!waiting_.empty() && pipeline_.unapplied() < kRunning && start(waiting_.front(), false))
    waiting_.pop_front();
}

void UpdateQueue::advance() {
  start_waiting();
  pipeline_.pump();
}

void UpdateQueue::ensure_updated(UnitId unit) {
  while (phases_[unit] != Phase::kCurrent) {
    if (phases_[unit] == Phase::kWaiting && !pipeline_.under_way(unit) && start(unit, true))
      std::erase(waiting_, unit);
    if (!pipeline_.pump()) wait();
  }
}

void UpdateQueue::wait(std::size_t lent_until) {
  waits_.during(pipeline_.reading() ? Waits::For::kReads : Waits::For::kWrites, "updates",
                [&] { pipeline_.wait(lent_until); });
}

bool UpdateQueue::finish_some() {
  start_waiting();
  if (pipeline_.idle())  // what the first waits for may not have room, and another may hold it
    std::erase_if(waiting_,
                  [&](UnitId unit) { return pipeline_.unapplied() < kRunning && start(unit, false); });
  if (pipeline_.idle()) return false;
  if (!pipeline_.pump()) {
    wait();
    pipeline_.pump();
  }
  return true;
}

void UpdateQueue::settle() {
  while (!waiting_.empty() || !pipeline_.idle()) {
    start_waiting();
    if (pipeline_.pump()) continue;
    if (pipeline_.idle())
      ensure_updated(waiting_.front());
    else
      wait();
  }
}

// What was only foreseen has its update among those that wait, or will not have one.
void UpdateQueue::take_back(std::size_t until) {
  pipeline_.stop_lending();
  while (pipeline_.uses_before(until)) {
    start_waiting();
    if (pipeline_.pump()) continue;
    if (!pipeline_.idle())
      wait(until);
    else if (!waiting_.empty())
      ensure_updated(waiting_.front());
    else
      pipeline_.forget_foreseen();
  }
}

}  // namespace sluice::engine
