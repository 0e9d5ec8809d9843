#include <algorithm>
#include <utility>

#include "engine/steps/shared_gradients.h"

// Sums in backward: whose turn it is, and how each sum is concluded.
namespace sluice::engine {
namespace {

bool contains(const auto& values, const auto& value) { return std::ranges::count(values, value) > 0; }

}  // namespace

void SharedGradients::begin_step() {
  if (!in_backward_) return;
  if (!core_.plan.clip) dropped_all();
  begin_in_backward();
}

// Means are added to gradients that are kept only where ranks sum them in each backward pass.
void SharedGradients::begin_in_backward() {
  has_exchanged_ = all_ended_ = false;
  ended_ = 0;
  let_go_.clear();
  means_.clear();
  turns_.forget_all();
  for (ParameterId p = 0; p < summed_.size(); ++p)
    summed_[p] = !core_.plan.sums_each_backward && core_.gradients.has(p);
}

void SharedGradients::read(UnitId unit) {
  if (in_backward_ && !turns_.has_learned() && !has_exchanged_ && core_.layout.trainable(unit))
    turns_.note(unit);
}

void SharedGradients::check_add(ParameterId parameter) {
  const std::string& name = core_.layout.spec(parameter).name;
  const bool each = core_.plan.sums_each_backward;
  if (each && all_ended_) begin_in_backward();
  if (ended_ > 0)
    refuse(ErrorCode::kState,
           "a gradient of '{}' is added after {} micro-batch of this rank has ended, and what is summed in "
           "backward is added to no more; step before{}",
           name, each ? "a" : "the step's only",
           each              ? ", or end it on all ranks"
           : core_.plan.clip ? ", or ask for stage 1, or for none, or to sum gradients in each backward"
                             : "");
  const bool had_one =
      known_[parameter].added > 0 && contains(let_go_, core_.layout.location(parameter).unit);
  if (summed_[parameter] || had_one)
    refuse(
        ErrorCode::kState,
        "a gradient of '{}' is added in a {} in which it is summed over the ranks in backward: this rank had "
        "one before, or others had one and this rank was further on; give each parameter one gradient in it, "
        "in the same order on all ranks, {}",
        name, each ? "micro-batch" : "step",
        each ? "and where a backward has failed go on from the last checkpoint; or sum gradients at the "
               "step's "
               "end"
        : core_.plan.clip
            ? "drop what is kept of earlier steps before (zero_grad(set_to_none=True)), and where "
              "a backward has failed drop all and step, on all ranks; or ask for stage 1, or for none"
            : "or update at the end of the step");
}

bool SharedGradients::holds_any(UnitRange units) const {
  for (UnitId unit = units.first; unit < units.end; ++unit)
    if (client_.holds(unit)) return true;
  return false;
}

// The unit's parameters with a gradient that is not summed yet; none while the unit is held.
std::vector<ParameterId> SharedGradients::final_of(UnitId unit) const {
  std::vector<ParameterId> parameters;
  for (const ParameterId p : all_of(unit))
    if (known_[p].added > 0) parameters.push_back(p);
  if (!parameters.empty() && holds_any(core_.together(unit))) parameters.clear();
  return parameters;
}

// Whether it has all gradients that are expected.
bool SharedGradients::is_complete(UnitId unit) const {
  return std::ranges::none_of(
      all_of(unit), [this](ParameterId p) { return expected_[p] && !summed_[p] && known_[p].added == 0; });
}

bool SharedGradients::is_summed(UnitId unit) const {
  return !is_under_way(unit) &&
         std::ranges::none_of(all_of(unit), [this](ParameterId p) { return known_[p].added > 0; });
}

// Units with final gradients; without the latest one, while that may get more.
std::vector<UnitId> SharedGradients::waiting() const {
  std::vector<UnitId> units;
  for (const UnitId unit : let_go_)
    if (!final_of(unit).empty() && (ended_ > 0 || unit != latest_ || is_complete(unit)))
      units.push_back(unit);
  return units;
}

void SharedGradients::note_release(UnitId unit) {
  const UnitRange units = core_.together(unit);
  for (UnitId each = units.first; each < units.end; ++each) {
    if (final_of(each).empty()) continue;
    if (!contains(let_go_, each)) let_go_.push_back(each);
    latest_ = each;
  }
  if (waiting().empty()) return;
  open();
  for (const UnitId each : waiting())
    if (is_complete(each)) turns_.note(each);
  sum_in_turn();
}

// The first exchange of a step, which compares it among the ranks before anything is summed.
void SharedGradients::open() {
  if (has_exchanged_) return;
  const std::vector<Report> all = gather(Request::kOpen, text_of(core_.settings));
  compare(all);
  has_exchanged_ = true;
  if (!turns_.has_learned()) turns_.follow(all.front().came, true);
  turns_.forget_all();
  turns_.begin();
  give_turns(added_in(all));
}

// Units with these gradients that have no turn get one.
void SharedGradients::give_turns(const std::vector<bool>& added) {
  for (const UnitId unit : turns_.all())
    if (!turns_.is_ahead(unit) && !of_unit(unit, added).empty()) turns_.insert(unit);
}

void SharedGradients::sum_in_turn() {
  while (true) {
    const std::optional<UnitId> next = turns_.next();
    const std::vector<UnitId> units = waiting();
    const bool has_come = next && contains(units, *next) && is_complete(*next);
    if (!has_come && ended_ == 0 && units.size() <= kUnitsThatWait) return;
    if (!under_way_.empty()) {
      conclude();  // after which another unit may be next
    } else if (next) {
      turns_.pass();
      begin_turn(*next);
    } else if (!tell_of_waiting()) {
      return;
    }
  }
}

// All turns have come, and this rank's micro-batch has ended, or too many units wait that have none. Returns
// whether any rank has such units, which have turns then. Otherwise all micro-batches have ended.
bool SharedGradients::tell_of_waiting() {
  const std::vector<Report> all = gather(Request::kUse, {});
  compare(all);
  give_turns(added_in(all));
  if (turns_.next()) return true;
  learn_turns(all);
  return false;
}

void SharedGradients::begin_turn(UnitId unit) {
  Core& c = core_;
  std::vector<ParameterId> parameters = all_of(unit);
  std::erase_if(parameters, [this](ParameterId p) { return summed_[p]; });
  if (parameters.empty()) return;
  const bool hides = c.partitions_parameters(unit) && !c.plan.clip;
  for (const ParameterId p : parameters)
    if ((hides || known_[p].added > 0) && holds_any(c.together(unit)))
      fail(ErrorCode::kState,
           "the gradient of '{}' is summed on the other ranks, and this one still holds its unit '{}' while "
           "{} later units wait; give gradients in the same order on all ranks, or {}",
           c.layout.spec(p).name, c.name_of(unit), waiting().size(),
           c.plan.clip ? "ask for stage 1, or for none" : "update at the end of the step");
  c.queue.ensure_updated(unit);
  // No shard may be read while it is updated: this rank reads none from now on, or from the step's end.
  if (hides) {
    c.pager.outdate(c.parameters[unit]);
    c.await_copies(unit);
  } else if (holds_parameters(unit)) {
    c.pager.acquire(c.parameters[unit], Pager::Use::kRead);
  }
  begin_sum(unit, parameters);
  for (const ParameterId p : parameters) summed_[p] = true;
}

// Waits until all ranks have come as far, and takes the mean of the sum in flight.
void SharedGradients::conclude() {
  if (under_way_.empty()) return;
  UnderWay sum = std::move(under_way_.front());
  under_way_.pop_front();
  core_.wait_for_ranks("the gradient of " + core_.name_of(sum.unit), sum.group);
  Mean own;
  for (const ParameterId p : sum.parameters) {
    if (known_[p].added > 0) own.parameters.push_back(p);
    if (known_[p].is_shared()) own.kept.push_back(p);
  }
  // What this rank has of the unit itself is in the sum.
  for (const UnitId unit : waiting())
    if (unit != sum.unit && !turns_.is_ahead(unit))
      std::ranges::copy(final_of(unit), std::back_inserter(own.parameters));
  if (!core_.plan.clip) {
    finish(sum.unit, sum.parameters);
    if (core_.ranks->any_partitioned()) own.squares = core_.gradients.squares(sum.parameters);
  }
  take_mean(sum, gather(own));
}

void SharedGradients::take_mean(const UnderWay& sum, const std::vector<Mean>& all) {
  Core& c = core_;
  const UnitId unit = sum.unit;
  std::vector<bool> added(known_.size());
  std::vector<std::string> squares;
  for (const Mean& rank : all) {
    squares.push_back(rank.squares);
    for (const ParameterId p : rank.parameters) added[p] = true;
    if (rank.kept != all.front().kept)
      fail(ErrorCode::kState,
           "ranks keep gradients of different parameters of '{}' from earlier micro-batches, as after a "
           "backward pass that failed on one of them; drop gradients between micro-batches alone, on all "
           "ranks alike",
           c.name_of(unit));
  }
  const std::vector<ParameterId> had = of_unit(unit, added);
  for (const ParameterId p : had) added[p] = false;
  give_turns(added);
  std::vector<GradientParts::Mean> means;
  if (c.plan.clip) {
    for (const ParameterId p : had)
      means.push_back({p, known_[p].is_shared() ? std::optional(known_[p].factor) : std::nullopt});
    finish(unit, had);
    std::ranges::copy(had, std::back_inserter(means_));
  } else if (c.ranks->any_partitioned()) {
    c.gradients.take_squares(sum.parameters, squares);
  }
  for (const ParameterId p : sum.parameters) {
    if (contains(had, p)) continue;
    summed_[p] = false;
    if (c.plan.clip) continue;
    c.gradients.drop(p);
    set(p, {});
  }
  if (final_of(unit).empty()) std::erase(let_go_, unit);
  // Updates at the step's end check all gradients first.
  if (const auto bad = c.plan.clip ? std::nullopt : c.gradients.not_finite(unit))
    fail(ErrorCode::kNotFinite,
         "the gradient of '{}' is not finite; its unit was not updated, and units whose backward came before "
         "were, on all ranks",
         c.layout.spec(*bad).name);
  keep_or_apply(unit, had.empty(), means);
}

void SharedGradients::keep_or_apply(UnitId unit, bool is_empty,
                                    const std::vector<GradientParts::Mean>& means) {
  Core& c = core_;
  const HoldingId gradient = c.gradients.holding(unit, 0);
  c.pager.written(gradient, c.gradients.bytes(unit, 0));
  if (c.plan.clip)
    c.gradient_parts.keep(c.resources.threads, unit, means);
  else
    client_.update(unit);
  sums_.let_go(unit, false);
  if ((c.gradient_parts.has(unit) || is_empty) && !c.pager.held(gradient)) c.pager.discard(gradient);
  if (is_empty && c.partitions_parameters(unit) && !c.plan.clip)
    c.pager.unpark(c.parameters[unit]);  // no update follows
  if (holds_parameters(unit)) c.pager.release(c.parameters[unit]);
}

// Returns when the micro-batches of all ranks have ended, and every gradient is summed.
void SharedGradients::end_in_backward() {
  if (all_ended_) return;
  ended_ = 1;
  open();
  sum_in_turn();
  if (core_.plan.clip) core_.gather_squares(means_);
  all_ended_ = true;
  for (UnitId unit = 0; unit < has_learned_.size(); ++unit) {
    const std::vector<ParameterId> parameters = all_of(unit);
    if (std::ranges::none_of(parameters, [this](ParameterId p) { return summed_[p]; })) continue;
    const bool had = has_learned_[unit];
    has_learned_[unit] = true;
    for (const ParameterId p : parameters) expected_[p] = summed_[p] || (had && expected_[p]);
  }
}

void SharedGradients::abandon_in_backward() const {
  if (has_exchanged_ && core_.plan.clip)
    fail(ErrorCode::kState,
         "step {} is abandoned after ranks began to sum its gradients in backward, which all of them would "
         "have to end; ask for stage 1, or for none{}, at which they can",
         core_.steps, core_.plan.sums_each_backward ? ", or to sum gradients at the step's end" : "");
  if (has_exchanged_)
    fail(ErrorCode::kState,
         "step {} is abandoned after its gradients began to be applied in backward on all ranks, which "
         "cannot be undone",
         core_.steps);
}

}  // namespace sluice::engine
