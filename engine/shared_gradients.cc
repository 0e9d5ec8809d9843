#include "engine/shared_gradients.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <span>

#include "core/json.h"
#include "engine/plan/micro_batch_sums.h"
#include "kernels/elementwise.h"

namespace sluice::engine {
namespace {

template <class T>
void put(std::string& bytes, std::span<const T> values) {
  bytes.append(reinterpret_cast<const char*>(values.data()), values.size_bytes());
}

template <class T>
std::size_t get(const std::string& bytes, std::size_t at, std::span<T> values) {
  ensure(bytes.size() - at >= values.size_bytes(), "a rank has sent too little of its gradients");
  std::memcpy(values.data(), bytes.data() + at, values.size_bytes());
  return at + values.size_bytes();
}

std::string text_of(const StepSettings& settings) {
  Json groups = Json::array();
  for (const GroupSettings& group : settings.groups) {
    groups.push_back({{"learning_rate", group.learning_rate}, {"weight_decay", group.weight_decay}});
    if (group.settings != nullptr) groups.back()["settings"] = group.settings->to_json();
  }
  return Json{{"clip", settings.clip},
              {"gradient_factor", settings.gradient_factor},
              {"keep_gradients", settings.keep_gradients},
              {"clip_value", settings.clip_value},
              {"groups", groups}}
      .dump();
}

}  // namespace

SharedGradients::SharedGradients(Core& core, std::size_t micro_batches)
    : core_(core),
      order_(MicroBatchSums(core.plan.reproducible, core.plan.ranks, micro_batches).order()),
      divisor_(core.plan.ranks.size * (core.plan.reproducible ? static_cast<double>(micro_batches) : 1.0)),
      known_(core.layout.parameters()),
      edits_(core.layout.units().size()) {
  if (core.plan.reproducible)
    pairwise_.emplace(core.layout, MicroBatchSums(true, core.plan.ranks, micro_batches), core.gradients);
}

void SharedGradients::set(ParameterId parameter, const Known& known) {
  const auto there = [](const Known& of) { return of.added > 0 || of.is_shared() ? 1u : 0u; };
  there_ += there(known);
  there_ -= there(known_[parameter]);
  known_[parameter] = known;
}

void SharedGradients::add(ParameterId parameter, ConstArray gradient) {
  if (!pairwise_) make_whole(parameter);
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

void SharedGradients::end_micro_batch() {
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

// Where no gradient is left, the micro-batches of a step begin anew.
void SharedGradients::dropped(ParameterId parameter) {
  const std::size_t before = there_;
  set(parameter, {});
  if (!pairwise_) return;
  pairwise_->drop(parameter);
  if (before > 0 && there_ == 0) pairwise_->begin_step();
}

void SharedGradients::dropped_all() {
  known_.assign(known_.size(), {});
  there_ = 0;
  if (pairwise_) pairwise_->begin_step();
}

// Those elements of it that are among these of its unit.
void SharedGradients::multiply(ParameterId parameter, double factor, ElementRange within) {
  const Layout::Location& at = core_.layout.location(parameter);
  const std::size_t begin = std::clamp(within.begin, at.offset, at.offset + at.elements);
  const std::size_t end = std::clamp(within.end, begin, at.offset + at.elements);
  kernels::scale(core_.resources.threads, end - begin, static_cast<float>(factor),
                 {core_.gradients.data(parameter, 0) + begin - at.offset, Dtype::kF32});
}

// For a rank that has added nothing to a parameter that others have added to. A shared gradient is whole
// then.
void SharedGradients::bring_nothing(ParameterId parameter) {
  if (!known_[parameter].is_shared())
    kernels::fill(core_.resources.threads, core_.layout.location(parameter).elements, 0.0f,
                  {core_.gradients.data(parameter, 0), Dtype::kF32});
  else if (core_.gradients.factor(parameter) != 1)
    multiply(parameter, core_.gradients.factor(parameter),
             {0, core_.layout.unit_elements(core_.layout.location(parameter).unit)});
}

std::string SharedGradients::bytes_of(const Brought& brought) const {
  std::string bytes;
  put(bytes, std::span(&brought.wish, 1));
  put(bytes, std::span(&brought.wanted, 1));
  put(bytes, std::span(&brought.step, 1));
  put(bytes, std::span(&brought.micro_batches, 1));
  put(bytes, std::span(brought.known));
  put(bytes, std::span(brought.edits));
  return bytes + brought.settings;
}

SharedGradients::Brought SharedGradients::brought_in(const std::string& bytes) const {
  Brought brought;
  brought.known.resize(known_.size());
  brought.edits.resize(edits_.size());
  std::size_t at = get(bytes, 0, std::span(&brought.wish, 1));
  at = get(bytes, at, std::span(&brought.wanted, 1));
  at = get(bytes, at, std::span(&brought.step, 1));
  at = get(bytes, at, std::span(&brought.micro_batches, 1));
  at = get(bytes, at, std::span(brought.known));
  at = get(bytes, at, std::span(brought.edits));
  brought.settings = bytes.substr(at);
  return brought;
}

bool SharedGradients::any_added() const {
  return std::ranges::any_of(known_, [](const Known& known) { return known.added > 0; });
}

void SharedGradients::use() {
  while (any_added()) meet(Wish::kUse);
}

void SharedGradients::make_whole(ParameterId parameter) {
  while (known_[parameter].shared == Sum::kOwnShard) meet(Wish::kWhole, {}, parameter);
}

void SharedGradients::step(const StepSettings& settings) {
  const std::string text = text_of(settings);
  while (!meet(Wish::kStep, text)) {
  }
  met_ = false;
  if (pairwise_) pairwise_->begin_step();
}

void SharedGradients::abandon() {
  if (met_ && core_.ranks) meet(Wish::kAbandon);
  met_ = false;
  dropped_all();
}

std::vector<SharedGradients::Brought> SharedGradients::gather(const Brought& own) {
  if (!core_.ranks) return {own};
  const std::string name = "the gradients of a step";
  std::vector<std::string> given;
  core_.waits.during(Waits::For::kRanks, name, [&] {
    given = core_.ranks->exchange(name, bytes_of(own), [this] { core_.serve_ranks(); });
  });
  std::vector<Brought> all;
  for (const std::string& bytes : given) all.push_back(brought_in(bytes));
  return all;
}

bool SharedGradients::meet(Wish wish, const std::string& settings, ParameterId wanted) {
  const std::size_t ended = pairwise_ ? pairwise_->ended() : 0;
  const std::vector<Brought> all = gather({wish, wanted, core_.steps, ended, known_, edits_, settings});
  const auto wants = [](Wish what) { return [what](const Brought& rank) { return rank.wish == what; }; };
  const auto abandons = std::ranges::find_if(all, wants(Wish::kAbandon));
  if (abandons != all.end()) {
    met_ = false;
    if (wish == Wish::kAbandon) return false;
    refuse(ErrorCode::kState,
           "rank {} has abandoned the step after its gradients were summed; abandon it on this rank, too",
           abandons - all.begin());
  }
  if (std::ranges::any_of(all, wants(Wish::kWhole))) {
    gather_wanted(all);
    return false;
  }
  met_ = true;
  compare(all);
  sum(all);
  return std::ranges::all_of(all, wants(Wish::kStep));
}

void SharedGradients::compare(const std::vector<Brought>& all) const {
  const Brought* steps = nullptr;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    const Brought& other = all[rank];
    if (other.step != all[0].step)
      refuse(ErrorCode::kState, "rank {} is in step {}, and rank 0 is in step {}; begin all at the same step",
             rank, other.step, all[0].step);
    for (UnitId unit = 0; unit < edits_.size(); ++unit)
      if (other.edits[unit] != all[0].edits[unit])
        refuse(ErrorCode::kState,
               "unit '{}' was edited {} times on rank {}, and {} times on rank 0; edit it alike on all ranks",
               core_.name_of(unit), other.edits[unit], rank, all[0].edits[unit]);
    compare_shared(all[0], other, rank);
    if (other.wish != Wish::kStep) continue;
    if (steps != nullptr && other.settings != steps->settings)
      refuse(ErrorCode::kState,
             "rank {} steps with {}, and rank {} with {}; give all ranks the same settings", rank,
             other.settings, steps - all.data(), steps->settings);
    steps = &other;
  }
  if (pairwise_)
    compare_micro_batches(all);
  else
    compare_counts(all);
}

// Gradients that nobody has added to since they were used are used again, in whatever micro-batch.
void SharedGradients::compare_micro_batches(const std::vector<Brought>& all) const {
  const auto has = [](const Brought& rank) {
    return std::ranges::any_of(rank.known, [](const Known& known) { return known.added > 0; });
  };
  if (std::ranges::none_of(all, has)) return;
  for (std::size_t rank = 0; rank < all.size(); ++rank)
    if (all[rank].micro_batches != pairwise_->count())
      refuse(ErrorCode::kState,
             "gradients are used after {} micro-batches of rank {}, and a step has {} of each rank; with a "
             "reproducible plan use them when all have ended",
             all[rank].micro_batches, rank, pairwise_->count());
}

void SharedGradients::compare_shared(const Brought& first, const Brought& other, std::size_t rank) const {
  for (ParameterId p = 0; p < known_.size(); ++p) {
    const Known &a = first.known[p], &b = other.known[p];
    const std::string& name = core_.layout.spec(p).name;
    if (a.is_shared() != b.is_shared())
      refuse(ErrorCode::kState,
             "the summed gradient of '{}' was dropped on rank {}, and is there on rank {}; drop it on all",
             name, a.is_shared() ? rank : 0, a.is_shared() ? 0 : rank);
    // By their bits: what is not a number is alike, too.
    if (a.is_shared() && std::bit_cast<std::uint64_t>(a.factor) != std::bit_cast<std::uint64_t>(b.factor))
      refuse(
          ErrorCode::kState,
          "the gradient of '{}' was multiplied by {} on rank {}, and by {} on rank 0; multiply it alike on "
          "all ranks",
          name, b.factor, rank, a.factor);
  }
}

// Ranks may differ in what a parameter got (an expert to which no token was sent), and not in how many
// micro-batches there were, of which the parameter that got most tells.
void SharedGradients::compare_counts(const std::vector<Brought>& all) const {
  const auto most = [](const Brought& rank) {
    return std::ranges::max_element(rank.known, {}, &Known::added) - rank.known.begin();
  };
  const auto p = static_cast<ParameterId>(most(all[0]));
  const std::uint32_t count = all[0].known[p].added;
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    const auto other = static_cast<ParameterId>(most(all[rank]));
    if (all[rank].known[other].added != count)
      refuse(ErrorCode::kState,
             "'{}' got {} gradients on rank {}, the most of all there, and '{}' got {} on rank 0; compute as "
             "many micro-batches on each rank before gradients are used",
             core_.layout.spec(other).name, all[rank].known[other].added, rank, core_.layout.spec(p).name,
             count);
  }
}

void SharedGradients::gather_wanted(const std::vector<Brought>& all) {
  for (std::size_t rank = 0; rank < all.size(); ++rank)
    for (std::size_t other = 0; all[rank].wish == Wish::kWhole && other < all.size(); ++other)
      if (!all[other].known[all[rank].wanted].is_shared())
        refuse(ErrorCode::kState,
               "rank {} reads the summed gradient of '{}' or adds to it, which was dropped on rank {}, and "
               "each rank "
               "has a part of it; drop it on all, after that",
               rank, core_.layout.spec(static_cast<ParameterId>(all[rank].wanted)).name, other);
  for (const Brought& rank : all)
    if (rank.wish == Wish::kWhole) gather_whole(static_cast<ParameterId>(rank.wanted));
}

void SharedGradients::gather_whole(ParameterId parameter) {
  if (known_[parameter].shared == Sum::kWhole) return;  // two ranks want it
  const UnitId unit = core_.layout.location(parameter).unit;
  core_.queue.ensure_updated(unit);  // a pending update owns the gradient
  const HoldingId holding = core_.gradients.holding(unit, 0);
  core_.pager.acquire(holding, Pager::Use::kModify);
  TransferGroup group;
  core_.ranks->gather_gradient_of(parameter, {core_.gradients.data(parameter, 0), Dtype::kF32}, group.add());
  core_.wait_for_ranks("the gradient of " + core_.name_of(unit), group);
  core_.pager.written(holding, core_.gradients.bytes(unit, 0));
  core_.pager.release(holding);
  known_[parameter].shared = Sum::kWhole;
}

void SharedGradients::sum(const std::vector<Brought>& all) {
  std::vector<bool> added(known_.size());
  for (const Brought& rank : all)
    for (ParameterId p = 0; p < added.size(); ++p) added[p] = added[p] || rank.known[p].added > 0;
  std::vector<ParameterId> summed;
  for (ParameterId p = 0; p < added.size(); ++p)
    if (added[p]) summed.push_back(p);
  for (UnitId unit = 0; unit < edits_.size(); ++unit)
    if (std::find(added.begin() + core_.layout.first_parameter(unit),
                  added.begin() + core_.layout.end_parameter(unit),
                  true) != added.begin() + core_.layout.end_parameter(unit))
      sum_unit(unit, added);
  core_.gather_squares(summed);
}

// One sum for the whole unit, unless it has a shared gradient that nobody has added to.
void SharedGradients::sum_unit(UnitId unit, const std::vector<bool>& added) {
  core_.queue.ensure_updated(unit);
  const std::vector<HoldingId>& holdings = core_.gradients.holdings(unit, 0);
  for (const HoldingId holding : holdings) core_.pager.acquire(holding, Pager::Use::kModify);
  bool whole = true;
  std::vector<ParameterId> summed;
  for (ParameterId p = core_.layout.first_parameter(unit); p < core_.layout.end_parameter(unit); ++p) {
    if (added[p]) summed.push_back(p);
    whole = whole && (added[p] || !known_[p].is_shared());
    if (added[p] && pairwise_) pairwise_->complete(core_.resources.threads, p);
    if (added[p] && !pairwise_ && known_[p].added == 0) bring_nothing(p);
  }
  if (core_.ranks) sum_over_ranks(unit, summed, whole);
  finish(unit, summed);
  core_.pager.written(holdings.front(), core_.gradients.bytes(unit, 0));
  for (const HoldingId holding : holdings) {
    core_.pager.release(holding);
    if (holding != holdings.front() && !core_.pager.held(holding)) core_.pager.discard(holding);
  }
}

// Makes sums the mean, of the elements that this rank has.
void SharedGradients::finish(UnitId unit, const std::vector<ParameterId>& parameters) {
  const bool parts = core_.ranks && core_.ranks->partitioned();
  const ElementRange own = core_.own(unit);
  const float* const first = core_.gradients.sum(unit, 0, 0, 0) + own.begin;
  for (const ParameterId p : parameters) {
    multiply(p, 1 / divisor_, own);
    core_.gradients.sum_squares_of(core_.resources.threads, p, first, own);
    set(p, {0, parts ? Sum::kOwnShard : Sum::kWhole, 1});
    if (pairwise_) pairwise_->drop(p);
  }
}

void SharedGradients::sum_over_ranks(UnitId unit, const std::vector<ParameterId>& parameters, bool whole) {
  const auto sums = [&](std::size_t offset) {
    std::vector<Array> arrays;
    for (std::size_t i = 0; i < order_.arrays[static_cast<std::size_t>(core_.plan.ranks.rank)]; ++i)
      arrays.push_back({core_.gradients.sum(unit, 0, i, 0) + offset, Dtype::kF32});
    return arrays;
  };
  TransferGroup group;
  if (whole) core_.ranks->sum_gradient(unit, 0, sums(0), order_, group.add());
  for (const ParameterId p : parameters)
    if (!whole) core_.ranks->sum_gradient_of(p, sums(core_.gradients.offset(p, 0)), order_, group.add());
  core_.wait_for_ranks("the gradient of " + core_.name_of(unit), group);
}

}  // namespace sluice::engine
