#include "models/run/pipeline_plan.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <numeric>
#include <optional>
#include <utility>

#include "core/bytes.h"
#include "core/error.h"
#include "engine/planner/planner.h"

namespace sluice::models {
namespace {

// How many micro-batches may pass through a unit together, from the fewest on.
std::vector<std::size_t> group_sizes(const TrainSettings& s, std::size_t micro_batches) {
  if (s.plan.group) return {std::min(*s.plan.group, micro_batches)};
  std::vector<std::size_t> sizes;
  for (std::size_t size = 1; size < micro_batches; size *= 2)
    if (divide_up(micro_batches, size) <= engine::kMostItems) sizes.push_back(size);
  sizes.push_back(micro_batches);
  return sizes;
}

// What a section's parameters and all that is kept for them take at least.
std::uint64_t resident_bytes(const engine::Layout& layout, const optim::Optimizer& optimizer,
                             engine::UnitRange units) {
  std::size_t state = 0;
  for (const optim::StateArray& array : optimizer.state()) state += size_of(array.type);
  std::uint64_t bytes = 0;
  for (engine::UnitId unit = units.first; unit < units.end; ++unit) {
    const bool has_master = optimizer.keeps_master() && layout.dtype(unit) != Dtype::kF32;
    bytes +=
        2 * layout.unit_bytes(unit) + layout.unit_elements(unit) * (state + (has_master ? sizeof(float) : 0));
  }
  return bytes;
}

std::vector<engine::UnitRange> choose_cut(const PlanResult& plan, const TrainSettings& s, const Model& model,
                                          const optim::Optimizer& optimizer) {
  const std::size_t blocks = model.units().size() - 2;
  const int sections = sections_of(s);
  if (s.stages) {
    std::vector<engine::UnitRange> cut = engine::parse_cut(*s.stages, blocks);
    if (static_cast<int>(cut.size()) != sections)
      fail(ErrorCode::kInvalidArgument,
           "--stages '{}' has {} stages, and --mesh has {} along pipeline: give the blocks of each",
           *s.stages, cut.size(), sections);
    return cut;
  }
  if (static_cast<std::size_t>(sections) > blocks)
    fail(ErrorCode::kInvalidArgument,
         "a pipeline of {} stages is asked for, and the model has {} blocks, of which each stage needs one",
         sections, blocks);
  const engine::Layout layout(model.units());
  const std::uint64_t memory = plan.budget.memory - std::min(plan.budget.memory, plan.budget.base);
  const auto fits = [&](int, engine::UnitRange units) {
    return plan.budget.disk > 0 || resident_bytes(layout, optimizer, units) <= memory;
  };
  const std::vector<engine::SectionSeconds> seconds =
      engine::seconds_of_units(plan.profile, optimizer, plan.request, plan.rates);
  const engine::Pipeline pipeline{s.pipeline, sections, plan.profile.micro_batches};
  std::vector<engine::UnitRange> cut = engine::cut(pipeline, seconds, fits);
  if (!cut.empty()) return cut;
  // The plans say what is missing.
  return engine::cut(pipeline, seconds, [](int, engine::UnitRange) { return true; });
}

// A section with items of one size.
struct Way {
  engine::Profile profile;
  std::optional<engine::Plan> plan;
  std::string error;               // why there is none
  engine::SectionSeconds seconds;  // of an item
};

struct SectionWays {
  std::unique_ptr<Model> model;
  std::map<std::size_t, Way> ways;  // by micro-batches of an item
};

engine::SectionSeconds seconds_of(const engine::Plan& plan, const engine::Profile& profile,
                                  const PlanResult& whole, const std::vector<engine::SectionSeconds>& units,
                                  engine::UnitRange range) {
  engine::SectionSeconds own;
  for (engine::UnitId unit = range.first; unit < range.end; ++unit) {
    own.forward += units[unit].forward;
    own.backward += units[unit].backward;
  }
  // What the section's step takes beside that, for moving and updating, counts evenly.
  const auto items = static_cast<double>(divide_up(profile.micro_batches, plan.group));
  const double sum = own.forward + own.backward, item = plan.time.step / items;
  const std::optional<engine::Link>& link = whole.rates.link;
  const auto bytes = static_cast<double>(plan.group * profile.border_gradient_bytes);
  return {item * own.forward / sum, item * own.backward / sum,
          link ? link->latency + bytes / link->bandwidth : 0};
}

SectionWays make_ways(const PlanResult& plan, const TrainSettings& s, const Model& model,
                         const optim::Optimizer& optimizer, const kernels::MatrixLibrary& library,
                         const std::vector<engine::UnitRange>& cut, int section) {
  SectionWays of_section;
  const engine::UnitRange units = cut[static_cast<std::size_t>(section)];
  of_section.model = std::make_unique<Model>(model, units);
  const std::size_t micro_batches = plan.profile.micro_batches;
  const std::vector<engine::SectionSeconds> seconds =
      engine::seconds_of_units(plan.profile, optimizer, plan.request, plan.rates);
  const engine::Profile once = of_section.model->profile(
      micro_batches, library, engine::hidden_bytes(model.units(), optimizer, library));
  for (const std::size_t group : group_sizes(s, micro_batches)) {
    const engine::Pipeline pipeline{s.pipeline, static_cast<int>(cut.size()),
                                    divide_up(micro_batches, group)};
    Way& way = of_section.ways[group];
    way.profile = engine::in_pipeline(once, pipeline, section, group);
    engine::PlanRequest request = plan.request;
    request.group = group;
    try {
      way.plan = engine::make_plan(way.profile, optimizer, plan.budget, request, plan.rates);
      way.seconds = seconds_of(*way.plan, way.profile, plan, seconds, units);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kBudget) throw;
      way.error = error.what();
    }
  }
  return of_section;
}

// What a section tells the others.
Json told(const SectionWays& of_section) {
  Json ways = Json::array();
  for (const auto& [group, way] : of_section.ways) {
    Json& json = ways.emplace_back(Json{{"group", group}, {"error", way.error}});
    if (!way.plan) continue;
    json["forward"] = way.seconds.forward;
    json["backward"] = way.seconds.backward;
    json["message"] = way.seconds.message;
    json["peak"] = way.plan->peak_memory;
    json["disk"] = way.plan->disk_bytes;
  }
  return ways;
}

[[noreturn]] void refuse(const std::vector<Json>& sections, const PipelinePlan& pipeline) {
  for (std::size_t section = 0; section < sections.size(); ++section)
    if (std::ranges::all_of(sections[section], [](const Json& way) { return !way.contains("peak"); }))
      fail(ErrorCode::kBudget, "pipeline stage {} of {} ({}): {}; other --stages may fit", section + 1,
           sections.size(), pipeline.names[section],
           sections[section].front().at("error").get<std::string>());
  fail(ErrorCode::kBudget,
       "each stage of the pipeline fits with some number of micro-batches at once, and no number fits all of "
       "them; give more --memory, or other --stages");
}

// Finds the size of items with which the step is shortest; returns its place among the ways.
std::size_t choose(const std::vector<Json>& sections, std::size_t micro_batches, PipelinePlan& pipeline) {
  std::optional<std::size_t> best;
  for (std::size_t i = 0; i < sections.front().size(); ++i) {
    if (!std::ranges::all_of(sections, [&](const Json& ways) { return ways[i].contains("peak"); })) continue;
    std::vector<engine::SectionSeconds> seconds;
    for (const Json& ways : sections)
      seconds.push_back({ways[i].at("forward"), ways[i].at("backward"), ways[i].at("message")});
    engine::Pipeline shape = pipeline.pipeline;
    shape.items = divide_up(micro_batches, sections.front()[i].at("group").get<std::size_t>());
    engine::PipelineTime time = engine::simulate(shape, seconds);
    if (best && time.step >= pipeline.time.step) continue;
    best = i;
    pipeline.pipeline = shape;
    pipeline.time = std::move(time);
    pipeline.peaks.clear();
    for (const Json& ways : sections) pipeline.peaks.push_back(ways[i].at("peak"));
  }
  if (!best) refuse(sections, pipeline);
  return *best;
}

std::string name_of_units(const Model& model, engine::UnitRange range) {
  return model.units()[range.first].name + " to " + model.units()[range.end - 1].name;
}

}  // namespace

int sections_of(const TrainSettings& s) { return s.mesh ? s.mesh->size("pipeline") : 1; }

std::unique_ptr<Model> plan_section(PlanResult& plan, const TrainSettings& s, const Model& model,
                                    const optim::Optimizer& optimizer, const kernels::MatrixLibrary& library,
                                    RunRanks& ranks) {
  PipelinePlan& pipeline = plan.pipeline.emplace();
  const std::size_t blocks = model.units().size() - 2, micro_batches = plan.profile.micro_batches;
  // Sections that were measured apart would be cut otherwise on each rank.
  const std::string text =
      ranks.from_first(ranks.is_first() ? engine::to_text(choose_cut(plan, s, model, optimizer)) : "");
  pipeline.cut = engine::parse_cut(text, blocks);
  pipeline.pipeline = {s.pipeline, static_cast<int>(pipeline.cut.size()), micro_batches};
  for (const engine::UnitRange& units : pipeline.cut) pipeline.names.push_back(name_of_units(model, units));
  pipeline.section = ranks.rank();
  std::vector<SectionWays> here;
  std::vector<Json> sections;
  if (ranks.size() > 1) {
    here.push_back(make_ways(plan, s, model, optimizer, library, pipeline.cut, pipeline.section));
    for (const std::string& of_rank : ranks.from_all("the plans of the stages", told(here.front()).dump()))
      sections.push_back(Json::parse(of_rank));
  } else {
    for (int section = 0; section < pipeline.pipeline.sections; ++section) {
      here.push_back(make_ways(plan, s, model, optimizer, library, pipeline.cut, section));
      sections.push_back(told(here.back()));
    }
  }
  const std::size_t chosen = choose(sections, micro_batches, pipeline);
  SectionWays& own = here.front();
  Way& way = std::next(own.ways.begin(), static_cast<std::ptrdiff_t>(chosen))->second;
  plan.request.group = way.plan->group;
  plan.profile = std::move(way.profile);
  plan.plan = *std::move(way.plan);
  return std::move(own.model);
}

double PipelinePlan::bubble() const {
  const double busy = std::accumulate(time.busy.begin(), time.busy.end(), 0.0);
  return 1 - busy / (time.step * static_cast<double>(time.busy.size()));
}

std::string to_text(const PipelinePlan& p, const engine::Profile& profile) {
  const engine::WholeStep& step = *profile.whole_step;
  std::string text = fmt::format(
      "pipeline          stage {} of {}: {}; {}, {} items of {} micro-batch{}, of which it holds {}\n",
      p.section + 1, p.names.size(), p.names[static_cast<std::size_t>(p.section)],
      engine::name_of(p.pipeline.order), p.pipeline.items, step.group, step.group == 1 ? "" : "es",
      step.held);
  text += fmt::format("                  a step of all stages takes {:.2f} s, in {:.0f}% of which they wait",
                      p.time.step, 100 * p.bubble());
  if (p.bubble() > 0.5) text += "; a larger --accumulate, or fewer stages, would let them wait less";
  text += "\n                  memory of the stages: ";
  for (std::size_t i = 0; i < p.peaks.size(); ++i) text += (i > 0 ? ", " : "") + format_size(p.peaks[i]);
  return text + "\n";
}

Json to_json(const PipelinePlan& p) {
  Json stages = Json::array();
  for (std::size_t i = 0; i < p.cut.size(); ++i)
    stages.push_back({{"units", {p.cut[i].first, p.cut[i].end}},
                      {"names", p.names[i]},
                      {"predicted_peak", p.peaks[i]},
                      {"busy_seconds", p.time.busy[i]},
                      {"items_held", p.time.held[i]}});
  return {{"stage", p.section},        {"order", engine::name_of(p.pipeline.order)},
          {"items", p.pipeline.items}, {"step_seconds", p.time.step},
          {"bubble", p.bubble()},      {"stages", stages}};
}

}  // namespace sluice::models
