#include "engine/steps/sums_in_backward.h"

#include <algorithm>
#include <bit>
#include <numeric>
#include <ranges>
#include <set>
#include <utility>

#include "core/json.h"
#include "engine/plan/micro_batch_sums.h"

namespace sluice::engine {
namespace {

constexpr const char* kExchange = "the gradients of a step";
// Ranks agree on the order of units in the first step by what they have read, and in the second by what
// became ready.
constexpr int kAgreements = 2;

bool contains(const auto& values, const auto& value) { return std::ranges::count(values, value) > 0; }

// Merges `orders` into one order of all units. Of the units that may come next, the first one in `order`
// does; also where `orders` contradict each other.
std::vector<UnitId> merged_order(const std::vector<UnitId>& order,
                                 const std::vector<std::vector<UnitId>>& orders) {
  std::vector<std::size_t> places(order.size());
  for (std::size_t place = 0; place < order.size(); ++place) places[order[place]] = place;
  std::vector<std::vector<UnitId>> followers(order.size());
  std::vector<std::size_t> waits_for(order.size());
  for (const std::vector<UnitId>& each : orders)
    for (std::size_t i = 1; i < each.size(); ++i) {
      followers[each[i - 1]].push_back(each[i]);
      ++waits_for[each[i]];
    }
  std::set<std::size_t> free;  // places of units that may come next
  for (const UnitId unit : order)
    if (waits_for[unit] == 0) free.insert(places[unit]);
  std::vector<UnitId> result;
  std::vector<bool> taken(order.size());
  const auto take = [&](UnitId unit) {
    taken[unit] = true;
    result.push_back(unit);
    for (const UnitId next : followers[unit])
      if (--waits_for[next] == 0 && !taken[next]) free.insert(places[next]);
  };
  for (const UnitId first : order) {
    while (!free.empty()) take(order[free.extract(free.begin()).value()]);
    if (!taken[first]) take(first);  // the orders contradict each other
  }
  return result;
}

}  // namespace

SumsInBackward::SumsInBackward(Core& core, Client client)
    : core_(core),
      client_(std::move(client)),
      sums_(core, MicroBatchSums(false, core.plan.ranks, 1).order(), core.plan.ranks.size),
      order_(core.layout.units().size()),
      place_(core.layout.units().size()),
      expected_(core.layout.parameters()),
      summed_(core.layout.parameters()),
      edits_(core.layout.units().size()) {
  std::iota(order_.rbegin(), order_.rend(), UnitId{0});
  for (ParameterId p = 0; p < expected_.size(); ++p)
    expected_[p] = core.layout.trainable(core.layout.location(p).unit);
}

SumsInBackward::~SumsInBackward() {
  if (has_exchanged_ && !all_ended_) core_.fail_with("its engine was destroyed in the middle of a step");
}

void SumsInBackward::begin_step() {
  has_exchanged_ = ended_ = all_ended_ = false;
  next_ = 0;
  let_go_.clear();
  for (ParameterId p = 0; p < summed_.size(); ++p) summed_[p] = core_.gradients.has(p);  // kept ones
  if (agreed_ == 0) proposed_.clear();
}

void SumsInBackward::dropped(ParameterId parameter) {
  if (!has_exchanged_) summed_[parameter] = false;
  for (ParameterId p = 0; p < summed_.size(); ++p)
    if (core_.gradients.has(p)) return;
  if (core_.plan.clip && all_ended_) begin_step();
}

void SumsInBackward::follow_read(UnitId unit) {
  if (agreed_ == 0 && !contains(proposed_, unit)) proposed_.push_back(unit);
}

void SumsInBackward::check_add(ParameterId parameter) const {
  const std::string& name = core_.layout.spec(parameter).name;
  if (ended_)
    refuse(
        ErrorCode::kState,
        "a gradient of '{}' is added after the step's only micro-batch of this rank has ended, and what is "
        "summed in backward is added to no more; step before{}",
        name, core_.plan.clip ? ", or ask for stage 1, or for none" : "");
  const bool had_one =
      core_.gradients.has(parameter) && contains(let_go_, core_.layout.location(parameter).unit);
  if (summed_[parameter] || had_one)
    refuse(
        ErrorCode::kState,
        "a gradient of '{}' is added in a step in which it is summed over the ranks in backward: this rank "
        "had one before, or others had one and this rank was further on; give each parameter one gradient "
        "in a step, in the same order on all ranks, {}",
        name,
        core_.plan.clip
            ? "drop what is kept of earlier steps before (zero_grad(set_to_none=True)), and where "
              "a backward has failed drop all and step, on all ranks; or ask for stage 1, or for none"
            : "or update at the end of the step");
}

bool SumsInBackward::holds_any(UnitRange units) const {
  for (UnitId unit = units.first; unit < units.end; ++unit)
    if (client_.holds(unit)) return true;
  return false;
}

std::vector<ParameterId> SumsInBackward::final_of(UnitId unit) const {
  std::vector<ParameterId> parameters;
  for (ParameterId p = core_.layout.first_parameter(unit); p < core_.layout.end_parameter(unit); ++p)
    if (core_.gradients.has(p) && !summed_[p]) parameters.push_back(p);
  if (!parameters.empty() && holds_any(core_.together(unit))) parameters.clear();
  return parameters;
}

bool SumsInBackward::is_complete(UnitId unit) const {
  for (ParameterId p = core_.layout.first_parameter(unit); p < core_.layout.end_parameter(unit); ++p)
    if (expected_[p] && !summed_[p] && !core_.gradients.has(p)) return false;
  return true;
}

bool SumsInBackward::is_summed(UnitId unit) const {
  for (ParameterId p = core_.layout.first_parameter(unit); p < core_.layout.end_parameter(unit); ++p)
    if (summed_[p]) return true;
  return false;
}

// The unit's next turn.
std::uint64_t SumsInBackward::turn_of(UnitId unit) const {
  const std::uint64_t units = place_.size(), turn = next_ / units * units + place_[unit];
  return turn < next_ ? turn + units : turn;
}

std::vector<UnitId> SumsInBackward::waiting() const {
  std::vector<UnitId> units;
  for (const UnitId unit : let_go_)
    if (!final_of(unit).empty() && (ended_ || unit != latest_ || is_complete(unit))) units.push_back(unit);
  std::ranges::sort(units, {}, [this](UnitId unit) { return turn_of(unit); });
  return units;
}

bool SumsInBackward::takes_part() const {
  const std::vector<UnitId> units = waiting();
  if (units.empty()) return false;
  return (agreed_ < kAgreements && !has_exchanged_) || units.size() > kUnitsThatWait ||
         (is_next(turn_of(units.front())) && is_complete(units.front()));
}

// Whether no unit with expected gradients has its turn before this one.
bool SumsInBackward::is_next(std::uint64_t turn) const {
  for (std::uint64_t before = next_; before < turn; ++before) {
    const UnitId unit = order_[before % order_.size()];
    for (ParameterId p = core_.layout.first_parameter(unit); p < core_.layout.end_parameter(unit); ++p)
      if (expected_[p]) return false;
  }
  return true;
}

void SumsInBackward::let_go(UnitId unit) {
  const UnitRange units = core_.together(unit);
  for (UnitId each = units.first; each < units.end; ++each) {
    if (final_of(each).empty()) continue;
    if (!contains(let_go_, each)) let_go_.push_back(each);
    latest_ = each;
    if (agreed_ == 1 && !contains(proposed_, each)) proposed_.push_back(each);
  }
  while (takes_part()) exchange();
}

void SumsInBackward::end() {
  if (all_ended_) return;
  ended_ = true;
  while (!all_ended_) exchange();
  learn_expected();
}

// Expects the parameters that have had a gradient on any rank, in any step so far.
void SumsInBackward::learn_expected() {
  if (!std::exchange(has_learned_, true)) std::fill(expected_.begin(), expected_.end(), false);
  for (ParameterId p = 0; p < expected_.size(); ++p) expected_[p] = expected_[p] || summed_[p];
}

void SumsInBackward::await(UnitId unit) {
  const UnitRange units = core_.together(unit);
  while (sum_ && units.first <= sum_->unit && sum_->unit < units.end) exchange();
}

void SumsInBackward::abandon() {
  if (has_exchanged_ && core_.plan.clip)
    fail(ErrorCode::kState,
         "step {} is abandoned after ranks began to sum its gradients in backward, which all of them would "
         "have to end; ask for stage 1, or for none, at which they can",
         core_.steps);
  if (has_exchanged_)
    fail(ErrorCode::kState,
         "step {} is abandoned after its gradients began to be applied in backward on all ranks, which "
         "cannot be undone",
         core_.steps);
}

SumsInBackward::Report SumsInBackward::report() const {
  Report own;
  const std::vector<UnitId> units = waiting();
  own.ended = ended_;
  own.has_zeros = ended_ || units.size() > kUnitsThatWait;
  own.step.step = core_.steps;
  if (!units.empty() && (own.has_zeros || is_complete(units.front()))) {
    own.turn = turn_of(units.front());
    own.parameters = final_of(units.front());
  }
  if (!has_exchanged_) own.step = {core_.steps, edits_, text_of(core_.settings)};
  if (!has_exchanged_ && agreed_ < kAgreements) own.order = proposed_;
  if (agreed_ == 0) std::ranges::reverse(own.order);
  if (sum_ && core_.ranks->any_partitioned()) own.squares = core_.gradients.squares(sum_->parameters);
  return own;
}

std::vector<SumsInBackward::Report> SumsInBackward::gather() {
  const Report own = report();
  const std::string text = Json{{"ended", own.ended},      {"has_zeros", own.has_zeros},
                                {"step", own.step.step},   {"settings", own.step.settings},
                                {"edits", own.step.edits}, {"order", own.order},
                                {"turn", own.turn},        {"parameters", own.parameters}}
                               .dump();
  std::vector<std::string> given;
  core_.waits.during(Waits::For::kRanks, kExchange, [&] {
    given = core_.ranks->exchange(kExchange, text + '\n' + own.squares, [this] { core_.serve_ranks(); });
  });
  std::vector<Report> all;
  for (const std::string& bytes : given) all.push_back(parsed(bytes, static_cast<int>(all.size())));
  return all;
}

SumsInBackward::Report SumsInBackward::parsed(const std::string& bytes, int rank) const {
  const std::string source = fmt::format("what rank {} reports of {}", rank, kExchange);
  const std::size_t end = bytes.find('\n');
  const Json json = parse_json(bytes.substr(0, end), source);
  if (json.contains("steps_with")) fail_apart(rank);
  Report other;
  other.ended = json_field<bool>(json, "ended", source);
  other.has_zeros = json_field<bool>(json, "has_zeros", source);
  other.step.step = json_field<std::uint64_t>(json, "step", source);
  other.step.settings = json_field<std::string>(json, "settings", source);
  other.step.edits = json_field<std::vector<std::uint32_t>>(json, "edits", source);
  other.order = json_field<std::vector<UnitId>>(json, "order", source);
  other.turn = json_field<std::uint64_t>(json, "turn", source);
  other.parameters = json_field<std::vector<ParameterId>>(json, "parameters", source);
  other.squares = bytes.substr(end + 1);
  return other;
}

void SumsInBackward::exchange() {
  if (sum_) core_.wait_for_ranks("the gradient of " + core_.name_of(sum_->unit), sum_->group);
  if (sum_) sums_.finish(sum_->unit, sum_->parameters);
  const std::vector<Report> all = gather();
  std::vector<StepOfRank> steps;
  for (const Report& report : all) steps.push_back(report.step);
  require_alike(core_.layout, steps);
  const bool is_first = !std::exchange(has_exchanged_, true);
  take_mean(all);
  if (is_first && agreed_ < kAgreements) return agree(all);
  begin_next(all);
  all_ended_ = !sum_ && std::ranges::all_of(all, &Report::ended);
}

void SumsInBackward::agree(const std::vector<Report>& all) {
  std::vector<std::vector<UnitId>> orders;
  for (const Report& rank : all) orders.push_back(rank.order);
  order_ = merged_order(order_, orders);
  for (std::size_t place = 0; place < order_.size(); ++place) place_[order_[place]] = place;
  ++agreed_;
  proposed_ = agreed_ == 1 ? waiting() : std::vector<UnitId>();
}

// Begins the same sum on all ranks, since all have the same reports. If a rank has not reached the unit, and
// may still get a gradient of it, no sum begins.
void SumsInBackward::begin_next(const std::vector<Report>& all) {
  const std::uint64_t turn = std::ranges::min(all, {}, &Report::turn).turn;
  const auto has_come = [&](const Report& rank) { return rank.turn == turn || rank.has_zeros; };
  if (turn == kNever || !std::ranges::all_of(all, has_come)) return;
  std::vector<ParameterId> parameters;  // with a gradient on any rank
  for (const Report& rank : all)
    if (rank.turn == turn)
      parameters.insert(parameters.end(), rank.parameters.begin(), rank.parameters.end());
  std::ranges::sort(parameters);
  parameters.erase(std::ranges::unique(parameters).begin(), parameters.end());
  next_ = turn + 1;
  begin(order_[turn % order_.size()], parameters);
}

void SumsInBackward::begin(UnitId unit, const std::vector<ParameterId>& parameters) {
  Core& c = core_;
  for (ParameterId p = c.layout.first_parameter(unit); p < c.layout.end_parameter(unit); ++p)
    if (c.gradients.has(p) && !summed_[p] && !contains(parameters, p))
      fail(
          ErrorCode::kState,
          "the gradient of '{}' is summed on the other ranks, and this one still adds to its unit '{}' while "
          "{} later units wait; give gradients in the same order on all ranks, or {}",
          c.layout.spec(p).name, c.name_of(unit), waiting().size(),
          core_.plan.clip ? "ask for stage 1, or for none" : "update at the end of the step");
  c.queue.ensure_updated(unit);
  // No shard may be read while it is updated: this rank reads none from now on, or from the step's end.
  if (c.partitions_parameters(unit) && !c.plan.clip) {
    c.pager.outdate(c.parameters[unit]);
    c.await_copies(unit);
  } else if (holds_parameters(unit)) {
    c.pager.acquire(c.parameters[unit], Pager::Use::kRead);
  }
  c.pager.acquire(c.gradients.holding(unit, 0), Pager::Use::kModify);
  for (const ParameterId p : parameters) {
    if (!c.gradients.has(p)) c.gradients.fill_with_zeros(c.resources.threads, p);
    summed_[p] = true;
  }
  std::erase(let_go_, unit);
  const bool whole = parameters.size() == c.layout.end_parameter(unit) - c.layout.first_parameter(unit);
  sum_.emplace(Sum{unit, parameters, sums_.begin(unit, parameters, whole)});
}

void SumsInBackward::take_mean(const std::vector<Report>& all) {
  if (!sum_) return;
  Core& c = core_;
  std::vector<std::string> squares;
  for (const Report& rank : all) squares.push_back(rank.squares);
  if (c.ranks->any_partitioned()) c.gradients.take_squares(sum_->parameters, squares);
  const UnitId unit = sum_->unit;
  const std::vector<ParameterId> parameters = std::move(sum_->parameters);
  sum_.reset();
  // Updates at the step's end check all gradients first.
  if (const auto bad = c.plan.clip ? std::nullopt : c.gradients.not_finite(unit))
    fail(ErrorCode::kNotFinite,
         "the gradient of '{}' is not finite; its unit was not updated, and units whose backward came before "
         "were, on all ranks",
         c.layout.spec(*bad).name);
  c.pager.written(c.gradients.holding(unit, 0), c.gradients.bytes(unit, 0));
  if (c.plan.clip)
    c.keep_gradient_shard(unit, parameters);
  else
    client_.update(unit);
  c.pager.release(c.gradients.holding(unit, 0));
  if (c.keeps_gradient_part(unit)) c.pager.discard(c.gradients.holding(unit, 0));
  if (holds_parameters(unit)) c.pager.release(c.parameters[unit]);
}

void SumsInBackward::agree(const StepSettings& settings) {
  Json factors = Json::array();  // as bits, so that equal NaNs are alike
  for (ParameterId p = 0; p < core_.layout.parameters(); ++p)
    factors.push_back(core_.gradients.has(p) ? Json(std::bit_cast<std::uint64_t>(core_.gradients.factor(p)))
                                             : Json());
  const Json own = {{"step", core_.steps}, {"factors", factors}, {"steps_with", text_of(settings)}};
  const std::vector<std::string> given =
      core_.ranks->exchange("how ranks step", own.dump(), [this] { core_.serve_ranks(); });
  std::vector<StepOfRank> steps;
  Json first;
  for (const std::string& text : given) {
    const auto rank = static_cast<int>(steps.size());
    const Json other =
        parse_json(text.substr(0, text.find('\n')), "how rank " + std::to_string(rank) + " steps");
    if (!other.contains("steps_with")) fail_apart(rank);
    if (rank == 0) first = other.at("factors");
    compare(other.at("factors"), first, rank);
    steps.push_back({core_.steps, {}, other.at("steps_with").get<std::string>()});
  }
  require_alike(core_.layout, steps);
}

void SumsInBackward::compare(const Json& factors, const Json& of_first, int rank) const {
  for (ParameterId p = 0; p < core_.layout.parameters(); ++p) {
    const std::string& name = core_.layout.spec(p).name;
    const Json &other = factors.at(p), &first = of_first.at(p);
    if (other == first) continue;
    if (other.is_null() || first.is_null())
      refuse(ErrorCode::kState,
             "rank {} has {} gradient of '{}', and rank 0 has {}: drop a gradient on all ranks, or on none",
             rank, other.is_null() ? "no" : "a", name, first.is_null() ? "none" : "one");
    const auto factor = [](const Json& bits) { return std::bit_cast<double>(bits.get<std::uint64_t>()); };
    refuse(
        ErrorCode::kState,
        "the gradient of '{}' was multiplied by {} on rank {}, and by {} on rank 0; multiply it alike on all "
        "ranks",
        name, factor(other), rank, factor(first));
  }
}

// One rank steps, while another computes a micro-batch again, whose gradients it alone has dropped.
void SumsInBackward::fail_apart(int rank) const {
  fail(ErrorCode::kState,
       "rank {} and this one are apart: one of them steps, and the other one sums gradients of another "
       "micro-batch, as after gradients that it has dropped alone; step, or drop gradients, on all ranks "
       "alike",
       rank);
}

}  // namespace sluice::engine
