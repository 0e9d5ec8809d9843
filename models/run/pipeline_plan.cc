#include "models/run/pipeline_plan.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "core/bytes.h"
#include "core/error.h"
#include "engine/layout/kind.h"
#include "engine/planner/planner.h"
#include "engine/ranks/agreement.h"

namespace sluice::models {
namespace {

// The most cuts that are planned with items of one size, for a model that hardly fits, before one fits.
constexpr int kMostCuts = 20;
// And the most after the first one that fits.
constexpr int kMostBetterCuts = 10;
// A step that is shorter by less than this fraction is no reason to take another cut.
constexpr double kBetter = 0.005;
// A cut whose step takes so many times as long as the best one's is not improved.
constexpr double kMostGain = 2;
// A section whose planned time is so many times its computing time waits for its disk, or for other ranks.
constexpr double kWaits = 1.02;

// Returns the possible numbers of micro-batches per item, ascending.
std::vector<std::size_t> group_sizes(const TrainSettings& s, std::size_t micro_batches) {
  if (s.plan.group && (*s.plan.group == 0 || *s.plan.group > micro_batches))
    fail(ErrorCode::kInvalidArgument, "a group of {} micro-batches is asked for, and a step has {}",
         *s.plan.group, micro_batches);
  if (s.plan.group) return {*s.plan.group};
  std::vector<std::size_t> sizes;
  for (std::size_t size = 1; size < micro_batches; size *= 2)
    if (divide_up(micro_batches, size) <= engine::kMostItems) sizes.push_back(size);
  sizes.push_back(micro_batches);
  return sizes;
}

// Returns a lower bound for a section's parameters and all that is kept for them from step to step.
std::uint64_t resident_bytes(const engine::Layout& layout, const optim::Optimizer& optimizer, bool clips,
                             engine::UnitRange units) {
  const std::vector<optim::StateArray> state = optimizer.state();
  std::uint64_t bytes = 0;
  for (engine::UnitId unit = units.first; unit < units.end; ++unit) {
    const std::size_t size = size_of(layout.dtype(unit));
    const bool has_master = optimizer.keeps_master() && layout.dtype(unit) != Dtype::kF32;
    for (const engine::ParameterSpec& spec : layout.units()[unit].parameters) {
      std::size_t each = size + (has_master ? sizeof(float) : 0) + (clips ? size : 0);  // with its gradient
      for (std::size_t array = 0; array < state.size(); ++array)
        if (optimizer.keeps(array, engine::kind_of(spec))) each += size_of(state[array].type);
      bytes += spec.elements() * each;
    }
  }
  return bytes;
}

// Returns a lower bound for the activations that a section keeps, with items of `group` micro-batches.
std::uint64_t least_activations(const engine::Profile& profile, const engine::ItemsHeld& items,
                                std::size_t group, engine::UnitRange units) {
  std::uint64_t bytes = 0;
  for (engine::UnitId unit = units.first; unit < units.end; ++unit)
    bytes += group * engine::activation_bytes(profile.unit_profiles[unit],
                                              profile.unit_profiles[unit].choices.size() - 1, items);
  return bytes;
}

// The common inputs of the plans of all sections of all cuts.
struct Whole {
  const PlanResult& plan;
  const TrainSettings& s;
  const Model& model;
  const optim::Optimizer& optimizer;
  const kernels::MatrixLibrary& library;
  std::vector<engine::SectionSeconds> seconds;  // of a micro-batch, by unit

  engine::Pipeline pipeline(std::size_t group) const {
    return {s.pipeline, sections_of(s), divide_up(plan.profile.micro_batches, group), s.chunks};
  }
};

// The units of a section for which no plan was found with items of one size, and with one chunk, so that it
// cannot have more either.
struct Misfit {
  int section = 0;
  engine::UnitRange units;

  bool is_in(int other, engine::UnitRange range) const {
    return section == other && range.first <= units.first && units.end <= range.end;
  }
};

// Returns the cut with the shortest step by these seconds of an item's micro-batch, for items of `group`
// micro-batches; nothing where no cut is left.
std::vector<engine::UnitRange> choose_cut(const Whole& whole, std::size_t group,
                                          const std::vector<engine::SectionSeconds>& seconds,
                                          const std::vector<Misfit>& misfits) {
  const auto& [plan, s, model, optimizer, library, computed] = whole;
  const std::size_t blocks = model.units().size() - 2;
  const int sections = sections_of(s);
  const std::size_t chunks = s.chunks * static_cast<std::size_t>(sections);
  const std::string in_chunks = s.chunks > 1 ? fmt::format(" of {} chunks each (--chunks)", s.chunks) : "";
  if (s.stages) {
    std::vector<engine::UnitRange> cut = engine::parse_cut(*s.stages, blocks);
    if (cut.size() != chunks)
      fail(ErrorCode::kInvalidArgument,
           "--stages '{}' has {} groups of blocks, and --mesh has {} stages along pipeline{}: give {}{}",
           *s.stages, cut.size(), sections, in_chunks, chunks,
           s.chunks > 1 ? ", the first ones of all stages, then the second ones" : "");
    return cut;
  }
  if (chunks > blocks)
    fail(ErrorCode::kInvalidArgument,
         "a pipeline of {} stages{} is asked for, and the model has {} blocks, of which each needs one",
         sections, in_chunks, blocks);
  const engine::Layout layout(model.units());
  const std::uint64_t memory = plan.budget.memory - std::min(plan.budget.memory, plan.budget.base);
  // The best cut hardly depends on the number of items beyond this one, and a simulation's time is
  // proportional to it.
  const std::size_t items = divide_up(plan.profile.micro_batches, group);
  const engine::Pipeline pipeline{s.pipeline, sections,
                                  std::min<std::size_t>(items, std::max(16, 2 * sections)), s.chunks};
  std::vector<engine::ItemsHeld> held;  // by section, for its chunk with the most items in memory
  for (int section = 0; section < sections; ++section) {
    const engine::PipelineBuffers buffers = engine::buffers_of(pipeline, section);
    held.push_back({std::ranges::max(engine::items_held(pipeline, section)), buffers.kept_for_weights,
                    buffers.left_for_weights});
  }
  const auto may_fit = [&](int section, engine::UnitRange units) {
    return std::ranges::none_of(misfits, [&](const Misfit& misfit) { return misfit.is_in(section, units); });
  };
  const bool may_share = section_ranks(s).size > 1;
  // Chunks of a section have equal shares of its memory.
  const auto fits = [&](int section, engine::UnitRange units) {
    if (!may_fit(section, units)) return false;
    // What else stays from step to step may be on disk, or with other ranks.
    const std::uint64_t resident =
        plan.budget.disk > 0 || may_share ? 0 : resident_bytes(layout, optimizer, plan.request.clip, units);
    return resident +
               least_activations(plan.profile, held[static_cast<std::size_t>(section)], group, units) <=
           memory / s.chunks;
  };
  std::vector<engine::UnitRange> cut = engine::cut(pipeline, seconds, fits);
  if (cut.empty()) cut = engine::cut(pipeline, seconds, may_fit);  // the plans are more exact
  return cut;
}

// The plan of a section with items of one size.
struct SectionPlan {
  engine::Profile profile;
  std::optional<engine::Plan> plan;
  std::string error;                            // why there is no plan
  std::uint64_t lacks = 0;                      // missing bytes, if it does not fit
  std::vector<engine::SectionSeconds> seconds;  // per item, by chunk
  engine::OnceSeconds once;
};

// Returns the bytes of a twin's gradient that come from the other section with the twin.
std::uint64_t twin_bytes(const SectionPlan& of) {
  return of.plan->step_bytes_from_sections - of.profile.whole_step->received;
}

// Computes the seconds of a section by its plan, distributed in proportion to those of the units.
void find_seconds(SectionPlan& of, const TrainSettings& s, int section,
                  const std::vector<engine::SectionSeconds>& units,
                  const std::vector<engine::UnitRange>& chunks) {
  const engine::StepTime& time = of.plan->time;
  const int sections = sections_of(s), next = (section + 1) % sections;
  const double message =
      engine::link_seconds(of.plan->group * of.profile.border_gradient_bytes, link_between(s, section, next));
  double sum = 0;
  for (const engine::UnitRange& range : chunks) {
    engine::SectionSeconds& own = of.seconds.emplace_back();
    own.message = message;
    for (engine::UnitId unit = range.first; unit < range.end; ++unit) {
      own.forward += units[unit].forward;
      own.backward += units[unit].backward;
      own.weights += units[unit].weights;
    }
    sum += own.forward + own.backward;
  }
  // Time beside computing, for example for moving units, is distributed evenly.
  const auto items = static_cast<double>(divide_up(of.profile.micro_batches, of.plan->group));
  const double factor = time.passes() / items / sum;
  for (engine::SectionSeconds& own : of.seconds)
    for (double engine::SectionSeconds::*const each :
         {&engine::SectionSeconds::forward, &engine::SectionSeconds::backward,
          &engine::SectionSeconds::weights})
      own.*each *= factor;
  of.once = {time.updates, time.sums, 0};
  if (of.profile.twin)
    of.once.exchange = engine::link_seconds(twin_bytes(of), link_between(s, sections - 1, 0));
}

// A section that has these units, with its plans by number of micro-batches per item. The whole outlives it.
class SectionPlans {
 public:
  SectionPlans(const Whole& whole, int section, std::vector<engine::UnitRange> chunks)
      : whole_(whole),
        section_(section),
        chunks_(std::move(chunks)),
        model_(std::make_unique<Model>(whole.model, chunks_)),
        once_(model_->profile(whole.plan.profile.micro_batches, whole.library,
                              engine::hidden_bytes(whole.model.units(), whole.optimizer, whole.library),
                              engine::splits_backward(whole.s.pipeline))),
        request_(whole.plan.request),
        rates_(whole.plan.rates) {
    const TrainSettings& s = whole.s;
    const int rank = s.mesh->along(s.ranks.rank, "pipeline")[static_cast<std::size_t>(section)];
    request_.ranks = section_ranks(s, rank);
    set_links(s, rank, rates_);
  }

  std::unique_ptr<Model> take_model() { return std::move(model_); }

  // Returns the plan with items of `group` micro-batches, which is made at the first call.
  SectionPlan& with(std::size_t group) {
    const auto [at, is_new] = plans_.try_emplace(group);
    SectionPlan& planned = at->second;
    if (!is_new) return planned;
    planned.profile = engine::in_pipeline(once_, whole_.pipeline(group), section_, group);
    request_.group = group;
    try {
      planned.plan =
          engine::make_plan(planned.profile, whole_.optimizer, whole_.plan.budget, request_, rates_);
      find_seconds(planned, whole_.s, section_, whole_.seconds, chunks_);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kBudget) throw;
      planned.error = error.what();
      planned.lacks = error.lacks();
    }
    return planned;
  }

 private:
  const Whole& whole_;
  const int section_;
  const std::vector<engine::UnitRange> chunks_;
  std::unique_ptr<Model> model_;
  const engine::Profile once_;  // with the schedule of one group of micro-batches
  engine::PlanRequest request_;
  engine::MachineRates rates_;
  std::map<std::size_t, SectionPlan> plans_;
};

// A cut with items of one size, and the plans of its sections.
struct PlannedCut {
  std::vector<engine::UnitRange> cut;
  std::size_t group = 1;
  std::vector<Json> sections;  // told() by each section
  PipelinePlan pipeline;       // with times and bytes where all sections have plans

  std::vector<engine::UnitRange> units(int section) const { return pipeline.units(section); }
  double step() const { return pipeline.time.step; }
};

// Returns lower bounds of an item's seconds in each chunk of a cut, whatever its plans are.
std::vector<engine::SectionSeconds> least_of_chunks(const Whole& whole, const PlannedCut& of) {
  const double micro_batches = static_cast<double>(whole.plan.profile.micro_batches) /
                               static_cast<double>(whole.pipeline(of.group).items);  // of an item
  std::vector<engine::SectionSeconds> seconds;
  for (const engine::UnitRange& range : of.cut) {
    engine::SectionSeconds& chunk = seconds.emplace_back();
    for (engine::UnitId unit = range.first; unit < range.end; ++unit) {
      chunk.forward += micro_batches * whole.seconds[unit].forward;
      chunk.backward += micro_batches * whole.seconds[unit].backward;
      chunk.weights += micro_batches * whole.seconds[unit].weights;
    }
  }
  return seconds;
}

// Returns the data about a section that other ranks get.
Json told(const SectionPlan& of) {
  if (!of.plan) return {{"error", of.error}, {"lacks", of.lacks}};
  Json json;
  for (const engine::SectionSeconds& chunk : of.seconds)
    json["seconds"].push_back({chunk.forward, chunk.backward, chunk.message, chunk.weights});
  json["once"] = {of.once.before, of.once.after, of.once.exchange};
  json["step"] = of.plan->time.step;
  json["peak"] = of.plan->peak_memory;
  json["received"] = {of.plan->step_bytes_of_data(), of.plan->step_bytes_from_sections,
                      of.plan->step_bytes_of_layers};
  json["from_hosts"] = of.plan->step_bytes_from_hosts;
  json["twin"] = twin_bytes(of);
  return json;
}

bool is_planned(const Json& section) { return section.contains("peak"); }

// Combines what a section's ranks tell: an error of any of them, or the data of the slowest.
Json of_all_ranks(const std::vector<std::string>& told, const std::vector<int>& ranks) {
  Json all = Json::parse(told[static_cast<std::size_t>(ranks[0])]);
  for (const int rank : ranks) {
    const Json other = Json::parse(told[static_cast<std::size_t>(rank)]);
    if (!is_planned(all)) break;
    const Json peak = is_planned(other) ? std::max(all.at("peak"), other.at("peak")) : Json();
    if (!is_planned(other) || other.at("step") > all.at("step")) all = other;
    if (is_planned(other)) all["peak"] = peak;
  }
  return all;
}

// Fills in the times and bytes of the pipeline. REQUIRES: all sections have plans.
void complete(PlannedCut& of) {
  PipelinePlan& pipeline = of.pipeline;
  std::vector<engine::SectionSeconds> seconds;  // by chunk, in the model's order
  for (std::size_t chunk = 0; chunk < pipeline.pipeline.chunks; ++chunk)
    for (const Json& section : of.sections) {
      const Json& own = section.at("seconds")[chunk];
      seconds.push_back({own[0], own[1], own[2], own[3]});
    }
  std::vector<engine::OnceSeconds> once;
  for (const Json& section : of.sections) {
    const Json &own = section.at("once"), &received = section.at("received");
    once.push_back({own[0], own[1], own[2]});
    pipeline.peaks.push_back(section.at("peak"));
    pipeline.received.push_back({received[0], received[1], received[2]});
  }
  pipeline.time = engine::simulate(pipeline.pipeline, seconds, once);
}

// Returns the bytes that arrive at this rank's host from others in a step: gradients and parameters for the
// sections there, and their messages from sections elsewhere. `own`: the former for this rank's section.
std::uint64_t bytes_from_hosts(const std::vector<Json>& sections, const PipelinePlan& pipeline,
                               const TrainSettings& s, std::uint64_t own, std::uint64_t of_message) {
  const comm::Hosts hosts = s.ranks.on_hosts();
  if (hosts.all_on_one()) return 0;
  const engine::Pipeline& shape = pipeline.pipeline;
  std::uint64_t bytes = 0;
  for (int section = 0; section < shape.sections; ++section) {
    const Json& told = sections[static_cast<std::size_t>(section)];
    bool is_here = false;
    for (const int rank : ranks_of_section(s, section)) {
      if (!hosts.on_one(rank, s.ranks.rank)) continue;
      is_here = true;
      const std::vector<int> pipe = s.mesh->along(rank, "pipeline");
      const auto from = [&](int other, bool any, std::uint64_t come) {
        const int of = pipe[static_cast<std::size_t>((other + shape.sections) % shape.sections)];
        if (any && !hosts.on_one(of, rank)) bytes += come;
      };
      for (std::size_t chunk = 0; chunk < shape.chunks; ++chunk) {
        from(section - 1, !shape.begins(section, chunk), of_message);
        from(section + 1, !shape.ends(section, chunk), of_message);
      }
      from(section == 0 ? -1 : 0, true, told.at("twin"));
    }
    if (is_here) bytes += section == pipeline.section ? own : told.at("from_hosts").get<std::uint64_t>();
  }
  return bytes;
}

// Makes the parts of the plans equal that must be so on a section's ranks, and the stage of a table that two
// sections have.
void agree(PlanResult& plan, const optim::Optimizer& optimizer, RunRanks& ranks) {
  if (ranks.of_section() == nullptr) return;
  const auto plan_again = [&] {
    plan.plan = engine::make_plan(plan.profile, optimizer, plan.budget, plan.request, plan.rates);
  };
  if (ranks.shares_layers() &&
      engine::agree_on_order(*ranks.of_section(), plan.plan, plan.profile, plan.request))
    plan_again();
  engine::Plan wanted = plan.plan;
  const std::size_t own = plan.profile.twin ? wanted.units[plan.profile.twin->unit].stage : 0;
  const std::vector<std::string> twins = engine::exchange(
      *ranks.sections(), "the stage of the table of embedding and head", std::to_string(own));
  if (plan.profile.twin)
    for (const std::string& stage : twins) {
      std::size_t& highest = wanted.units[plan.profile.twin->unit].stage;
      highest = std::max<std::size_t>(highest, std::stoul(stage));
    }
  const bool differs = engine::agree_on_plan(*ranks.of_section(), wanted, plan.request);
  if (!differs && wanted.stages() == plan.plan.stages()) return;
  if (!differs) plan.request.chunk_elements = round_up(wanted.chunk_elements, engine::kChunkGrain);
  plan_again();
}

std::string name_of_units(const Model& model, const std::vector<engine::UnitRange>& chunks) {
  std::vector<std::string> names;
  for (const engine::UnitRange& range : chunks) {
    const std::string &first = model.units()[range.first].name, &last = model.units()[range.end - 1].name;
    names.push_back(first == last ? first : first + " to " + last);
  }
  return fmt::format("{}", fmt::join(names, ", "));
}

// Returns the ratio of a section's planned time to its computing time. It is above 1 where the section waits
// for its disk, or for other ranks.
double slowness(const Whole& whole, const PlannedCut& of, int section) {
  const Json& told = of.sections[static_cast<std::size_t>(section)];
  double planned = told.at("once")[0].get<double>() + told.at("once")[1].get<double>(), computed = 0;
  for (const Json& chunk : told.at("seconds"))
    planned +=
        static_cast<double>(of.pipeline.pipeline.items) * (chunk[0].get<double>() + chunk[1].get<double>());
  for (const engine::UnitRange& range : of.units(section))
    for (engine::UnitId unit = range.first; unit < range.end; ++unit)
      computed += whole.seconds[unit].forward + whole.seconds[unit].backward;
  return planned / (static_cast<double>(whole.plan.profile.micro_batches) * computed);
}

// Returns the seconds of the units, each multiplied by its section's slowness.
std::vector<engine::SectionSeconds> seconds_by_plans(const Whole& whole, const PlannedCut& of) {
  std::vector<engine::SectionSeconds> seconds = whole.seconds;
  for (int section = 0; section < of.pipeline.pipeline.sections; ++section) {
    const double times = slowness(whole, of, section);
    for (const engine::UnitRange& range : of.units(section))
      for (engine::UnitId unit = range.first; unit < range.end; ++unit)
        for (double engine::SectionSeconds::*const each :
             {&engine::SectionSeconds::forward, &engine::SectionSeconds::backward,
              &engine::SectionSeconds::weights})
          seconds[unit].*each *= times;
  }
  return seconds;
}

// Returns the cuts in which the section that waits least for others gives away a unit of one of its chunks.
std::vector<std::vector<engine::UnitRange>> relieved(const Whole& whole, const PlannedCut& of) {
  const engine::Pipeline& pipeline = of.pipeline.pipeline;
  const std::vector<double>& busy = of.pipeline.time.busy;
  const int busiest = static_cast<int>(std::ranges::max_element(busy) - busy.begin());
  std::vector<std::vector<engine::UnitRange>> cuts;
  const std::vector<engine::UnitRange>& cut = of.cut;
  if (slowness(whole, of, busiest) <= kWaits) return cuts;
  for (std::size_t chunk = 0; chunk < pipeline.chunks; ++chunk) {
    const std::size_t at = pipeline.number(busiest, chunk);
    const auto first_block = std::max<engine::UnitId>(cut[at].first, 1);
    const auto end_block = std::min(cut[at].end, cut.back().end - 1);
    if (end_block - first_block < 2) continue;
    if (at > 0) {
      cuts.push_back(cut);
      cuts.back()[at - 1].end = ++cuts.back()[at].first;
    }
    if (at + 1 < cut.size()) {
      cuts.push_back(cut);
      cuts.back()[at + 1].first = --cuts.back()[at].end;
    }
  }
  return cuts;
}

// Returns seconds in which all messages of a cut are assumed to take the time of the slowest link.
Whole whole_of(const PlanResult& plan, const TrainSettings& s, const Model& model,
               const optim::Optimizer& optimizer, const kernels::MatrixLibrary& library) {
  Whole whole{plan,    s,
              model,   optimizer,
              library, engine::seconds_of_units(plan.profile, optimizer, plan.request, plan.rates)};
  for (int section = 0; section < sections_of(s); ++section) {
    const double message = engine::link_seconds(plan.profile.border_gradient_bytes,
                                                link_between(s, section, (section + 1) % sections_of(s)));
    for (engine::SectionSeconds& unit : whole.seconds) unit.message = std::max(unit.message, message);
  }
  return whole;
}

// Finds a cut, and the size of items, by planning several. Rates measured on each rank would give a different
// cut on each, so the first rank's are tried.
class CutSearch {
 public:
  CutSearch(Whole whole, RunRanks& ranks, double longest)
      : whole_(std::move(whole)), ranks_(ranks), longest_(longest) {}

  // Returns the cut with the shortest planned step; nothing where none can be shorter than `longest`. Throws
  // as plan_section() where none fits.
  std::optional<PlannedCut> best() {
    for (const std::size_t group : group_sizes(whole_.s, whole_.plan.profile.micro_batches)) {
      group_ = group;
      misfits_.clear();
      tried_.clear();
      if (std::optional<PlannedCut> found = first()) improve(*std::move(found));
      if (std::optional<PlannedCut> found = like_others()) improve(*std::move(found));
    }
    if (!best_ && !is_cut_short_) refuse();
    if (best_ && best_->step() >= longest_) best_.reset();
    return std::move(best_);
  }

  // Returns the plans of a section of a cut that was planned here.
  SectionPlans& plans_of(const PlannedCut& of, int section) {
    const std::vector<engine::UnitRange> chunks = of.units(section);
    std::unique_ptr<SectionPlans>& plans = sections_[{section, engine::to_text(chunks)}];
    if (!plans) plans = std::make_unique<SectionPlans>(whole_, section, chunks);
    return *plans;
  }

 private:
  const TrainSettings& settings() const { return whole_.s; }
  double longest() const { return best_ ? std::min(longest_, best_->step()) : longest_; }

  // Whether a cut that does not fit is the last one to be planned: the user has given it, or with several
  // chunks it is unknown which of them should shrink.
  bool tries_one_cut() const { return settings().stages || settings().chunks > 1; }

  // Returns the cut whose longest section computes shortest, of those that fit with items of this size;
  // nothing where none does, or where its step cannot be shorter than the best one.
  std::optional<PlannedCut> first() {
    for (int cuts = 0; cuts < (tries_one_cut() ? 1 : kMostCuts); ++cuts) {
      const std::string text = ranks_.from_first(ranks_.is_first() ? next() : "");
      if (text.empty()) return std::nullopt;
      std::optional<PlannedCut> found = planned(text, kMostGain * longest());
      is_cut_short_ |= !found;
      if (!found || fits(*found)) return found;
      if (!misfit_) misfit_ = std::move(found);
    }
    return std::nullopt;
  }

  // Returns the best cut that fits with items of other sizes and, if it was not planned, with those of this
  // size, too.
  std::optional<PlannedCut> like_others() {
    const std::multimap<double, std::string> others = fitting_;
    for (const auto& [step, text] : others) {
      if (tried_.contains(text)) continue;
      std::optional<PlannedCut> found = planned(text, kMostGain * longest());
      if (found && fits(*found)) return found;
    }
    return std::nullopt;
  }

  // Improves a cut while another one like it has a shorter planned step, and keeps the result if it is the
  // best one.
  void improve(PlannedCut current) {
    for (int cuts = 0; !settings().stages && cuts < kMostBetterCuts; ++cuts) {
      const std::string text = ranks_.from_first(ranks_.is_first() ? another(current) : "");
      if (text.empty()) break;
      std::optional<PlannedCut> found = planned(text, current.step());
      if (found && fits(*found) && is_better(*found, current)) current = *std::move(found);
    }
    if (!best_ || is_better(current, *best_)) best_ = std::move(current);
  }

  static bool is_better(const PlannedCut& a, const PlannedCut& b) {
    return a.step() < (1 - kBetter) * b.step();
  }

  // Returns the best cut by computing alone; an empty text where none is left, or where no step of it can be
  // shorter than the best one.
  std::string next() {
    const std::string text = engine::to_text(choose_cut(whole_, group_, whole_.seconds, misfits_));
    if (text.empty()) return text;
    const PlannedCut of = unplanned(text);
    const bool is_too_long =
        engine::least_step(of.pipeline.pipeline, least_of_chunks(whole_, of)) >= longest();
    is_cut_short_ |= is_too_long;
    return is_too_long ? "" : text;
  }

  // Returns a cut that was not tried and may be better than this one; an empty text where none is left.
  std::string another(const PlannedCut& of) const {
    std::vector<std::vector<engine::UnitRange>> cuts = relieved(whole_, of);
    cuts.insert(cuts.begin(), choose_cut(whole_, group_, seconds_by_plans(whole_, of), misfits_));
    for (const std::vector<engine::UnitRange>& cut : cuts)
      if (const std::string text = engine::to_text(cut); !text.empty() && !tried_.contains(text)) return text;
    return "";
  }

  PlannedCut unplanned(const std::string& text) const {
    PlannedCut of;
    of.cut = engine::parse_cut(text, whole_.model.units().size() - 2);
    of.group = group_;
    of.pipeline.cut = of.cut;
    of.pipeline.pipeline = whole_.pipeline(group_);
    of.pipeline.section = ranks_.section();
    for (int section = 0; section < of.pipeline.pipeline.sections; ++section)
      of.pipeline.names.push_back(name_of_units(whole_.model, of.units(section)));
    return of;
  }

  // Plans a cut. Returns nothing where its step cannot be shorter than `longest`.
  std::optional<PlannedCut> planned(const std::string& text, double longest) {
    tried_.insert(text);
    most_tried_ = std::max(most_tried_, tried_.size());
    PlannedCut of = unplanned(text);
    if (ranks_.size() == 1) {
      if (!plan_all(of, longest)) return std::nullopt;
    } else {
      const std::string own = told(plans_of(of, ranks_.section()).with(group_)).dump();
      const std::vector<std::string> all = ranks_.from_all("the plans of the stages", own);
      for (int section = 0; section < of.pipeline.pipeline.sections; ++section)
        of.sections.push_back(of_all_ranks(all, ranks_.ranks_of(section)));
    }
    if (std::ranges::all_of(of.sections, is_planned)) complete(of);
    return of;
  }

  // Plans all sections here. Returns false, with some left out, where the step takes no less than `longest`.
  bool plan_all(PlannedCut& of, double longest) {
    const engine::Pipeline& pipeline = of.pipeline.pipeline;
    std::vector<engine::SectionSeconds> seconds = least_of_chunks(whole_, of);
    double least = engine::least_step(pipeline, seconds);
    for (int section = 0; section < pipeline.sections && least < longest; ++section) {
      const SectionPlan& planned = plans_of(of, section).with(group_);
      of.sections.push_back(told(planned));
      if (!planned.plan) continue;
      double busy = planned.once.before + planned.once.after;
      for (std::size_t chunk = 0; chunk < pipeline.chunks; ++chunk) {
        const engine::SectionSeconds& own = planned.seconds[chunk];
        seconds[pipeline.number(section, chunk)] = own;
        busy += static_cast<double>(pipeline.items) * (own.forward + own.backward);
      }
      least = std::max({least, busy, engine::least_step(pipeline, seconds)});
    }
    return least < longest;
  }

  // Whether each section has a plan; keeps in mind those that have none.
  bool fits(const PlannedCut& of) {
    bool all = true;
    for (int section = 0; section < of.pipeline.pipeline.sections; ++section) {
      if (is_planned(of.sections[static_cast<std::size_t>(section)])) continue;
      all = false;
      // With several chunks it is unknown which of them is too large.
      if (settings().chunks == 1) misfits_.push_back({section, of.units(section).front()});
    }
    if (all) fitting_.emplace(of.step(), engine::to_text(of.cut));
    return all;
  }

  [[noreturn]] void refuse() const {
    std::string advice = tries_one_cut() ? "; other --stages may fit"
                         : most_tried_ > 1
                             ? fmt::format("; {} cuts of the model were tried, and none fits", most_tried_)
                             : "; no other cut of the model can fit";
    if (settings().chunks > 1 || settings().pipeline != engine::PipelineOrder::k1F1B)
      advice += "; stages hold least with --pipeline 1f1b and without --chunks";
    const auto lacking = std::ranges::find_if_not(misfit_->sections, is_planned);
    const auto section = static_cast<std::size_t>(lacking - misfit_->sections.begin());
    throw Error(
        ErrorCode::kBudget,
        fmt::format("pipeline stage {} of {} ({}): {}{}", section + 1, misfit_->sections.size(),
                    misfit_->pipeline.names[section], lacking->at("error").get<std::string>(), advice),
        lacking->at("lacks"));
  }

  const Whole whole_;
  RunRanks& ranks_;
  const double longest_;
  std::map<std::pair<int, std::string>, std::unique_ptr<SectionPlans>> sections_;  // by units
  std::multimap<double, std::string> fitting_;  // cuts, by the seconds of a step with items of some size
  std::optional<PlannedCut> best_;
  std::optional<PlannedCut> misfit_;  // the first one that did not fit
  bool is_cut_short_ = false;         // some cuts were not planned, since their steps would be too long
  std::size_t most_tried_ = 0;        // cuts, with items of one size
  // With items of the size that is searched now:
  std::size_t group_ = 1;
  std::vector<Misfit> misfits_;
  std::set<std::string> tried_;
};

}  // namespace

std::unique_ptr<Model> plan_section(PlanResult& plan, const TrainSettings& s, const Model& model,
                                    const optim::Optimizer& optimizer, const kernels::MatrixLibrary& library,
                                    RunRanks& ranks, double longest) {
  CutSearch search(whole_of(plan, s, model, optimizer, library), ranks, longest);
  std::optional<PlannedCut> chosen = search.best();
  if (!chosen) return nullptr;
  SectionPlans& own = search.plans_of(*chosen, chosen->pipeline.section);
  SectionPlan& planned = own.with(chosen->group);
  plan.request.group = planned.plan->group;
  plan.profile = std::move(planned.profile);
  plan.plan = *std::move(planned.plan);
  plan.pipeline = std::move(chosen->pipeline);
  set_links(s, s.ranks.rank, plan.rates);
  if (ranks.size() > 1) agree(plan, optimizer, ranks);
  plan.plan.step_bytes_from_hosts =
      bytes_from_hosts(chosen->sections, *plan.pipeline, s, plan.plan.step_bytes_from_hosts,
                       plan.profile.micro_batches * plan.profile.border_gradient_bytes);
  return own.take_model();
}

std::vector<engine::UnitRange> PipelinePlan::units(int section_of) const {
  return engine::units_of(cut, pipeline.sections, section_of);
}

double PipelinePlan::bubble() const {
  const double busy = std::accumulate(time.busy.begin(), time.busy.end(), 0.0);
  return 1 - busy / (time.step * static_cast<double>(time.busy.size()));
}

std::string to_text(const PipelinePlan& p, const engine::Profile& profile) {
  const engine::WholeStep& step = *profile.whole_step;
  std::string text = fmt::format(
      "pipeline          stage {} of {}: {}; {}, {}{} items of {}{} micro-batch{}, of {} it holds {}{}\n",
      p.section + 1, p.names.size(), p.names[static_cast<std::size_t>(p.section)],
      engine::name_of(p.pipeline.order), p.pipeline.chunks > 1 ? "interleaved, " : "", p.pipeline.items,
      p.pipeline.items * step.group > profile.micro_batches ? "up to " : "", step.group,
      step.group == 1 ? "" : "es",
      p.pipeline.chunks > 1
          ? fmt::format("whose {} passes through its chunks", p.pipeline.items * p.pipeline.chunks)
          : "which",
      p.time.held[static_cast<std::size_t>(p.section)],
      step.kept_for_weights > 0
          ? fmt::format(", and parts of {} for the gradients of weights", step.kept_for_weights)
          : "");
  text += fmt::format("                  a step of all stages takes {:.2f} s, in {:.0f}% of which they wait",
                      p.time.step, 100 * p.bubble());
  if (p.bubble() > 0.5) text += "; a larger --accumulate, or fewer stages, would let them wait less";
  text += "\n                  memory of the stages: ";
  for (std::size_t i = 0; i < p.peaks.size(); ++i) text += (i > 0 ? ", " : "") + format_size(p.peaks[i]);
  using Bytes = std::uint64_t PipelinePlan::Received::*;
  std::vector<std::pair<std::string, Bytes>> axes;
  for (const auto& axis : {std::pair<std::string, Bytes>("data", &PipelinePlan::Received::data),
                           {"layers", &PipelinePlan::Received::layers},
                           {"pipeline", &PipelinePlan::Received::pipeline}})
    if (axis.first == "pipeline" ||
        std::ranges::any_of(p.received, [&](const auto& of) { return of.*axis.second > 0; }))
      axes.push_back(axis);
  const auto joined = [&](const auto& text_of) {
    std::vector<std::string> each;
    for (const auto& axis : axes) each.push_back(text_of(axis));
    return fmt::format("{}", fmt::join(each, " + "));
  };
  text += fmt::format("\n                  received by the stages along {}: ",
                      joined([](const auto& axis) { return axis.first; }));
  for (std::size_t i = 0; i < p.received.size(); ++i)
    text += (i > 0 ? ", " : "") +
            joined([&](const auto& axis) { return format_size(p.received[i].*axis.second); });
  return text + "\n";
}

Json to_json(const PipelinePlan& p) {
  Json stages = Json::array();
  for (std::size_t i = 0; i < p.names.size(); ++i) {
    Json units = Json::array();  // by chunk
    for (const engine::UnitRange& chunk : p.units(static_cast<int>(i)))
      units.push_back({chunk.first, chunk.end});
    stages.push_back(
        {{"units", units},
         {"names", p.names[i]},
         {"predicted_peak", p.peaks[i]},
         {"bytes_received", {{"data", p.received[i].data}, {"pipeline", p.received[i].pipeline}}},
         {"busy_seconds", p.time.busy[i]},
         {"items_held", p.time.held[i]}});
    if (p.received[i].layers > 0) stages.back()["bytes_received"]["layers"] = p.received[i].layers;
  }
  return {{"stage", p.section},
          {"order", engine::name_of(p.pipeline.order)},
          {"items", p.pipeline.items},
          {"chunks", p.pipeline.chunks},
          {"step_seconds", p.time.step},
          {"bubble", p.bubble()},
          {"stages", stages}};
}

}  // namespace sluice::models
