#include "models/run/mesh_choice.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <tuple>
#include <utility>

#include "core/bytes.h"
#include "core/error.h"
#include "engine/planner/planner.h"
#include "models/model/model.h"
#include "models/run/mesh_links.h"
#include "models/run/pipeline_plan.h"
#include "models/run/run_ranks.h"
#include "models/run/training_data.h"
#include "models/run/training_setup.h"

namespace sluice::models {
namespace {

// A step up to this many times as long as the shortest one counts as short, since plans have such errors.
constexpr double kAsShort = 1.1;
constexpr std::size_t kMostLines = 12;

using TriedMesh = MeshChoice::Tried;

Model model_on(const PlanBasis& basis, const TrainSettings& s) {
  return {basis.config,  s.dtype,        s.batch, s.length, s.plan.recompute.value_or(""),
          tensor_cut(s), sequence_cut(s)};
}

engine::Profile profile_on(const PlanBasis& basis, const TrainSettings& s, const Model& model,
                           std::size_t micro_batches) {
  return model.profile(micro_batches, basis.library,
                       engine::hidden_bytes(model.units(), basis.optimizer, basis.library),
                       engine::splits_backward(s.pipeline));
}

TrainSettings on_mesh(const TrainSettings& settings, const comm::Mesh& mesh) {
  TrainSettings s = settings;
  s.mesh = mesh;
  s.chooses_mesh = false;
  return s;
}

// Computes lower bounds of the steps of meshes: all computation, and communication within layers, distributed
// evenly over the stages.
class LeastSeconds {
 public:
  explicit LeastSeconds(const PlanBasis& basis) : basis_(basis) {}

  // Throws Error(kInvalidArgument) where layers or sequences cannot be cut this way.
  double of(const TrainSettings& s) {
    const std::pair<int, int> cut{s.mesh->size("tensor"), s.mesh->size("sequence")};
    auto found = profiles_.find(cut);
    if (found == profiles_.end())
      found = profiles_.emplace(cut, profile_on(basis_, s, model_on(basis_, s), 1)).first;
    PlanResult plan = basis_.known;
    set_request(plan, s);
    double seconds = 0;
    for (const engine::SectionSeconds& unit :
         engine::seconds_of_units(found->second, basis_.optimizer, plan.request, plan.rates))
      seconds += unit.forward + unit.backward;
    return static_cast<double>(own_micro_batches(s)) * seconds / sections_of(s);
  }

 private:
  const PlanBasis& basis_;
  std::map<std::pair<int, int>, engine::Profile> profiles_;  // of a micro-batch, by ranks along those axes
};

// The meshes that were compared, the simplest first.
class MeshSearch {
 public:
  MeshSearch(const PlanBasis& basis, const TrainSettings& settings) : basis_(basis), settings_(settings) {
    LeastSeconds least(basis);
    for (const comm::Mesh& mesh : meshes_of(settings.ranks.size, !settings.ranks.on_hosts().all_on_one())) {
      TriedMesh& tried = tried_.emplace_back();
      tried.mesh = mesh;
      check(tried, [&](TrainSettings& s) {
        check_mesh(s);
        settle_grain(s, basis.config);
        tried.at_least = least.of(s);
      });
    }
  }

  void plan_all() {
    std::vector<std::size_t> order(tried_.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::ranges::stable_sort(order, {}, [&](std::size_t i) { return tried_[i].at_least; });
    for (const std::size_t i : order) plan(i);
  }

  MeshChoice choice() const {
    const auto simplest = std::ranges::find_if(tried_, [&](const TriedMesh& tried) {
      return best_ && tried.fits() && tried.seconds <= kAsShort * tried_[*best_].seconds;
    });
    if (simplest == tried_.end()) refuse();
    return {simplest->mesh, tried_};
  }

 private:
  // Calls body with the settings of a mesh, and records why it is not possible.
  template <class Body>
  void check(TriedMesh& tried, const Body& body) {
    try {
      TrainSettings s = on_mesh(settings_, tried.mesh);
      body(s);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kInvalidArgument && error.code() != ErrorCode::kBudget) throw;
      tried.why_not = error.what();
      tried.lacks = error.lacks();
      tried.is_possible = error.code() == ErrorCode::kBudget;
    }
  }

  // Returns the time from which on a step of this mesh would not be chosen.
  double longest(std::size_t i) const {
    if (!best_) return std::numeric_limits<double>::infinity();
    return tried_[*best_].seconds * (i < *best_ ? kAsShort : 1);
  }

  void plan(std::size_t i) {
    TriedMesh& tried = tried_[i];
    if (!tried.is_possible || tried.at_least >= longest(i)) return;
    if (basis_.report_work) basis_.report_work();
    check(tried, [&](const TrainSettings& s) {
      check_token_bytes(s);
      const std::optional<PlanResult> plan = plan_on_mesh(basis_, s, longest(i));
      // A pipeline's plan with a longer step may have stopped at another size of items than its best.
      if (!plan || (plan->pipeline && plan->pipeline->time.step >= longest(i))) {
        tried.at_least = std::max(tried.at_least, longest(i));
        return;
      }
      tried.seconds = plan->pipeline ? plan->pipeline->time.step : plan->plan.time.step;
      tried.peak = plan->pipeline ? std::ranges::max(plan->pipeline->peaks) : plan->plan.peak_memory;
      if (!best_ || std::pair(tried.seconds, i) < std::pair(tried_[*best_].seconds, *best_)) best_ = i;
    });
  }

  // Returns reasons why meshes are not possible, each once, up to a limit.
  std::vector<std::string> reasons() const {
    constexpr std::size_t kMost = 4;
    std::vector<std::string> told;
    std::set<std::string> known;
    for (const TriedMesh& tried : tried_)
      if (told.size() < kMost && known.insert(tried.why_not).second)
        told.push_back(fmt::format("{} is not, since {}", tried.mesh.text(), tried.why_not));
    return told;
  }

  [[noreturn]] void refuse() const {
    // For some meshes the missing bytes are unknown.
    const auto lacks = [](const TriedMesh& tried) {
      return tried.lacks > 0 ? tried.lacks : std::numeric_limits<std::uint64_t>::max();
    };
    const TriedMesh* nearest = nullptr;
    for (const TriedMesh& tried : tried_)
      if (tried.is_possible && (nearest == nullptr || lacks(tried) < lacks(*nearest))) nearest = &tried;
    if (nearest == nullptr)
      fail(ErrorCode::kInvalidArgument, "--mesh auto: no mesh of {} ranks is possible: {}",
           settings_.ranks.size, fmt::join(reasons(), "; "));
    throw Error(ErrorCode::kBudget,
                fmt::format("--mesh auto: no mesh of {} ranks fits. --mesh {} lacks least: {}",
                            settings_.ranks.size, nearest->mesh.text(), nearest->why_not),
                nearest->lacks);
  }

  const PlanBasis& basis_;
  const TrainSettings& settings_;
  std::vector<TriedMesh> tried_;
  std::optional<std::size_t> best_;
};

std::string line_of(const TriedMesh& tried) {
  if (tried.fits()) return fmt::format("{:.4g} s, {}", tried.seconds, format_size(tried.peak));
  if (tried.why_not.empty()) return fmt::format("takes {:.4g} s at least", tried.at_least);
  if (!tried.is_possible) return tried.why_not;
  return tried.lacks > 0 ? "does not fit: it lacks " + format_size(tried.lacks) : "does not fit";
}

// Orders meshes for readers: the shortest steps, then those that do not fit, then the others.
std::vector<TriedMesh> by_interest(const MeshChoice& choice) {
  const auto interest = [&](const TriedMesh& tried) {
    const int kind = tried.mesh == choice.mesh ? 0 : tried.fits() ? 1 : tried.why_not.empty() ? 3 : 2;
    return std::tuple(tried.is_possible ? kind : 4, tried.seconds, tried.lacks, tried.at_least);
  };
  std::vector<TriedMesh> all = choice.tried;
  std::ranges::stable_sort(all, {}, interest);
  return all;
}

}  // namespace

std::vector<comm::Mesh> meshes_of(int ranks, bool on_several_hosts) {
  std::vector<int> sizes;
  for (int size = 1; size <= ranks; ++size)
    if (ranks % size == 0) sizes.push_back(size);
  std::vector<comm::Mesh> meshes;
  const auto add = [&](const std::vector<std::pair<const char*, int>>& axes) {
    std::string text;
    for (const auto& [axis, size] : axes)
      if (size > 1) text += fmt::format("{}{}={}", text.empty() ? "" : ",", axis, size);
    meshes.push_back(comm::Mesh::parse(text.empty() ? "data=1" : text));
  };
  for (const int tensor : sizes)
    for (const int sequence : sizes)
      for (const int pipeline : sizes) {
        if (ranks % (tensor * sequence) != 0 || ranks / (tensor * sequence) % pipeline != 0) continue;
        const int data = ranks / (tensor * sequence * pipeline);
        add({{"data", data}, {"pipeline", pipeline}, {"sequence", sequence}, {"tensor", tensor}});
        if (on_several_hosts && data > 1 && pipeline > 1)
          add({{"pipeline", pipeline}, {"data", data}, {"sequence", sequence}, {"tensor", tensor}});
      }
  return meshes;
}

std::optional<PlanResult> plan_on_mesh(const PlanBasis& basis, const TrainSettings& settings,
                                       double longest) {
  TrainSettings s = settings;
  settle_grain(s, basis.config);
  const Model model = model_on(basis, s);
  PlanResult plan = basis.known;
  plan.profile = profile_on(basis, s, model, own_micro_batches(s));
  if (!basis.counts_tokens) plan.budget.base += round_up(token_bytes(s), kMiB);
  if (sections_of(s) == 1) {
    fit(plan, s, basis.optimizer, basis.cores);
    return plan;
  }
  set_request(plan, s);
  RunRanks alone(TrainSettings{});
  if (!plan_section(plan, s, model, basis.optimizer, basis.library, alone, longest)) return std::nullopt;
  return plan;
}

MeshChoice choose_mesh(const PlanBasis& basis, const TrainSettings& settings) {
  MeshSearch search(basis, settings);
  search.plan_all();
  return search.choice();
}

std::string to_text(const MeshChoice& choice) {
  std::string text = fmt::format("mesh              {}, of {} that were compared:\n", choice.mesh.text(),
                                 choice.tried.size());
  const std::vector<TriedMesh> all = by_interest(choice);
  for (std::size_t i = 0; i < std::min(all.size(), kMostLines); ++i)
    text += fmt::format("                  {:<32}  {}\n", all[i].mesh.text(), line_of(all[i]));
  if (all.size() > kMostLines)
    text += fmt::format("                  {} others: --json says what became of them\n",
                        all.size() - kMostLines);
  return text;
}

Json to_json(const MeshChoice& choice) {
  Json all = Json::array();
  for (const TriedMesh& tried : choice.tried) {
    Json& json = all.emplace_back(Json{{"mesh", tried.mesh.text()}});
    if (tried.fits()) {
      json["step_seconds"] = tried.seconds;
      json["predicted_peak"] = tried.peak;
    } else if (tried.why_not.empty()) {
      json["least_seconds"] = tried.at_least;
    } else {
      json["why_not"] = tried.why_not;
      if (tried.lacks > 0) json["lacks"] = tried.lacks;
    }
  }
  return {{"chosen", choice.mesh.text()}, {"tried", all}};
}

}  // namespace sluice::models
