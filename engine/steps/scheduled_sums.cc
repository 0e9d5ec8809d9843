#include <algorithm>
#include <cstring>
#include <utility>

#include "engine/steps/core.h"
#include "engine/steps/scheduled_engine.h"
#include "kernels/elementwise.h"

// How gradients become final: this rank's sums are added to those of the other ranks.
namespace sluice::engine {

// Completes this rank's part of the unit's gradient, and begins its sum over the ranks, where there are any.
void ScheduledEngine::begin_sum(const Held& held) {
  Core& c = core();
  const UnitId unit = held.access.unit;
  const std::vector<std::string> rows = rows_of_ranks(unit);
  const auto early =
      std::ranges::find(early_sums_, unit, [](const Sum& sum) { return sum.held.access.unit; });
  if (early == early_sums_.end())
    sums_of_ranks_.push_back({held, position_});
  else
    sums_of_ranks_.splice(sums_of_ranks_.end(), early_sums_, early);
  Sum& sum = sums_of_ranks_.back();
  sum.held = held;
  sum.position = position_;
  while (static_cast<int>(sum.packings.size()) < c.gradients.uses(unit)) begin_use(sum, rows);
  // Of several sums that a rank contributes, all but the first may be in memory that the next access
  // overwrites.
  if (own_sums() > 1) return finish_sums(std::nullopt);
  finish_sums(c.plan.sums_beside ? 1 : 0);
}

// A use that is final before other uses of the gradient, as that of a tied head, is summed early where its
// memory is resident. Plans of other ranks may differ in this. So exchanges that all ranks make in the same
// order, as those of touched rows, wait until the whole gradient is final.
void ScheduledEngine::begin_early_sum(const Held& held) {
  Core& c = core();
  const auto [unit, parameters, use, final, joined, chunk] = held.access;
  if (!c.ranks || !held.ends_use || !c.plan.units[unit].resident(Part::kGradient) ||
      touched_.any_by_rows(unit, use))
    return;
  auto sum = std::ranges::find(early_sums_, unit, [](const Sum& s) { return s.held.access.unit; });
  if (sum == early_sums_.end()) sum = early_sums_.insert(sum, {held, position_});
  sum->held = held;
  if (static_cast<int>(sum->packings.size()) == use) begin_use(*sum, {});
}

// Begins the sum over ranks of the next use. rows: the touched rows that each rank has reported, where it is
// summed by rows.
void ScheduledEngine::begin_use(Sum& sum, const std::vector<std::string>& rows) {
  Core& c = core();
  const UnitId unit = sum.held.access.unit;
  const int use = static_cast<int>(sum.packings.size());
  sum.packings.emplace_back();
  if (twin_ && unit == twin_->unit && use == twin_->other_use()) return;
  end_writing(unit, use, sum.held.waiting_from);
  if (!c.ranks) return;
  std::vector<Array> arrays;
  for (std::size_t below = 0; below < own_sums(); ++below)
    arrays.push_back({c.gradients.sum(unit, use, below, sum.held.waiting_from), Dtype::kF32});
  std::optional<Packing>& packing = sum.packings.back();
  std::shared_ptr<const comm::Given> given = given_[unit][static_cast<std::size_t>(use)];
  if (touched_.any_by_rows(unit, use)) {
    packing = pack(unit, use, arrays, rows);
    if (given != nullptr) given = packing->packed(*given);
  }
  c.ranks->sum_gradient(unit, use, arrays, order_, packing ? &*packing : nullptr, std::move(given),
                        sum.group.add());
}

// Completes what this rank contributes to that use.
void ScheduledEngine::end_writing(UnitId unit, int use, std::size_t waiting_from) {
  for (ParameterId p = layout().first_parameter(unit); p < layout().end_parameter(unit); ++p) {
    if (layout().spec(p).uses <= use) continue;
    add_waiting(p, use, waiting_from);
    const std::optional<std::size_t>& last = written_[p][static_cast<std::size_t>(use)].last;
    ensure(!sums_.pairwise() || !last || *last + 1 == sums_.count(),
           "the last micro-batch wrote no gradient of '{}'", layout().spec(p).name);
    if (!last) fill_sums(p, use, waiting_from);
  }
}

// The ranks exchange which rows of the unit's last use have values. Another rank may meanwhile wait for an
// update of this one, which waits for a sum that has completed; so completed sums become final here.
std::vector<std::string> ScheduledEngine::rows_of_ranks(UnitId unit) {
  Core& c = core();
  if (!c.ranks || !touched_.any_by_rows(unit, c.gradients.uses(unit) - 1)) return {};
  const std::string name = "the rows of the gradient of " + c.name_of(unit);
  const auto meanwhile = [&] {
    finish_sums(SIZE_MAX);
    c.serve_ranks();
  };
  std::vector<std::string> of_ranks;
  c.waits.during(Waits::For::kRanks, name,
                 [&] { of_ranks = c.ranks->exchange(name, touched_.own(unit), meanwhile); });
  return of_ranks;
}

// Packs the rows of that use that any rank has touched.
Packing ScheduledEngine::pack(UnitId unit, int use, const std::vector<Array>& arrays,
                              const std::vector<std::string>& rows) {
  const std::string any = TouchedRows::of_any(rows);
  for (ParameterId p = layout().first_parameter(unit); p < layout().end_parameter(unit); ++p)
    if (keeps_rows_alone(p, use)) touched_.clear_others(p, any, core().gradients.data(p, use));
  Packing packing = touched_.packing(unit, use, any);
  for (const Array& array : arrays) packing.pack(array.f32());
  return packing;
}

std::size_t ScheduledEngine::own_sums() const { return order_.arrays_of(core().plan.ranks.rank); }

// Fills with zeros where nothing was written.
void ScheduledEngine::fill_sums(ParameterId parameter, int use, std::size_t waiting_from) {
  const Layout::Location& location = layout().location(parameter);
  const std::size_t offset = core().gradients.offset(parameter, use);
  for (std::size_t below = 0; below < own_sums(); ++below) {
    float* const sum = core().gradients.sum(location.unit, use, below, waiting_from);
    kernels::fill(core().resources.threads, location.elements, 0.0f, {sum + offset, Dtype::kF32});
  }
}

// Swaps uses with the other section that has the unit: sends the one written here, and receives its own.
void ScheduledEngine::swap_uses() {
  Core& c = core();
  const UnitId unit = twin_->unit;
  const ElementRange own = c.own(unit);
  const auto elements = [&](int use) {
    const std::size_t begin = in_use(layout(), unit, use, own.begin);
    return std::span(c.gradients.sum(unit, use, 0, 0) + begin, in_use(layout(), unit, use, own.end) - begin);
  };
  TransferGroup group;
  c.sections->swap_uses(elements(twin_->own_use), elements(twin_->other_use()), group);
  c.wait_for_ranks("the gradient of " + c.name_of(unit) + " on another pipeline stage", group);
}

// Adds the further uses to the first one, for the elements that this rank updates.
void ScheduledEngine::add_uses(UnitId unit) {
  Core& c = core();
  const ElementRange own = c.own(unit);
  for (ParameterId p = layout().first_parameter(unit); p < layout().end_parameter(unit); ++p) {
    const Layout::Location& location = layout().location(p);
    const std::size_t from = std::clamp(own.begin, location.offset, location.offset + location.elements);
    const std::size_t to = std::clamp(own.end, from, location.offset + location.elements);
    for (int use = 1; use < layout().spec(p).uses; ++use) {
      const auto at = [&](int of) {
        return Array{c.gradients.data(p, of), Dtype::kF32}.at(from - location.offset);
      };
      kernels::add(c.resources.threads, to - from, at(0), at(use), at(0));
    }
  }
}

std::size_t ScheduledEngine::sums_in_frames() const {
  return static_cast<std::size_t>(std::ranges::count_if(sums_of_ranks_, [&](const Sum& sum) {
    return !core().plan.units[sum.held.access.unit].resident(Part::kGradient);
  }));
}

// Makes gradients final in the order in which their sums began, as far as these have completed. Waits until
// at most `may_go_on` of the others are in frames; nullopt: until all are final.
void ScheduledEngine::finish_sums(std::optional<std::size_t> may_go_on) {
  Core& c = core();
  while (!sums_of_ranks_.empty()) {
    Sum& first = sums_of_ranks_.front();
    if (!first.group.finished()) {
      if (may_go_on && sums_in_frames() <= *may_go_on) return;
      c.waits.during(Waits::For::kRanks, "the gradient of " + c.name_of(first.held.access.unit),
                     [&] { first.group.wait([&] { c.serve_ranks(); }); });
    }
    first.group.wait();
    const Sum sum = std::move(first);
    sums_of_ranks_.pop_front();
    finish_gradient(sum);
  }
}

void ScheduledEngine::finish_gradient(const Sum& sum) {
  Core& c = core();
  const UnitId unit = sum.held.access.unit;
  unpack(sum);
  if (twin_ && unit == twin_->unit) swap_uses();
  add_uses(unit);
  const HoldingId gradient = c.gradients.holding(unit, 0);
  for (int use = 0; use < c.gradients.uses(unit); ++use)
    for (const HoldingId other : c.gradients.holdings(unit, use)) {
      if (other == gradient) continue;
      c.pager.release(other);
      c.pager.discard(other);
    }
  const auto not_finite = round_gradient(unit);
  if (!c.plan.clip && not_finite)
    fail(ErrorCode::kNotFinite, "the gradient of '{}' is not finite", layout().spec(*not_finite).name);
  const UnitRange units = c.together(unit);
  if (!c.plan.clip && units.size() == 1) {
    enqueue(units);
    return c.pager.release(gradient);
  }
  if (c.gradient_parts.in_memory(unit)) {
    const std::size_t bytes = c.own(unit).size() * size_of(c.gradients.final_type(unit));
    std::copy_n(c.pager.data(gradient), bytes,
                c.gradient_parts.data(unit));  // null where the shard is empty
    c.pager.release(gradient);
    c.pager.discard(gradient);
  } else {
    c.pager.written(gradient, final_gradient_bytes(c.own(unit).size(), c.gradients.final_type(unit)));
    c.pager.park(gradient);  // the update streams it from its record if it has left memory
    c.pager.release(gradient);
  }
  finished_[unit] = true;
  if (!c.plan.clip && have_final_gradients(units)) enqueue(units);
}

// Unpacks the sums of packed uses, for the elements that this rank updates.
void ScheduledEngine::unpack(const Sum& sum) {
  const UnitId unit = sum.held.access.unit;
  const ElementRange own = core().own(unit);
  for (int use = 0; use < static_cast<int>(sum.packings.size()); ++use)
    if (const auto& packing = sum.packings[static_cast<std::size_t>(use)])
      packing->unpack(core().gradients.sum(unit, use, 0, 0), in_use(layout(), unit, use, own.begin),
                      in_use(layout(), unit, use, own.end));
}

// Rounds the gradient to its final type, in place. It then begins with the first element that this rank
// updates. Returns a parameter whose gradient is not finite, if any.
std::optional<ParameterId> ScheduledEngine::round_gradient(UnitId unit) {
  Core& c = core();
  Threads& threads = c.resources.threads;
  float* const base = c.gradients.sum(unit, 0, 0, 0);
  const ElementRange own = c.own(unit);
  std::memmove(base, base + own.begin, own.size() * sizeof(float));
  kernels::narrow_in_place(threads, own.size(), base, c.gradients.final_type(unit));
  for (ParameterId p = layout().first_parameter(unit); p < layout().end_parameter(unit); ++p)
    c.gradients.begin(p, squares_within(layout(), threads, p, {base, c.gradients.final_type(unit)}, own));
  return c.gradients.not_finite(unit);
}

}  // namespace sluice::engine
