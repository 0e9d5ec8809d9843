#include "engine/sums_in_backward.h"

#include <algorithm>
#include <ranges>
#include <utility>

#include "core/json.h"
#include "engine/plan/micro_batch_sums.h"
#include "kernels/elementwise.h"

namespace sluice::engine {
namespace {

constexpr const char* kMeeting = "the gradients of a step";

bool contains(const auto& values, const auto& value) { return std::ranges::count(values, value) > 0; }

}  // namespace

SumsInBackward::SumsInBackward(Core& core, Client client)
    : core_(core),
      client_(std::move(client)),
      order_(MicroBatchSums(false, core.plan.ranks, 1).order()),
      turns_(core.layout.units().size()),
      summed_(core.layout.parameters()),
      edits_(core.layout.units().size()) {}

SumsInBackward::~SumsInBackward() {
  if (met_ && !all_ended_) core_.fail_with("its engine was destroyed in the middle of a step");
}

void SumsInBackward::begin_step() {
  met_ = ended_ = all_ended_ = is_ahead_ = false;
  std::fill(summed_.begin(), summed_.end(), false);
  read_.clear();
}

void SumsInBackward::follow_read(UnitId unit) {
  if (!met_ && !contains(read_, unit)) read_.push_back(unit);
}

void SumsInBackward::check_add(ParameterId parameter) const {
  const std::string& name = core_.layout.spec(parameter).name;
  if (ended_)
    refuse(ErrorCode::kState,
           "a gradient of '{}' is added after the step's only micro-batch of this rank has ended, and "
           "updates in backward cannot accumulate; step before",
           name);
  if (summed_[parameter])
    refuse(ErrorCode::kState,
           "a gradient of '{}' is added in a step in which it was summed over the ranks and applied: this "
           "rank had one before, or others had one and this rank was further on; give each parameter one "
           "gradient in a step, in the same order on all ranks, or update at the end of the step",
           name);
}

bool SumsInBackward::holds_any(UnitRange units) const {
  for (UnitId unit = units.first; unit < units.end; ++unit)
    if (client_.holds(unit)) return true;
  return false;
}

std::optional<SumsInBackward::Ready> SumsInBackward::ready(UnitId unit) const {
  Ready found{unit, {}};
  for (ParameterId p = core_.layout.first_parameter(unit); p < core_.layout.end_parameter(unit); ++p)
    if (core_.gradients.has(p) && !summed_[p]) found.parameters.push_back(p);
  if (found.parameters.empty() || holds_any(core_.together(unit))) return std::nullopt;
  return found;
}

bool SumsInBackward::is_summed(UnitId unit) const {
  for (ParameterId p = core_.layout.first_parameter(unit); p < core_.layout.end_parameter(unit); ++p)
    if (summed_[p]) return true;
  return false;
}

std::optional<UnitId> SumsInBackward::under_way() const {
  return under_way_.empty() ? std::nullopt : std::optional(under_way_.front().of.unit);
}

void SumsInBackward::let_go(UnitId unit) {
  const UnitRange units = core_.together(unit);
  bool any = false;
  for (UnitId each = units.first; each < units.end; ++each) any = any || ready(each);
  if (!any) return;
  do meet();
  while (is_ahead_);
}

void SumsInBackward::end() {
  ended_ = true;
  while (!all_ended_) meet();
}

void SumsInBackward::await(UnitId unit) {
  const UnitRange units = core_.together(unit);
  const auto is_of = [&](const UnderWay& sum) {
    return units.first <= sum.of.unit && sum.of.unit < units.end;
  };
  while (std::ranges::any_of(under_way_, is_of)) meet();
}

void SumsInBackward::abandon() {
  if (met_)
    fail(ErrorCode::kState,
         "step {} is abandoned after its gradients began to be applied in backward on all ranks, which "
         "cannot be undone",
         core_.steps);
}

SumsInBackward::Brought SumsInBackward::brought() const {
  Brought own;
  own.ended = ended_;
  own.step = core_.steps;
  if (!met_) own.settings = text_of(core_.settings);
  if (!met_) own.edits = edits_;
  if (!met_) own.read = read_;
  for (UnitId unit = 0; unit < edits_.size(); ++unit) {
    if (const auto found = ready(unit)) own.ready.push_back(*found);
    if (holds_any(core_.together(unit))) own.held.push_back(unit);
  }
  if (core_.ranks->any_partitioned()) own.squares = core_.gradients.squares(summed_now());
  return own;
}

std::vector<SumsInBackward::Brought> SumsInBackward::gather() {
  const Brought own = brought();
  Json ready = Json::array();
  for (const Ready& each : own.ready) ready.push_back({each.unit, each.parameters});
  const std::string text =
      Json{{"ended", own.ended}, {"step", own.step}, {"settings", own.settings}, {"edits", own.edits},
           {"read", own.read},   {"ready", ready},   {"held", own.held}}
          .dump();
  std::vector<std::string> given;
  core_.waits.during(Waits::For::kRanks, kMeeting, [&] {
    given = core_.ranks->exchange(kMeeting, text + '\n' + own.squares, [this] { core_.serve_ranks(); });
  });
  std::vector<Brought> all;
  for (const std::string& bytes : given) all.push_back(parsed(bytes, static_cast<int>(all.size())));
  return all;
}

SumsInBackward::Brought SumsInBackward::parsed(const std::string& bytes, int rank) {
  const std::string source = fmt::format("what rank {} tells of {}", rank, kMeeting);
  const std::size_t end = bytes.find('\n');
  ensure(end != std::string::npos, "{} has no end", source);
  const Json json = parse_json(bytes.substr(0, end), source);
  Brought other;
  other.ended = json_field<bool>(json, "ended", source);
  other.step = json_field<std::uint64_t>(json, "step", source);
  other.settings = json_field<std::string>(json, "settings", source);
  other.edits = json_field<std::vector<std::uint32_t>>(json, "edits", source);
  other.read = json_field<std::vector<UnitId>>(json, "read", source);
  other.held = json_field<std::vector<UnitId>>(json, "held", source);
  other.squares = bytes.substr(end + 1);
  using Pairs = std::vector<std::pair<UnitId, std::vector<ParameterId>>>;
  for (auto& [unit, parameters] : json_field<Pairs>(json, "ready", source))
    other.ready.push_back({unit, std::move(parameters)});
  return other;
}

void SumsInBackward::compare(const std::vector<Brought>& all) const {
  const Brought& first = all.front();
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    const Brought& other = all[rank];
    if (other.step != first.step)
      refuse(ErrorCode::kState, "rank {} is in step {}, and rank 0 is in step {}; begin all at the same step",
             rank, other.step, first.step);
    if (other.settings != first.settings)
      refuse(ErrorCode::kState,
             "rank {} has begun the step with {}, and rank 0 with {}; give all ranks the same settings", rank,
             other.settings, first.settings);
    for (UnitId unit = 0; unit < first.edits.size() && unit < other.edits.size(); ++unit)
      if (other.edits[unit] != first.edits[unit])
        refuse(ErrorCode::kState,
               "unit '{}' was edited {} times on rank {}, and {} times on rank 0; edit it alike on all ranks",
               core_.name_of(unit), other.edits[unit], rank, first.edits[unit]);
  }
}

void SumsInBackward::meet() {
  finish();
  const std::vector<Brought> all = gather();
  compare(all);
  follow_turns(all);
  met_ = true;
  take_means(all);
  const std::vector<Ready> chosen = choose(all);
  for (const Ready& each : chosen) begin(each);
  all_ended_ = chosen.empty() && std::ranges::all_of(all, &Brought::ended);
  if (all_ended_) turns_.end_step();
}

void SumsInBackward::follow_turns(const std::vector<Brought>& all) {
  Turns::OfRanks read, ready;
  for (const Brought& rank : all) {
    read.push_back(rank.read);
    for (std::vector<UnitId>& units = ready.emplace_back(); const Ready& each : rank.ready)
      units.push_back(each.unit);
  }
  if (!met_) turns_.begin_step(read);
  turns_.follow(ready);
}

// What is summed now: the same on all ranks, since all have been told the same.
std::vector<SumsInBackward::Ready> SumsInBackward::choose(const std::vector<Brought>& all) {
  std::vector<bool> chosen(edits_.size());
  for (const Brought& rank : all)
    for (const Ready& each : rank.ready) chosen[each.unit] = is_ready_everywhere(all, joined(all, each.unit));
  const auto ahead = [&](const Brought& rank) {
    return !rank.ended && static_cast<std::size_t>(std::ranges::count_if(rank.ready, [&](const Ready& each) {
                            return !chosen[each.unit];
                          })) > kUnitsThatWait;
  };
  const auto stands = [&](const Brought& rank) { return rank.ended || ahead(rank); };
  while (std::ranges::all_of(all, stands) && std::ranges::any_of(all, ahead)) {
    turns_.learn();
    const std::optional<UnitId> unit = overtaken(all, chosen);
    if (!unit) break;
    chosen[*unit] = true;
  }
  is_ahead_ = ahead(all[static_cast<std::size_t>(core_.ranks->rank())]) && !std::ranges::all_of(all, stands);
  std::vector<Ready> result;
  for (const UnitId unit : turns_.order())
    if (chosen[unit]) result.push_back(joined(all, unit));
  return result;
}

// A unit of which a rank still has more to come waits for that, too: it is updated as a whole.
bool SumsInBackward::is_ready_everywhere(const std::vector<Brought>& all, const Ready& joined) {
  return std::ranges::all_of(all, [&](const Brought& rank) {
    return rank.ended || std::ranges::any_of(rank.ready, [&](const Ready& each) {
             return each.unit == joined.unit && each.parameters.size() == joined.parameters.size();
           });
  });
}

// The first in turn of the units that wait for a rank that does not hold them.
std::optional<UnitId> SumsInBackward::overtaken(const std::vector<Brought>& all,
                                                const std::vector<bool>& chosen) const {
  for (const UnitId unit : turns_.order())
    if (!chosen[unit] && !joined(all, unit).parameters.empty() &&
        std::ranges::none_of(all, [&](const Brought& rank) { return contains(rank.held, unit); }))
      return unit;
  return std::nullopt;
}

// The parameters of the unit of which any rank has a gradient.
SumsInBackward::Ready SumsInBackward::joined(const std::vector<Brought>& all, UnitId unit) {
  Ready result{unit, {}};
  for (const Brought& rank : all)
    for (const Ready& each : rank.ready)
      if (each.unit == unit)
        for (const ParameterId p : each.parameters)
          if (!contains(result.parameters, p)) result.parameters.push_back(p);
  std::ranges::sort(result.parameters);
  return result;
}

// Parameters are held until their update is due, so that it need not wait for the disk.
void SumsInBackward::begin(const Ready& ready) {
  Core& c = core_;
  const UnitId unit = ready.unit;
  c.queue.ensure_updated(unit);
  UnderWay& sum = under_way_.emplace_back();
  sum.of = ready;
  // Nobody reads a shard while it is updated: this rank reads none from now on.
  if (c.partitions_parameters(unit))
    c.pager.outdate(c.parameters[unit]);
  else
    c.pager.acquire(c.parameters[unit], Pager::Use::kRead);
  c.pager.acquire(c.gradients.holding(unit, 0), Pager::Use::kModify);
  for (const ParameterId p : ready.parameters) {
    const Array own = {c.gradients.data(p, 0), Dtype::kF32};
    if (!c.gradients.has(p)) kernels::fill(c.resources.threads, c.layout.location(p).elements, 0.0f, own);
    summed_[p] = true;
  }
  const bool whole = ready.parameters.size() == c.layout.end_parameter(unit) - c.layout.first_parameter(unit);
  const Array sums[] = {{c.gradients.sum(unit, 0, 0, 0), Dtype::kF32}};
  if (whole) c.ranks->sum_gradient(unit, 0, sums, order_, nullptr, sum.group.add());
  for (const ParameterId p : ready.parameters) {
    if (whole) break;
    const Array own[] = {{c.gradients.data(p, 0), Dtype::kF32}};
    c.ranks->sum_gradient_of(p, own, order_, sum.group.add());
  }
}

// Makes the sums that are under way the mean, of the elements that this rank updates.
void SumsInBackward::finish() {
  Core& c = core_;
  for (UnderWay& sum : under_way_) {
    const UnitId unit = sum.of.unit;
    c.wait_for_ranks("the gradient of " + c.name_of(unit), sum.group);
    const ElementRange own = c.own(unit);
    const float* const first = c.gradients.sum(unit, 0, 0, 0) + own.begin;
    for (const ParameterId p : sum.of.parameters) {
      const Layout::Location& at = c.layout.location(p);
      const std::size_t begin = std::clamp(own.begin, at.offset, at.offset + at.elements);
      const std::size_t end = std::clamp(own.end, begin, at.offset + at.elements);
      kernels::scale(c.resources.threads, end - begin, static_cast<float>(1.0 / c.plan.ranks.size),
                     {c.gradients.data(p, 0) + begin - at.offset, Dtype::kF32});
      c.gradients.sum_squares_of(c.resources.threads, p, first, own);
    }
  }
}

std::vector<ParameterId> SumsInBackward::summed_now() const {
  std::vector<ParameterId> parameters;
  for (const UnderWay& sum : under_way_)
    parameters.insert(parameters.end(), sum.of.parameters.begin(), sum.of.parameters.end());
  return parameters;
}

void SumsInBackward::take_means(const std::vector<Brought>& all) {
  Core& c = core_;
  std::vector<std::string> squares;
  for (const Brought& rank : all) squares.push_back(rank.squares);
  if (c.ranks->any_partitioned()) c.gradients.take_squares(summed_now(), squares);
  for (; !under_way_.empty(); under_way_.pop_front()) {
    const UnitId unit = under_way_.front().of.unit;
    if (const auto bad = c.gradients.not_finite(unit))
      fail(ErrorCode::kNotFinite,
           "the gradient of '{}' is not finite; its unit was not updated, and units whose backward came "
           "before were, on all ranks",
           c.layout.spec(*bad).name);
    c.pager.written(c.gradients.holding(unit, 0), c.gradients.bytes(unit, 0));
    client_.update(unit);
    c.pager.release(c.gradients.holding(unit, 0));
    if (!c.partitions_parameters(unit)) c.pager.release(c.parameters[unit]);
  }
}

}  // namespace sluice::engine
