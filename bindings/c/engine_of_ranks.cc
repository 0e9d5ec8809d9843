#include <fmt/ranges.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "allocator/memory.h"
#include "bindings/c/handles.h"
#include "bindings/c/status.h"
#include "core/interrupt.h"
#include "core/json.h"
#include "core/log.h"
#include "engine/machine/link_rate.h"
#include "engine/machine/process.h"
#include "engine/planner/planner.h"
#include "engine/ranks/agreement.h"

// How the ranks of a run make their engines: they compare their models, agree on the common parts of their
// plans, and exchange whether they have succeeded.
namespace sluice::c {
namespace {

struct Failure {
  ErrorCode code = ErrorCode::kInternal;
  std::string text;  // empty: no failure
};

// Runs this rank's own part, and returns its error for the other ranks. With options their function may stop
// it, as it may not where ranks wait for each other.
Failure failure_of(const std::function<void()>& action, const sluice_engine_options* options = nullptr) {
  try {
    std::optional<Interruptible> interruptible;
    if (options != nullptr) interruptible.emplace(look_of(*options));
    action();
  } catch (const Error& error) {
    return {error.code(), error.what()};
  } catch (const CallbackStopped&) {
    return {ErrorCode::kState, "a function of the caller stopped it"};
  } catch (const std::bad_alloc&) {
    return {ErrorCode::kBudget, "the system gave no memory"};
  } catch (const std::exception& error) {  // the other ranks wait for this one
    return {ErrorCode::kInternal, error.what()};
  }
  return {};
}

// Collective. Throws the failure of the first rank that has one, on all ranks.
void throw_together(comm::Communicator& communicator, const std::string& what, const Failure& own) {
  const Json mine = {{"code", static_cast<int>(own.code)}, {"text", own.text}};
  const std::vector<std::string> all = engine::exchange(communicator, what, mine.dump());
  if (!own.text.empty()) throw Error(own.code, own.text);
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    const Json other = Json::parse(all[rank]);
    if (const auto text = other.at("text").get<std::string>(); !text.empty())
      fail(static_cast<ErrorCode>(other.at("code").get<int>()), "rank {} could not make its engine: {}", rank,
           text);
  }
}

// Returns the values that must be equal on all ranks.
Json record_of(const Planned& planned) {
  Json record = {{"version", SLUICE_VERSION},
                 {"the optimizer", planned.optimizer->name()},
                 {"the optimizer's settings", planned.optimizer->settings()},
                 {"the number of units", planned.model_units().size()},
                 {"the number of parameter groups", planned.groups},
                 {"options.reproducible", planned.request.reproducible},
                 {"options.sum_gradients", planned.request.sums_each_backward ? "each_backward" : "step"},
                 {"what computes", planned.budget.device > 0 ? "a GPU" : "the CPU"},
                 {"the number of micro-batches of a rank", planned.profile.micro_batches}};
  Json& units = record["units"] = Json::array();
  for (const engine::UnitSpec& unit : planned.model_units()) {
    Json parameters = Json::array();
    for (const engine::ParameterSpec& p : unit.parameters)
      parameters.push_back({p.name, p.shape, p.group, p.by_elements, p.span_first, p.elements()});
    units.push_back({{"name", unit.name},
                     {"dtype", name_of(unit.dtype)},
                     {"trainable", unit.trainable},
                     {"parameters", parameters}});
  }
  return record;
}

// Returns the values that must be equal in the plans after the ranks have agreed.
Json record_of(const engine::Plan& plan) {
  return {{"when gradients are summed, as stage, memory and micro-batches say,",
           plan.sums_in_backward ? "in backward" : "when they are used"}};
}

// Collective. Throws where the records of ranks differ.
void compare(comm::Communicator& communicator, const char* call, const Json& record) {
  const std::vector<std::string> all = engine::exchange(communicator, call, record.dump());
  const Json first = Json::parse(all[0]);
  const auto differ = [](std::size_t rank, const std::string& what, const Json& own, const Json& of_first) {
    fail(ErrorCode::kInvalidArgument, "{} is {} on rank {}, and {} on rank 0; give all ranks the same", what,
         own.dump(), rank, of_first.dump());
  };
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    const Json other = Json::parse(all[rank]);
    for (const auto& [name, value] : first.items())
      if (name != "units" && other.at(name) != value) differ(rank, name, other.at(name), value);
    for (std::size_t unit = 0; first.contains("units") && unit < first.at("units").size(); ++unit) {
      const Json &a = first.at("units")[unit], &b = other.at("units")[unit];
      if (a != b) differ(rank, "unit " + std::to_string(unit), b, a);
    }
  }
}

// Collective. Finds whether another rank has this one's GPU. Throws, on all ranks alike, where two of them
// have one GPU and were not told to share it. Returns whether all compute on GPUs.
bool check_gpus(comm::Communicator& communicator, const sluice_engine_options& options, KnownByRanks& known) {
  const Device* const gpu = known.gpu.get();
  Json own;
  if (gpu != nullptr)
    own = {{"uuid", gpu->info().uuid},
           {"gpu", fmt::format("GPU {}, {}", gpu->info().index, gpu->info().pci_address)},
           {"name", fmt::format("{}, '{}'", gpu->info().pci_address, gpu->info().name)},
           {"shared", options.device != 0 && options.device_facts != nullptr}};
  std::map<std::string, std::vector<std::size_t>> ranks_of_gpu;
  std::vector<Json> all;
  for (const std::string& text : engine::exchange(communicator, "which GPUs compute", own.dump())) {
    const std::size_t rank = all.size();
    const Json& given = all.emplace_back(Json::parse(text));
    communicator.describe(static_cast<int>(rank), given.is_null() ? "" : given.at("gpu").get<std::string>());
    if (!given.is_null()) ranks_of_gpu[given.at("uuid").get<std::string>()].push_back(rank);
  }
  for (const auto& [uuid, ranks] : ranks_of_gpu)
    if (ranks.size() > 1 &&
        !std::ranges::all_of(ranks, [&](std::size_t r) { return all[r].at("shared").get<bool>(); }))
      fail(ErrorCode::kInvalidArgument,
           "ranks {} of one host are on one GPU ({}); give each one of its own, by its number "
           "(options.device) or by the environment variable LOCAL_RANK, and start as many ranks as there are "
           "GPUs. To let them share that one, give its number (in C SLUICE_FIRST_DEVICE for 0) and "
           "options.device_facts on each of them, and "
           "options.device_memory so that all fit",
           fmt::join(ranks, ", "), all[ranks.front()].at("name").get<std::string>());
  if (gpu != nullptr) known.shares_gpu = ranks_of_gpu.at(gpu->info().uuid).size() > 1;
  return std::ranges::none_of(all, &Json::is_null);
}

// Collective. All ranks open their GPUs before they find out how these exchange data.
KnownByRanks know_together(comm::Communicator& communicator, const sluice_engine_options& options) {
  KnownByRanks known;
  const std::uint64_t holds = allocator::resident_bytes() + engine::kReserve;
  known.link = engine::measure_link(communicator, options.memory - std::min(options.memory, holds));
  throw_together(communicator, "the GPUs of ranks", failure_of([&] {
                   check_device(options);
                   if (options.device_memory > 0) known.gpu = open_fitting(options);
                 }));
  if (!check_gpus(communicator, options, known)) return known;
  if (options.ranks != nullptr)
    known.between_gpus = know_links(options, options.ranks->communicator, *known.gpu, known.link);
  throw_together(communicator, "what joins GPUs", failure_of([&] {
                   if (options.ranks != nullptr) check_links(options, known.between_gpus);
                 }));
  return known;
}

// Lets ranks begin each phase of what they measure together, so that each gets the rates that it has while
// all measure. Each rank has one while it plans; it may have fewer phases than others, as after an error.
class Phases {
 public:
  explicit Phases(comm::Communicator& communicator) : communicator_(communicator) {}
  ~Phases() {
    try {
      while (next("ended")) {
      }
    } catch (const std::exception& error) {  // the ranks have failed, which the next call reports
      log().debug("{}", error.what());
    }
  }
  Phases(const Phases&) = delete;
  Phases& operator=(const Phases&) = delete;
  void begin() { next("begins"); }

 private:
  // Whether another rank begins one.
  bool next(const char* own) {
    return std::ranges::count(engine::exchange(communicator_, "a phase of measurements", own), "begins") > 0;
  }
  comm::Communicator& communicator_;
};

}  // namespace

std::unique_ptr<sluice_engine> make_engine(const sluice_model& model, const sluice_engine_options& options) {
  sluice_ranks* const ranks = ranks_of(options);
  if (ranks == nullptr) {
    const Interruptible interruptible(look_of(options));
    return std::make_unique<sluice_engine>(make_plan(model, options, For::kEngine));
  }
  comm::Communicator& communicator = ranks->communicator;
  KnownByRanks known = know_together(communicator, options);
  std::optional<Planned> planned;
  const Failure failure = failure_of(
      [&] {
        Phases phases(communicator);
        known.begin_phase = [&] { phases.begin(); };
        planned = make_plan(model, options, For::kEngine, std::move(known));
      },
      &options);
  throw_together(communicator, "the plans of engines", failure);
  compare(communicator, "the model", record_of(*planned));
  const bool again =
      planned->data != nullptr && engine::agree_on_plan(*planned->data, planned->plan, planned->request);
  throw_together(communicator, "the plans on which ranks agree", failure_of([&] {
                   if (again)
                     planned->plan = engine::make_plan(planned->profile, *planned->optimizer, planned->budget,
                                                       planned->request, planned->rates);
                 }));
  if (!planned->plan.ranks.by_nccl) planned->nccl.reset();  // its memory still counts as taken
  compare(communicator, "when gradients are summed", record_of(planned->plan));
  std::unique_ptr<sluice_engine> made;
  throw_together(communicator, "the engines",
                 failure_of([&] { made = std::make_unique<sluice_engine>(std::move(*planned)); }, &options));
  return made;
}

}  // namespace sluice::c
