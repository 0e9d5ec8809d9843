#include "engine/steps/shared_gradients.h"

#include <algorithm>
#include <numeric>

#include "engine/plan/micro_batch_sums.h"

namespace sluice::engine {
SharedGradients::SharedGradients(Core& core, std::size_t micro_batches, bool ends_micro_batches)
    : core_(core),
      sums_(core, MicroBatchSums(core.plan.reproducible, core.plan.ranks, micro_batches).order(),
            core.plan.ranks.size * (core.plan.reproducible ? static_cast<double>(micro_batches) : 1.0)),
      micro_batches_(ends_micro_batches ? micro_batches : 0),
      order_(core.layout.units().size()),
      expected_(core.layout.units().size(), true),
      came_(core.layout.units().size()),
      known_(core.layout.parameters()),
      edits_(core.layout.units().size()) {
  std::iota(order_.rbegin(), order_.rend(), UnitId{0});
  if (core.plan.reproducible)
    pairwise_.emplace(core.layout, MicroBatchSums(true, core.plan.ranks, micro_batches), core.gradients);
}

SharedGradients::~SharedGradients() {
  if (!under_way_.empty()) core_.fail_with("its engine was destroyed while gradients were being summed");
}

void SharedGradients::set(ParameterId parameter, const Known& known) {
  const auto there = [](const Known& of) { return of.added > 0 || of.is_shared() ? 1u : 0u; };
  there_ += there(known);
  there_ -= there(known_[parameter]);
  known_[parameter] = known;
}

void SharedGradients::add(ParameterId parameter, ConstArray gradient) {
  if (!pairwise_) {
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
           "allows not; add those of all micro-batches before, and drop it after the step",
           name);
  if (pairwise_->ended() == pairwise_->count())
    refuse(ErrorCode::kState,
           "a gradient of '{}' is added after this rank's {} micro-batches of the step have ended; step, or "
           "drop all gradients, or state more micro-batches",
           name, pairwise_->count());
  if (pairwise_->added(parameter))
    refuse(ErrorCode::kState,
           "a second gradient of '{}' is added in one micro-batch, which a reproducible plan allows not; add "
           "their sum, or end the micro-batch between them",
           name);
  pairwise_->add(core_.resources.threads, parameter, gradient);
  if (!core_.gradients.has(parameter)) core_.gradients.begin(parameter);
  set(parameter, known);
}

void SharedGradients::end_gradients(UnitId unit) {
  if (!core_.ranks || pairwise_ || ended_ + 1 != micro_batches_) return;
  if (came_[unit] == 0) came_[unit] = ++have_come_;
  if (sums_.is_in_order())
    begin_in_order();
  else if (may_begin(unit))
    begin_sum(unit);
}

void SharedGradients::released(UnitId unit) {
  if (sums_.is_in_order() && came_[unit] > 0) begin_in_order();
}

void SharedGradients::await_record(UnitId unit) {
  if (sums_.is_in_record(unit)) finish_sum_of(unit);
}

void SharedGradients::begin_in_order() {
  for (; turn_ < order_.size(); ++turn_) {
    const UnitId unit = order_[turn_];
    if (!expected_[unit]) continue;
    if (came_[unit] == 0 || !may_begin(unit)) return;
    begin_sum(unit);
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

void SharedGradients::begin_sum(UnitId unit) {
  std::vector<ParameterId> all(core_.layout.end_parameter(unit) - core_.layout.first_parameter(unit));
  std::iota(all.begin(), all.end(), core_.layout.first_parameter(unit));
  begin_sum(unit, all);
}

// All units in the order of their sums: those that have a turn come first.
std::vector<UnitId> SharedGradients::in_order() const {
  std::vector<UnitId> units = order_;
  std::ranges::stable_partition(units, [this](UnitId unit) { return expected_[unit]; });
  return units;
}

// Units that rank 0 has not reached keep their places among those that it has.
void SharedGradients::learn_order(const std::vector<Report>& all) {
  const auto came = [&](UnitId unit) {
    return std::ranges::any_of(all, [&](const Report& rank) { return rank.came[unit] > 0; });
  };
  std::vector<bool> expected(order_.size());
  for (UnitId unit = 0; unit < expected.size(); ++unit) expected[unit] = came(unit);
  if (std::ranges::count(expected, true) == 0) return;
  expected_ = std::move(expected);
  const std::vector<std::uint32_t>& of_first = all.front().came;
  std::vector<UnitId> seen;
  std::ranges::copy_if(order_, std::back_inserter(seen), [&](UnitId unit) { return of_first[unit] > 0; });
  std::ranges::sort(seen, {}, [&](UnitId unit) { return of_first[unit]; });
  auto next = seen.begin();
  for (UnitId& unit : order_)
    if (of_first[unit] > 0) unit = *next++;
}

void SharedGradients::end_micro_batch() {
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
  came_[core_.layout.location(parameter).unit] = 0;
  if (pairwise_) pairwise_->drop(parameter);
  if (before > 0 && there_ == 0) begin_micro_batches();
}

void SharedGradients::begin_micro_batches() {
  ended_ = turn_ = have_come_ = 0;
  std::ranges::fill(came_, 0);
  if (pairwise_) pairwise_->begin_step();
}

void SharedGradients::dropped_all() {
  known_.assign(known_.size(), {});
  there_ = 0;
  begin_micro_batches();
}

// Contributes nothing to a parameter to which only other ranks have added. A shared gradient is whole then.
void SharedGradients::bring_nothing(ParameterId parameter) {
  if (!known_[parameter].is_shared())
    core_.gradients.fill_with_zeros(core_.resources.threads, parameter);
  else if (core_.gradients.factor(parameter) != 1)
    core_.gradients.scale(core_.resources.threads, parameter, core_.gradients.factor(parameter));
}

bool SharedGradients::any_added() const {
  return std::ranges::any_of(known_, [](const Known& known) { return known.added > 0; });
}

void SharedGradients::use() {
  while (any_added()) exchange(Request::kUse);
}

void SharedGradients::end_sum_to_drop(UnitId unit) {
  while (is_under_way(unit)) exchange(Request::kDrop);
}

void SharedGradients::make_whole(ParameterId parameter) {
  while (known_[parameter].shared == Sum::kOwnShard) exchange(Request::kWhole, {}, parameter);
}

void SharedGradients::step(const StepSettings& settings) {
  const std::string text = text_of(settings);
  while (!exchange(Request::kStep, text)) {
  }
  has_exchanged_ = false;
  begin_micro_batches();
}

void SharedGradients::abandon() {
  if ((has_exchanged_ || !under_way_.empty()) && core_.ranks) exchange(Request::kAbandon);
  has_exchanged_ = abandoned_ = false;
  dropped_all();
}

bool SharedGradients::exchange(Request request, const std::string& settings, ParameterId wanted) {
  if (abandoned_ && request != Request::kAbandon)
    refuse(ErrorCode::kState, "another rank has abandoned this step; abandon it on this rank, too");
  turn_ = order_.size();  // units may get more gradients now, so no sum begins early before the next step
  const std::size_t ended = pairwise_ ? pairwise_->ended() : 0;
  std::vector<std::uint32_t> begun(edits_.size());
  for (const UnderWay& sum : under_way_) begun[sum.unit] = 1;
  const std::vector<Report> all =
      gather({request, wanted, ended, known_, begun, came_, {core_.steps, edits_, settings}});
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
  learn_order(all);
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

void SharedGradients::sum(const std::vector<Report>& all) {
  std::vector<bool> added(known_.size());
  for (const Report& rank : all)
    for (ParameterId p = 0; p < added.size(); ++p) added[p] = added[p] || rank.known[p].added > 0;
  for (const UnitId unit : in_order()) {
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
  under_way_.push_back({unit, sums_.begin(unit, parameters, whole)});
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
    under_way_.push_back({unit, sums_.begin(unit, {}, true)});
    if (is_alone(unit)) end_sums();
  }
  end_sums();
}

// The units whose sums any rank has begun, in the common order.
std::vector<UnitId> SharedGradients::begun_in(const std::vector<Report>& all) const {
  std::vector<UnitId> units;
  for (const UnitId unit : in_order())
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
