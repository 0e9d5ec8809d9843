#include "engine/steps/shared_gradients.h"

#include <algorithm>
#include <numeric>

#include "engine/plan/micro_batch_sums.h"

namespace sluice::engine {
SharedGradients::SharedGradients(Core& core, std::size_t micro_batches, bool ends_micro_batches,
                                 Client client)
    : core_(core),
      client_(std::move(client)),
      in_backward_(core.ranks && (!core.plan.clip || core.plan.sums_in_backward)),
      sums_(core, MicroBatchSums(core.plan.reproducible, core.plan.ranks, micro_batches).order(),
            core.plan.ranks.size * (core.plan.reproducible ? static_cast<double>(micro_batches) : 1.0)),
      micro_batches_(ends_micro_batches ? micro_batches : 0),
      turns_(core.layout),
      known_(core.layout.parameters()),
      edits_(core.layout.units().size()),
      expected_(core.layout.parameters(), true),
      has_learned_(core.layout.units().size()),
      summed_(core.layout.parameters()) {
  if (core.plan.reproducible)
    pairwise_.emplace(core.layout, MicroBatchSums(true, core.plan.ranks, micro_batches), core.gradients);
  turns_.begin();
}

SharedGradients::~SharedGradients() {
  if (in_backward_ && has_exchanged_ && !all_ended_)
    core_.fail_with("its engine was destroyed in the middle of a step");
  else if (!under_way_.empty())
    core_.fail_with("its engine was destroyed while gradients were being summed");
}

void SharedGradients::set(ParameterId parameter, const Known& known) {
  const auto there = [](const Known& of) { return of.added > 0 || of.is_shared() ? 1u : 0u; };
  there_ += there(known);
  there_ -= there(known_[parameter]);
  known_[parameter] = known;
}

void SharedGradients::add(ParameterId parameter, ConstArray gradient) {
  if (in_backward_) {
    check_add(parameter);
  } else if (!pairwise_) {
    finish_sum_of(core_.layout.location(parameter).unit);
    make_whole(parameter);
  }
  Known known = known_[parameter];
  ++known.added;
  if (!pairwise_) {
    core_.gradients.add(core_.resources.threads, parameter, gradient);
    return set(parameter, known);
  }
  const std::string& name = core_.layout.spec(parameter).name;
  if (known.is_shared())
    refuse(ErrorCode::kState,
           "a gradient of '{}' is added to one that was used or kept over a step, which a reproducible plan "
           "does not allow; add those of all micro-batches before, and drop it after the step",
           name);
  if (pairwise_->ended() == pairwise_->count())
    refuse(ErrorCode::kState,
           "a gradient of '{}' is added after this rank's {} micro-batches of the step have ended; step, or "
           "drop all gradients, or state more micro-batches",
           name, pairwise_->count());
  if (pairwise_->added(parameter))
    refuse(ErrorCode::kState,
           "a second gradient of '{}' is added in one micro-batch, or one of an earlier micro-batch, which a "
           "reproducible plan does not allow; add one gradient in each, in the order of micro-batches",
           name);
  pairwise_->add(core_.resources.threads, parameter, gradient);
  if (!core_.gradients.has(parameter)) core_.gradients.begin(parameter);
  set(parameter, known);
}

void SharedGradients::end_gradients(UnitId unit) {
  if (!core_.ranks || in_backward_ || pairwise_ || ended_ + 1 != micro_batches_) return;
  turns_.note(unit);
  if (sums_.is_in_order())
    begin_in_order();
  else if (may_begin(unit))
    begin_sum(unit, all_of(unit));
}

void SharedGradients::released(UnitId unit) {
  if (in_backward_)
    note_release(unit);
  else if (sums_.is_in_order() && turns_.has_come(unit))
    begin_in_order();
}

void SharedGradients::await(UnitId unit, bool for_gradients) {
  if (in_backward_) {
    const UnitRange units = core_.together(unit);
    if (const auto summed = under_way(); summed && units.first <= *summed && *summed < units.end) conclude();
  } else if (for_gradients && sums_.is_in_record(unit)) {  // such a sum has no frames
    finish_sum_of(unit);
  }
}

void SharedGradients::begin_in_order() {
  while (const std::optional<UnitId> unit = turns_.next()) {
    if (!turns_.has_come(*unit) || !may_begin(*unit)) return;
    turns_.pass();
    begin_sum(*unit, all_of(*unit));
  }
}

// A sum takes the whole unit, as in an exchange in which nobody has a shared gradient of it. A buffer in
// frames is not held beside others, for which the plan has no frames.
bool SharedGradients::may_begin(UnitId unit) const {
  const bool in_record = sums_.is_in_record(unit) && !core_.pager.held(core_.gradients.holding(unit, 0));
  if (is_under_way(unit) || !(core_.plan.units[unit].resident(Part::kGradient) || in_record)) return false;
  if (core_.gpu && core_.gpu->device().is_capturing(core_.gpu->client())) return false;
  bool any = false;
  for (ParameterId p = core_.layout.first_parameter(unit); p < core_.layout.end_parameter(unit); ++p) {
    if (known_[p].is_shared()) return false;
    any = any || known_[p].added > 0;
  }
  return any;
}

// In backward a turn that never came comes again, since gradients of few units can wait.
void SharedGradients::learn_turns(const std::vector<Report>& all) {
  std::vector<bool> came(core_.layout.units().size());
  for (UnitId unit = 0; unit < came.size(); ++unit)
    came[unit] = std::ranges::any_of(all, [&](const Report& rank) { return rank.came[unit] > 0; }) ||
                 std::ranges::any_of(all_of(unit), [&](ParameterId p) { return bool{summed_[p]}; });
  turns_.follow(all.front().came);
  turns_.expect(came, !in_backward_);
}

void SharedGradients::end_micro_batch() {
  if (in_backward_) {
    if (core_.plan.sums_each_backward && all_ended_) begin_in_backward();
    return end_in_backward();
  }
  if (!pairwise_) {
    if (++ended_ == micro_batches_) use();
    return;
  }
  if (pairwise_->ended() == pairwise_->count())
    refuse(ErrorCode::kState,
           "a micro-batch ends after this rank's {} of the step; step, or drop all gradients, or state more "
           "micro-batches",
           pairwise_->count());
  pairwise_->end_micro_batch();
}

void SharedGradients::set_micro_batch(std::size_t number) {
  if (number > pairwise_->count())
    refuse(ErrorCode::kState,
           "micro-batch {} of a step is computed, and this rank has {}; count them from 0, or state more "
           "micro-batches",
           number, pairwise_->count());
  pairwise_->set_micro_batch(number);
}

std::size_t SharedGradients::sums_of(UnitId unit) const {
  std::size_t sums = pairwise_ ? pairwise_->sums_of(unit) : 1;
  for (ParameterId p = core_.layout.first_parameter(unit); p < core_.layout.end_parameter(unit); ++p)
    if (known_[p].is_shared()) sums = std::max<std::size_t>(sums, 1);
  return sums;
}

// When no gradient is left, the micro-batches of the step begin anew.
void SharedGradients::dropped(ParameterId parameter) {
  const std::size_t before = there_;
  set(parameter, {});
  if (in_backward_) {
    if (!has_exchanged_) summed_[parameter] = false;
    if (there_ == 0 && all_ended_ && core_.plan.clip) begin_step();
    return;
  }
  turns_.forget(core_.layout.location(parameter).unit);
  if (pairwise_) pairwise_->drop(parameter);
  if (before > 0 && there_ == 0) begin_micro_batches();
}

void SharedGradients::begin_micro_batches() {
  ended_ = 0;
  turns_.forget_all();
  turns_.begin();
  if (pairwise_) pairwise_->begin_step();
}

void SharedGradients::dropped_all() {
  known_.assign(known_.size(), {});
  there_ = 0;
  if (!in_backward_) begin_micro_batches();
}

// Contributes nothing to a parameter to which only other ranks have added. A shared gradient is whole then,
// or kept elsewhere.
void SharedGradients::bring_nothing(ParameterId parameter) {
  if (in_backward_ || !known_[parameter].is_shared())
    core_.gradients.fill_with_zeros(core_.resources.threads, parameter);
  else if (core_.gradients.factor(parameter) != 1)
    core_.gradients.scale(core_.resources.threads, parameter, core_.gradients.factor(parameter));
}

bool SharedGradients::any_added() const {
  return std::ranges::any_of(known_, [](const Known& known) { return known.added > 0; });
}

void SharedGradients::use() {
  if (in_backward_) {
    if (core_.in_step && !all_ended_)
      refuse(ErrorCode::kState,
             "a gradient is used before this rank's micro-batch has ended, and it is summed in backward; use "
             "it after backward, or ask for stage 1, or for none");
    return;
  }
  while (any_added()) exchange(Request::kUse);
}

void SharedGradients::end_sum_to_drop(UnitId unit) {
  if (in_backward_) return await(unit, false);
  while (is_under_way(unit)) exchange(Request::kDrop);
}

void SharedGradients::make_whole(ParameterId parameter) {
  while (known_[parameter].shared == Sum::kOwnShard) exchange(Request::kWhole, {}, parameter);
}

void SharedGradients::step(const StepSettings& settings) {
  if (in_backward_) end_in_backward();
  if (!core_.plan.clip) return;  // updates have followed
  const std::string text = text_of(settings);
  while (!exchange(Request::kStep, text)) {
  }
  if (in_backward_) return;
  has_exchanged_ = false;
  begin_micro_batches();
}

void SharedGradients::abandon() {
  if (in_backward_) return abandon_in_backward();
  if ((has_exchanged_ || !under_way_.empty()) && core_.ranks) exchange(Request::kAbandon);
  has_exchanged_ = abandoned_ = false;
  dropped_all();
}

bool SharedGradients::exchange(Request request, const std::string& settings, ParameterId wanted) {
  if (abandoned_ && request != Request::kAbandon)
    refuse(ErrorCode::kState, "another rank has abandoned this step; abandon it on this rank, too");
  turns_.end();  // units may get more gradients now, so no sum begins early before the next step
  const std::vector<Report> all = gather(request, settings, wanted);
  const auto wants = [](Request what) { return [what](const Report& rank) { return rank.request == what; }; };
  const auto abandons = std::ranges::find_if(all, wants(Request::kAbandon));
  if (abandons != all.end()) {
    has_exchanged_ = false;
    drain(all);
    if (request == Request::kAbandon) return false;
    abandoned_ = true;
    refuse(ErrorCode::kState,
           "rank {} has abandoned the step after its gradients were summed; abandon it on this rank, too",
           abandons - all.begin());
  }
  const bool all_drop = std::ranges::all_of(all, wants(Request::kDrop));
  if (!all_drop && std::ranges::any_of(all, wants(Request::kDrop))) {
    drop_begun(all);
    if (request != Request::kDrop) refuse_lone_drop(all);
    return false;
  }
  if (std::ranges::any_of(all, wants(Request::kWhole))) {
    gather_wanted(all);
    return false;
  }
  has_exchanged_ = true;
  try {
    compare(all);
  } catch (const Refusal&) {
    drop_begun(all);
    throw;
  }
  sum(all);
  if (!std::ranges::all_of(all, wants(Request::kStep))) return false;
  if (!in_backward_) learn_turns(all);
  return true;
}

void SharedGradients::refuse_lone_drop(const std::vector<Report>& all) {
  const auto drops = std::ranges::find(all, Request::kDrop, &Report::request);
  refuse(ErrorCode::kState,
         "rank {} has dropped gradients while they were being summed, as after a backward pass that failed "
         "there; drop the gradients of the step on all ranks, and compute its micro-batches again",
         drops - all.begin());
}

void SharedGradients::gather_wanted(const std::vector<Report>& all) {
  for (std::size_t rank = 0; rank < all.size(); ++rank)
    for (std::size_t other = 0; all[rank].request == Request::kWhole && other < all.size(); ++other)
      if (!all[other].known[all[rank].wanted].is_shared())
        refuse(ErrorCode::kState,
               "rank {} reads the summed gradient of '{}' or adds to it, which was dropped on rank {}, and "
               "each rank "
               "has a part of it; drop it on all, after that",
               rank, core_.layout.spec(static_cast<ParameterId>(all[rank].wanted)).name, other);
  for (const Report& rank : all)
    if (rank.request == Request::kWhole) gather_whole(static_cast<ParameterId>(rank.wanted));
}

void SharedGradients::gather_whole(ParameterId parameter) {
  if (known_[parameter].shared == Sum::kWhole) return;  // two ranks have requested it
  const UnitId unit = core_.layout.location(parameter).unit;
  core_.queue.ensure_updated(unit);  // a pending update owns the gradient
  const HoldingId holding = core_.gradients.holding(unit, 0);
  core_.pager.acquire(holding, Pager::Use::kModify);
  TransferGroup group;
  sums_.gather(parameter, group.add());
  core_.wait_for_ranks("the gradient of " + core_.name_of(unit), group);
  core_.pager.written(holding, core_.gradients.bytes(unit, 0));
  core_.pager.release(holding);
  known_[parameter].shared = Sum::kWhole;
}

// By parameter.
std::vector<bool> SharedGradients::added_in(const std::vector<Report>& all) const {
  std::vector<bool> added(known_.size());
  for (const Report& rank : all)
    for (ParameterId p = 0; p < added.size(); ++p) added[p] = added[p] || rank.known[p].added > 0;
  return added;
}

void SharedGradients::sum(const std::vector<Report>& all) {
  const std::vector<bool> added = added_in(all);
  for (const UnitId unit : turns_.all()) {
    const std::vector<ParameterId> parameters = of_unit(unit, added);
    if (parameters.empty()) continue;
    if (!is_under_way(unit)) begin_sum(unit, parameters);
    if (is_alone(unit)) finish_sums(added);
  }
  finish_sums(added);
  std::vector<ParameterId> summed;
  for (ParameterId p = 0; p < added.size(); ++p)
    if (added[p]) summed.push_back(p);
  core_.gather_squares(summed);
}

std::vector<ParameterId> SharedGradients::all_of(UnitId unit) const {
  std::vector<ParameterId> parameters(core_.layout.end_parameter(unit) - core_.layout.first_parameter(unit));
  std::iota(parameters.begin(), parameters.end(), core_.layout.first_parameter(unit));
  return parameters;
}

std::vector<ParameterId> SharedGradients::of_unit(UnitId unit, const std::vector<bool>& added) const {
  std::vector<ParameterId> parameters;
  for (ParameterId p = core_.layout.first_parameter(unit); p < core_.layout.end_parameter(unit); ++p)
    if (added[p]) parameters.push_back(p);
  return parameters;
}

bool SharedGradients::is_under_way(UnitId unit) const {
  return std::ranges::any_of(under_way_, [&](const UnderWay& sum) { return sum.unit == unit; });
}

std::optional<UnitId> SharedGradients::under_way() const {
  return under_way_.empty() ? std::nullopt : std::optional(under_way_.front().unit);
}

// Sums the whole unit at once, unless it has a shared gradient to which nobody has added.
void SharedGradients::begin_sum(UnitId unit, const std::vector<ParameterId>& parameters) {
  core_.queue.ensure_updated(unit);
  const auto lacks = [this](ParameterId p) { return known_[p].added == 0; };
  sums_.hold(unit, std::ranges::any_of(parameters, lacks));
  for (const ParameterId p : parameters) {
    if (pairwise_) pairwise_->complete(core_.resources.threads, p);
    if (!pairwise_ && known_[p].added == 0) bring_nothing(p);
  }
  bool whole = true;
  for (ParameterId p = core_.layout.first_parameter(unit); p < core_.layout.end_parameter(unit); ++p)
    whole = whole && (std::ranges::count(parameters, p) > 0 || !known_[p].is_shared());
  under_way_.push_back({unit, parameters, sums_.begin(unit, parameters, whole)});
}

void SharedGradients::finish_sums(const std::vector<bool>& added) {
  for (; !under_way_.empty(); under_way_.pop_front()) {
    UnderWay& sum = under_way_.front();
    core_.wait_for_ranks("the gradient of " + core_.name_of(sum.unit), sum.group);
    finish(sum.unit, of_unit(sum.unit, added));
    sums_.let_go(sum.unit, true);
  }
}

// Completes the sums that any rank has begun, which all have to join, and ignores their results.
void SharedGradients::drain(const std::vector<Report>& all) {
  for (const UnitId unit : begun_in(all)) {
    if (is_under_way(unit)) continue;
    core_.queue.ensure_updated(unit);
    sums_.hold(unit, false);
    under_way_.push_back({unit, {}, sums_.begin(unit, {}, true)});
    if (is_alone(unit)) end_sums();
  }
  end_sums();
}

// The units whose sums any rank has begun, in the common order.
std::vector<UnitId> SharedGradients::begun_in(const std::vector<Report>& all) const {
  std::vector<UnitId> units;
  for (const UnitId unit : turns_.all())
    if (std::ranges::any_of(all, [&](const Report& rank) { return rank.begun[unit] != 0; }))
      units.push_back(unit);
  return units;
}

// Drops, alike on all ranks, gradients whose sums were begun, so that the ranks may go on.
void SharedGradients::drop_begun(const std::vector<Report>& all) {
  drain(all);
  for (const UnitId unit : begun_in(all))
    for (ParameterId p = core_.layout.first_parameter(unit); p < core_.layout.end_parameter(unit); ++p) {
      core_.gradients.drop(p);
      dropped(p);
    }
}

// Waits for the sums in flight.
void SharedGradients::end_sums() {
  for (; !under_way_.empty(); under_way_.pop_front()) {
    core_.wait_for_ranks("the gradient of " + core_.name_of(under_way_.front().unit),
                         under_way_.front().group);
    sums_.let_go(under_way_.front().unit, false);
  }
}

void SharedGradients::finish(UnitId unit, const std::vector<ParameterId>& parameters) {
  sums_.finish(unit, parameters);
  const bool parts = core_.partitions_state(unit);
  for (const ParameterId p : parameters) {
    set(p, {0, parts ? Sum::kOwnShard : Sum::kWhole, 1});
    if (pairwise_) pairwise_->drop(p);
  }
}

}  // namespace sluice::engine
