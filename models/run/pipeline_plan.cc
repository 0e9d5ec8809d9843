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

// The most cuts that are planned, for a model that hardly fits, before one fits.
constexpr int kMostCuts = 20;
// The most cuts that are planned after the first one that fits.
constexpr int kMostBetterCuts = 10;
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

// Returns a lower bound for the activations that a section keeps, with items of one micro-batch.
std::uint64_t least_activations(const engine::Profile& profile, const engine::ItemsHeld& items,
                                engine::UnitRange units) {
  std::uint64_t bytes = 0;
  for (engine::UnitId unit = units.first; unit < units.end; ++unit)
    bytes += engine::activation_bytes(profile.unit_profiles[unit],
                                      profile.unit_profiles[unit].choices.size() - 1, items);
  return bytes;
}

// The units of a section for which no plan was found (with one chunk), so that it cannot have more either.
struct Misfit {
  int section = 0;
  engine::UnitRange units;

  bool is_in(int other, engine::UnitRange range) const {
    return section == other && range.first <= units.first && units.end <= range.end;
  }
};

// Returns nothing where no cut is left.
std::vector<engine::UnitRange> choose_cut(const PlanResult& plan, const TrainSettings& s, const Model& model,
                                          const optim::Optimizer& optimizer,
                                          const std::vector<engine::SectionSeconds>& seconds,
                                          const std::vector<Misfit>& misfits) {
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
  const std::size_t items =
      divide_up(plan.profile.micro_batches, std::max<std::size_t>(1, s.plan.group.value_or(1)));
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
    return plan.budget.disk > 0 || may_share ||  // its state
           resident_bytes(layout, optimizer, plan.request.clip, units) +
                   least_activations(plan.profile, held[static_cast<std::size_t>(section)], units) <=
               memory / s.chunks;
  };
  std::vector<engine::UnitRange> cut = engine::cut(pipeline, seconds, fits);
  if (cut.empty()) cut = engine::cut(pipeline, seconds, may_fit);  // the plans are more exact
  return cut;
}

// A section with items of one size.
struct Way {
  engine::Profile profile;
  std::optional<engine::Plan> plan;
  std::string error;                            // why there is no plan
  std::uint64_t lacks = 0;                      // missing bytes, if it does not fit
  std::vector<engine::SectionSeconds> seconds;  // per item, by chunk
  engine::OnceSeconds once;
};

// Returns the bytes of a twin's gradient that come from the other section with the twin.
std::uint64_t twin_bytes(const Way& way) {
  return way.plan->step_bytes_from_sections - way.profile.whole_step->received;
}

// Computes the seconds of a way by its plan, distributed in proportion to those of the units.
void find_seconds(Way& way, const TrainSettings& s, int section,
                  const std::vector<engine::SectionSeconds>& units,
                  const std::vector<engine::UnitRange>& chunks) {
  const engine::StepTime& time = way.plan->time;
  const int sections = sections_of(s), next = (section + 1) % sections;
  const double message = engine::link_seconds(way.plan->group * way.profile.border_gradient_bytes,
                                              link_between(s, section, next));
  double sum = 0;
  for (const engine::UnitRange& range : chunks) {
    engine::SectionSeconds& own = way.seconds.emplace_back();
    own.message = message;
    for (engine::UnitId unit = range.first; unit < range.end; ++unit) {
      own.forward += units[unit].forward;
      own.backward += units[unit].backward;
      own.weights += units[unit].weights;
    }
    sum += own.forward + own.backward;
  }
  // Time beside computing, for example for moving units, is distributed evenly.
  const auto items = static_cast<double>(divide_up(way.profile.micro_batches, way.plan->group));
  const double factor = time.passes() / items / sum;
  for (engine::SectionSeconds& own : way.seconds)
    for (double engine::SectionSeconds::*const each :
         {&engine::SectionSeconds::forward, &engine::SectionSeconds::backward,
          &engine::SectionSeconds::weights})
      own.*each *= factor;
  way.once = {time.updates, time.sums, 0};
  if (way.profile.twin)
    way.once.exchange = engine::link_seconds(twin_bytes(way), link_between(s, sections - 1, 0));
}

// The common inputs of the plans of all sections of a cut.
struct Whole {
  const PlanResult& plan;
  const TrainSettings& s;
  const Model& model;
  const optim::Optimizer& optimizer;
  const kernels::MatrixLibrary& library;
  const std::vector<engine::SectionSeconds>& seconds;  // by unit
  std::vector<engine::UnitRange> cut;

  engine::Pipeline pipeline(std::size_t group) const {
    return {s.pipeline, sections_of(s), divide_up(plan.profile.micro_batches, group), s.chunks};
  }
};

// A section of a cut, and its plans ("ways") by number of micro-batches per item. The whole outlives it.
class SectionWays {
 public:
  SectionWays(const Whole& whole, int section)
      : whole_(whole),
        section_(section),
        chunks_(engine::units_of(whole.cut, sections_of(whole.s), section)),
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

  const std::map<std::size_t, Way>& ways() const { return ways_; }
  Way take_way(std::size_t number) {
    return std::move(std::next(ways_.begin(), static_cast<std::ptrdiff_t>(number))->second);
  }
  std::unique_ptr<Model> take_model() { return std::move(model_); }

  // Plans the section with items of `group` micro-batches.
  const Way& add(std::size_t group) {
    Way& way = ways_[group];
    way.profile = engine::in_pipeline(once_, whole_.pipeline(group), section_, group);
    request_.group = group;
    try {
      way.plan = engine::make_plan(way.profile, whole_.optimizer, whole_.plan.budget, request_, rates_);
      find_seconds(way, whole_.s, section_, whole_.seconds, chunks_);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kBudget) throw;
      way.error = error.what();
      way.lacks = error.lacks();
    }
    return way;
  }
  void leave_out(std::size_t group) { ways_.erase(group); }

 private:
  const Whole& whole_;
  const int section_;
  const std::vector<engine::UnitRange> chunks_;
  std::unique_ptr<Model> model_;
  const engine::Profile once_;  // with the schedule of one group of micro-batches
  engine::PlanRequest request_;
  engine::MachineRates rates_;
  std::map<std::size_t, Way> ways_;
};

// Returns lower bounds of an item's seconds in each chunk of a cut, whatever its plans are.
std::vector<engine::SectionSeconds> least_of_chunks(const Whole& whole, std::size_t group) {
  const double micro_batches = static_cast<double>(whole.plan.profile.micro_batches) /
                               static_cast<double>(whole.pipeline(group).items);  // of an item
  std::vector<engine::SectionSeconds> seconds;
  for (const engine::UnitRange& range : whole.cut) {
    engine::SectionSeconds& chunk = seconds.emplace_back();
    for (engine::UnitId unit = range.first; unit < range.end; ++unit) {
      chunk.forward += micro_batches * whole.seconds[unit].forward;
      chunk.backward += micro_batches * whole.seconds[unit].backward;
      chunk.weights += micro_batches * whole.seconds[unit].weights;
    }
  }
  return seconds;
}

// The data about a section that other ranks get.
Json told(const SectionWays& of_section) {
  Json ways = Json::array();
  for (const auto& [group, way] : of_section.ways()) {
    Json& json = ways.emplace_back(Json{{"group", group}, {"error", way.error}, {"lacks", way.lacks}});
    if (!way.plan) continue;
    for (const engine::SectionSeconds& chunk : way.seconds)
      json["seconds"].push_back({chunk.forward, chunk.backward, chunk.message, chunk.weights});
    json["once"] = {way.once.before, way.once.after, way.once.exchange};
    json["step"] = way.plan->time.step;
    json["peak"] = way.plan->peak_memory;
    json["received"] = {way.plan->step_bytes_of_data(), way.plan->step_bytes_from_sections,
                        way.plan->step_bytes_of_layers};
    json["from_hosts"] = way.plan->step_bytes_from_hosts;
    json["twin"] = twin_bytes(way);
  }
  return ways;
}

// The plans of a cut's sections.
struct Tried {
  PipelinePlan pipeline;
  std::vector<std::unique_ptr<SectionWays>> here;  // this rank's section; for a run that is only planned, all
  std::vector<Json> sections;                      // the data of all sections
  bool is_partly = false;  // some sizes of items were left out, since their steps would be too long
};

bool has_a_way(const Json& section) {
  return std::ranges::any_of(section, [](const Json& way) { return way.contains("peak"); });
}

std::vector<Misfit> misfits_of(const Tried& tried) {
  std::vector<Misfit> misfits;
  for (int section = 0; section < tried.pipeline.pipeline.sections; ++section)
    if (!has_a_way(tried.sections[static_cast<std::size_t>(section)]))
      misfits.push_back({section, tried.pipeline.units(section).front()});
  return misfits;
}

// Whether a cut that does not fit is the last one to be planned: the user has given it, or with several
// chunks it is unknown which of them should shrink.
bool tries_one_cut(const TrainSettings& s) { return s.stages || s.chunks > 1; }

// cuts: how many were tried, of which `tried` is the first.
[[noreturn]] void refuse(const Tried& tried, const TrainSettings& s, int cuts) {
  std::string advice = tries_one_cut(s) ? "; other --stages may fit"
                       : cuts > 1 ? fmt::format("; {} cuts of the model were tried, and none fits", cuts)
                                  : "; no other cut of the model can fit";
  if (s.chunks > 1 || s.pipeline != engine::PipelineOrder::k1F1B)
    advice += "; stages hold least with --pipeline 1f1b and without --chunks";
  for (std::size_t section = 0; section < tried.sections.size(); ++section)
    if (!has_a_way(tried.sections[section])) {
      const Json& way = tried.sections[section].front();
      throw Error(ErrorCode::kBudget,
                  fmt::format("pipeline stage {} of {} ({}): {}{}", section + 1, tried.sections.size(),
                              tried.pipeline.names[section], way.at("error").get<std::string>(), advice),
                  way.at("lacks"));
    }
  fail(ErrorCode::kBudget,
       "each stage of the pipeline fits with some number of micro-batches at once, and no number fits all of "
       "them; give more --memory, or other --stages");
}

// Returns the time of the pipeline, with each section's way at index `at`.
engine::PipelineTime time_of(const std::vector<Json>& sections, std::size_t at,
                             const engine::Pipeline& shape) {
  std::vector<engine::SectionSeconds> seconds;  // by chunk, in the model's order
  for (std::size_t chunk = 0; chunk < shape.chunks; ++chunk)
    for (const Json& ways : sections) {
      const Json& own = ways[at].at("seconds")[chunk];
      seconds.push_back({own[0], own[1], own[2], own[3]});
    }
  std::vector<engine::OnceSeconds> once;
  for (const Json& ways : sections) {
    const Json& own = ways[at].at("once");
    once.push_back({own[0], own[1], own[2]});
  }
  return engine::simulate(shape, seconds, once);
}

// Finds the size of items with the shortest step. Returns its index among the ways, or nothing where no size
// fits all sections.
std::optional<std::size_t> choose(const std::vector<Json>& sections, std::size_t micro_batches,
                                  PipelinePlan& pipeline) {
  std::optional<std::size_t> best;
  for (std::size_t i = 0; i < sections.front().size(); ++i) {
    if (!std::ranges::all_of(sections, [&](const Json& ways) { return ways[i].contains("peak"); })) continue;
    engine::Pipeline shape = pipeline.pipeline;
    shape.items = divide_up(micro_batches, sections.front()[i].at("group").get<std::size_t>());
    engine::PipelineTime time = time_of(sections, i, shape);
    if (best && time.step >= pipeline.time.step) continue;
    best = i;
    pipeline.pipeline = shape;
    pipeline.time = std::move(time);
  }
  if (!best) return best;
  for (const Json& ways : sections) {
    pipeline.peaks.push_back(ways[*best].at("peak"));
    const Json& received = ways[*best].at("received");
    pipeline.received.push_back({received[0], received[1], received[2]});
  }
  return best;
}

// Returns the bytes that arrive at this rank's host from others in a step: gradients and parameters for the
// sections there, and their messages from sections elsewhere. `own`: the former for this rank's section.
std::uint64_t bytes_from_hosts(const std::vector<Json>& sections, std::size_t at,
                               const PipelinePlan& pipeline, const TrainSettings& s, std::uint64_t own,
                               std::uint64_t of_message) {
  const comm::Hosts hosts = s.ranks.on_hosts();
  if (hosts.all_on_one()) return 0;
  const engine::Pipeline& shape = pipeline.pipeline;
  std::uint64_t bytes = 0;
  for (int section = 0; section < shape.sections; ++section) {
    const Json& told = sections[static_cast<std::size_t>(section)][at];
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

// Combines the ways of a section's ranks: those that all of them have, with the time of the slowest.
Json of_all_ranks(const std::vector<std::string>& told, const std::vector<int>& ranks) {
  Json all = Json::parse(told[static_cast<std::size_t>(ranks[0])]);
  for (const int rank : ranks) {
    const Json other = Json::parse(told[static_cast<std::size_t>(rank)]);
    for (std::size_t i = 0; i < all.size(); ++i) {
      if (!all[i].contains("peak")) continue;
      if (!other[i].contains("peak")) {
        all[i] = other[i];
        continue;
      }
      const Json peak = std::max(all[i].at("peak"), other[i].at("peak"));
      if (other[i].at("step") > all[i].at("step")) all[i] = other[i];
      all[i]["peak"] = peak;
    }
  }
  return all;
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

// Plans all sections here with items of one size. Returns the step's seconds, or infinity where a section
// does not fit; nothing, leaving that size out, where the step takes no less than `longest`.
std::optional<double> plan_all_with(const Whole& whole, std::size_t group, double longest, Tried& tried) {
  const engine::Pipeline pipeline = whole.pipeline(group);
  std::vector<engine::SectionSeconds> seconds = least_of_chunks(whole, group);
  double least = engine::least_step(pipeline, seconds);
  bool fits = true;
  for (int section = 0; section < pipeline.sections && least < longest; ++section) {
    const Way& way = tried.here[static_cast<std::size_t>(section)]->add(group);
    fits = fits && way.plan;
    if (!way.plan) continue;
    double busy = way.once.before + way.once.after;
    for (std::size_t chunk = 0; chunk < pipeline.chunks; ++chunk) {
      seconds[pipeline.number(section, chunk)] = way.seconds[chunk];
      busy +=
          static_cast<double>(pipeline.items) * (way.seconds[chunk].forward + way.seconds[chunk].backward);
    }
    least = std::max({least, busy, engine::least_step(pipeline, seconds)});
  }
  if (least >= longest) {
    for (const std::unique_ptr<SectionWays>& section : tried.here) section->leave_out(group);
    return std::nullopt;
  }
  tried.sections.clear();
  for (const std::unique_ptr<SectionWays>& section : tried.here) tried.sections.push_back(told(*section));
  if (!fits) return std::numeric_limits<double>::infinity();
  return time_of(tried.sections, tried.sections.front().size() - 1, pipeline).step;
}

// Plans all sections here. A size of items is left out for all sections where its step cannot be shorter than
// `longest`, or than the shortest one found.
void plan_all(const Whole& whole, double longest, Tried& tried) {
  for (int section = 0; section < sections_of(whole.s); ++section)
    tried.here.push_back(std::make_unique<SectionWays>(whole, section));
  double best = longest;
  for (const std::size_t group : group_sizes(whole.s, whole.plan.profile.micro_batches)) {
    const std::optional<double> step = plan_all_with(whole, group, best, tried);
    tried.is_partly |= !step && best == longest;
    best = std::min(best, step.value_or(best));
  }
}

Tried try_cut(const Whole& whole, RunRanks& ranks, double longest) {
  Tried tried;
  PipelinePlan& pipeline = tried.pipeline;
  pipeline.cut = whole.cut;
  pipeline.pipeline = whole.pipeline(1);
  pipeline.section = ranks.section();
  for (int section = 0; section < pipeline.pipeline.sections; ++section)
    pipeline.names.push_back(name_of_units(whole.model, pipeline.units(section)));
  if (ranks.size() == 1) {
    plan_all(whole, longest, tried);
    return tried;
  }
  SectionWays& own = *tried.here.emplace_back(std::make_unique<SectionWays>(whole, pipeline.section));
  for (const std::size_t group : group_sizes(whole.s, whole.plan.profile.micro_batches)) own.add(group);
  const std::vector<std::string> all = ranks.from_all("the plans of the stages", told(own).dump());
  for (int section = 0; section < pipeline.pipeline.sections; ++section)
    tried.sections.push_back(of_all_ranks(all, ranks.ranks_of(section)));
  return tried;
}

// A cut all of whose sections have plans.
struct PlannedCut {
  std::unique_ptr<Whole> whole;
  Tried tried;
  std::size_t chosen = 0;  // the number of a section's way
  double step() const { return tried.pipeline.time.step; }
};

// Returns the ratio of a section's planned time to its computing time. It is above 1 where the section waits
// for its disk, or for other ranks.
double slowness(const PlannedCut& of, int section) {
  const engine::Pipeline& pipeline = of.tried.pipeline.pipeline;
  const Json& way = of.tried.sections[static_cast<std::size_t>(section)][of.chosen];
  double planned = way.at("once")[0].get<double>() + way.at("once")[1].get<double>(), computed = 0;
  for (const Json& chunk : way.at("seconds"))
    planned += static_cast<double>(pipeline.items) * (chunk[0].get<double>() + chunk[1].get<double>());
  for (const engine::UnitRange& range : of.tried.pipeline.units(section))
    for (engine::UnitId unit = range.first; unit < range.end; ++unit)
      computed += of.whole->seconds[unit].forward + of.whole->seconds[unit].backward;
  return planned / (static_cast<double>(of.whole->plan.profile.micro_batches) * computed);
}

// Returns the seconds of the units, each multiplied by its section's slowness.
std::vector<engine::SectionSeconds> seconds_by_plans(const PlannedCut& of) {
  std::vector<engine::SectionSeconds> seconds = of.whole->seconds;
  for (int section = 0; section < of.tried.pipeline.pipeline.sections; ++section) {
    const double times = slowness(of, section);
    for (const engine::UnitRange& range : of.tried.pipeline.units(section))
      for (engine::UnitId unit = range.first; unit < range.end; ++unit)
        for (double engine::SectionSeconds::*const each :
             {&engine::SectionSeconds::forward, &engine::SectionSeconds::backward,
              &engine::SectionSeconds::weights})
          seconds[unit].*each *= times;
  }
  return seconds;
}

// Returns the cuts in which the section that waits least for others gives away a unit of one of its chunks.
std::vector<std::vector<engine::UnitRange>> relieved(const PlannedCut& of) {
  const engine::Pipeline& pipeline = of.tried.pipeline.pipeline;
  const std::vector<double>& busy = of.tried.pipeline.time.busy;
  const int busiest = static_cast<int>(std::ranges::max_element(busy) - busy.begin());
  std::vector<std::vector<engine::UnitRange>> cuts;
  const std::vector<engine::UnitRange>& cut = of.whole->cut;
  if (slowness(of, busiest) <= kWaits) return cuts;
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

// Finds a cut by planning several. Rates measured on each rank would give a different cut on each, so the
// first rank's are tried.
class CutSearch {
 public:
  CutSearch(const PlanResult& plan, const TrainSettings& s, const Model& model,
            const optim::Optimizer& optimizer, const kernels::MatrixLibrary& library, RunRanks& ranks,
            double longest)
      : plan_(plan),
        s_(s),
        model_(model),
        optimizer_(optimizer),
        library_(library),
        ranks_(ranks),
        longest_(longest),
        seconds_(engine::seconds_of_units(plan.profile, optimizer, plan.request, plan.rates)) {
    for (int section = 0; section < sections_of(s); ++section) {
      const double message = engine::link_seconds(plan.profile.border_gradient_bytes,
                                                  link_between(s, section, (section + 1) % sections_of(s)));
      // All messages of a cut are assumed to take the time of the slowest link.
      for (engine::SectionSeconds& unit : seconds_) unit.message = std::max(unit.message, message);
    }
  }

  // Returns the cut whose longest section computes shortest, of those that fit; nothing where its step cannot
  // be shorter than `longest`.
  std::optional<PlannedCut> first() {
    std::optional<Tried> misfit;
    for (int cuts = 0;; ++cuts) {
      const bool is_over = misfit && (tries_one_cut(s_) || cuts == kMostCuts);
      const std::string text = is_over ? "" : next(seconds_);
      if (text.empty()) refuse(*misfit, s_, cuts);
      PlannedCut found = planned(text, longest_);
      if (found.tried.sections.empty()) return std::nullopt;
      const bool fits = keep_misfits(found.tried);
      if (!fits && found.tried.is_partly) return std::nullopt;
      if (fits && choose_way(found)) return found;
      if (fits && found.tried.is_partly) return std::nullopt;
      if (fits) refuse(found.tried, s_, cuts + 1);
      if (!misfit) misfit = std::move(found.tried);
    }
  }

  // Replaces `best` by cuts whose planned steps are shorter, until none is found.
  void improve(PlannedCut& best) {
    for (int cuts = 0; !s_.stages && cuts < kMostBetterCuts; ++cuts) {
      const std::string text = ranks_.from_first(ranks_.is_first() ? another(best) : "");
      if (text.empty()) return;
      PlannedCut found = planned(text, best.step());
      if (found.tried.sections.empty()) continue;  // its step cannot be shorter
      if (!misfits_of(found.tried).empty() && found.tried.is_partly) continue;
      if (keep_misfits(found.tried) && choose_way(found) && found.step() < (1 - kBetter) * best.step())
        best = std::move(found);
    }
  }

 private:
  static constexpr double kBetter = 0.005;

  // Returns a cut that was not tried and may be better than this one; an empty text where none is left.
  std::string another(const PlannedCut& of) const {
    std::vector<std::vector<engine::UnitRange>> cuts = relieved(of);
    cuts.insert(cuts.begin(), choose_cut(plan_, s_, model_, optimizer_, seconds_by_plans(of), misfits_));
    for (const std::vector<engine::UnitRange>& cut : cuts)
      if (const std::string text = engine::to_text(cut); !text.empty() && !tried_.contains(text)) return text;
    return "";
  }

  // Returns the best cut by these seconds; an empty text where none is left.
  std::string next(const std::vector<engine::SectionSeconds>& seconds) {
    return ranks_.from_first(
        ranks_.is_first() ? engine::to_text(choose_cut(plan_, s_, model_, optimizer_, seconds, misfits_))
                          : "");
  }

  PlannedCut planned(const std::string& text, double longest) {
    tried_.insert(text);
    PlannedCut of;
    of.whole = std::make_unique<Whole>(Whole{plan_, s_, model_, optimizer_, library_, seconds_,
                                             engine::parse_cut(text, model_.units().size() - 2)});
    of.tried = try_cut(*of.whole, ranks_, longest);
    return of;
  }

  // Whether each section has a plan.
  bool keep_misfits(Tried& tried) {
    const std::vector<Misfit> found = misfits_of(tried);
    if (found.empty()) return true;
    // With several chunks it is unknown which of them is too large.
    if (s_.chunks == 1) misfits_.insert(misfits_.end(), found.begin(), found.end());
    tried.here.clear();
    return false;
  }

  bool choose_way(PlannedCut& of) const {
    const std::optional<std::size_t> chosen =
        choose(of.tried.sections, plan_.profile.micro_batches, of.tried.pipeline);
    of.chosen = chosen.value_or(0);
    return chosen.has_value();
  }

  const PlanResult& plan_;
  const TrainSettings& s_;
  const Model& model_;
  const optim::Optimizer& optimizer_;
  const kernels::MatrixLibrary& library_;
  RunRanks& ranks_;
  const double longest_;
  std::vector<engine::SectionSeconds> seconds_;  // that units compute
  std::vector<Misfit> misfits_;
  std::set<std::string> tried_;
};

}  // namespace

std::unique_ptr<Model> plan_section(PlanResult& plan, const TrainSettings& s, const Model& model,
                                    const optim::Optimizer& optimizer, const kernels::MatrixLibrary& library,
                                    RunRanks& ranks, double longest) {
  CutSearch search(plan, s, model, optimizer, library, ranks, longest);
  std::optional<PlannedCut> planned = search.first();
  if (!planned) return nullptr;
  search.improve(*planned);
  Tried& tried = planned->tried;
  Way way = tried.here.front()->take_way(planned->chosen);
  plan.request.group = way.plan->group;
  plan.profile = std::move(way.profile);
  plan.plan = *std::move(way.plan);
  plan.pipeline = std::move(tried.pipeline);
  set_links(s, s.ranks.rank, plan.rates);
  if (ranks.size() > 1) agree(plan, optimizer, ranks);
  plan.plan.step_bytes_from_hosts =
      bytes_from_hosts(tried.sections, planned->chosen, *plan.pipeline, s, plan.plan.step_bytes_from_hosts,
                       plan.profile.micro_batches * plan.profile.border_gradient_bytes);
  return tried.here.front()->take_model();
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
