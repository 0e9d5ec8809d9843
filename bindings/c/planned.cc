#include <algorithm>
#include <functional>
#include <future>
#include <map>
#include <set>
#include <thread>

#include "allocator/memory.h"
#include "bindings/c/handles.h"
#include "bindings/c/status.h"
#include "core/bytes.h"
#include "core/interrupt.h"
#include "core/system.h"
#include "engine/machine/machine_rates.h"
#include "engine/machine/process.h"
#include "engine/plan/cut.h"
#include "engine/planner/planner.h"
#include "engine/ranks/agreement.h"
#include "engine/saving/checkpoint_values.h"
#include "offload/disk_folders.h"

namespace sluice::c {
namespace {

constexpr std::uint32_t kMostPlanned = 65536;  // ranks

void check_model(const sluice_model& model, std::uint32_t groups) {
  if (model.units.empty()) fail(ErrorCode::kInvalidArgument, "the model has no units; add some");
  for (const engine::UnitSpec& unit : model.units)
    for (const engine::ParameterSpec& parameter : unit.parameters)
      if (parameter.group >= groups)
        fail(ErrorCode::kInvalidArgument, "'{}' is in group {}, and options.groups is {}", parameter.name,
             parameter.group, groups);
}

std::vector<engine::UnitSpec> units_of(const sluice_model& model) {
  std::vector<engine::UnitSpec> units = model.units;
  std::size_t first = 0;
  for (engine::UnitSpec& unit : units) {
    const auto& all = unit.parameters;
    for (std::size_t i = 0; i < all.size(); ++i)
      if (model.frozen[first + i] != model.frozen[first])
        fail(ErrorCode::kInvalidArgument,
             "unit '{}' has '{}', which is {}, and '{}', which is not; give the frozen ones a unit of their "
             "own",
             unit.name, all[0].name, model.frozen[first] ? "frozen" : "trainable", all[i].name);
    unit.trainable = all.empty() || !model.frozen[first];
    first += all.size();
  }
  return units;
}

// The groups of ranks with other sections and with the same section must form a mesh of all ranks.
void check_mesh(const sluice_engine_options& options) {
  if (options.planned_ranks > 0)
    fail(ErrorCode::kInvalidArgument,
         "options.planned_ranks is {}, and options.sections is given; state the ranks themselves",
         options.planned_ranks);
  const int size = options.ranks == nullptr ? 1 : options.ranks->communicator.size();
  const int sections = options.sections->communicator.size(), all = options.sections->all.communicator.size();
  if (size * sections != all || (size > 1 && &options.ranks->all != &options.sections->all))
    fail(ErrorCode::kInvalidArgument,
         "options.ranks are {}, and options.sections {}, of {} ranks; make both of the same ranks, by "
         "sluice_ranks_along() with one mesh",
         size, sections, all);
}

std::vector<engine::UnitSpec> own_units(std::vector<engine::UnitSpec> all,
                                        const sluice_engine_options& options, Planned& made) {
  if (options.sections == nullptr) return all;
  check_mesh(options);
  const comm::Communicator& sections = options.sections->communicator;
  const auto size = static_cast<std::uint64_t>(sections.size());
  const std::uint64_t chunks = std::max(1u, options.section_chunks);
  std::vector<engine::UnitRange> cut;
  engine::UnitId end = 0;
  for (std::uint64_t number = 0; number < chunks * size; ++number) {
    const engine::UnitId first = end;
    end += (&required(options.section_units, "options.section_units"))[number];
    if (first >= end || end > all.size())
      fail(ErrorCode::kInvalidArgument,
           "options.section_units gives section {} the units {} to {}, of a model that has {}; each section "
           "has one at least{}",
           number % size, first, end, all.size(), chunks > 1 ? " in each chunk" : "");
    cut.push_back({first, end});
  }
  if (end != all.size())
    fail(ErrorCode::kInvalidArgument,
         "options.section_units has {} units, and the model {}; each is in one section", end, all.size());
  made.model = std::make_unique<engine::Layout>(std::move(all));
  made.section = std::make_unique<engine::Section>(*made.model, cut, sections.size(), sections.rank(), false);
  std::vector<engine::UnitSpec> units;
  for (const engine::UnitRange& own : engine::units_of(cut, sections.size(), sections.rank())) {
    const std::size_t first = units.size();
    units.insert(units.end(), made.model->units().begin() + own.first, made.model->units().begin() + own.end);
    units[first].index = made.model->logical_index(made.model->first_parameter(own.first));
  }
  return units;
}

std::vector<offload::DiskFolder> folders_of(const sluice_engine_options& options) {
  std::vector<offload::DiskFolder> folders;
  for (std::size_t i = 0; i < options.disk_folders; ++i) {
    const sluice_folder& folder = (&required(options.disk, "options.disk"))[i];
    const char* path = &required(folder.path, "options.disk.path");
    folders.push_back(folder.limit == 0 ? offload::parse_disk(path)
                                        : offload::DiskFolder{path, folder.limit});
  }
  offload::resolve_disk(folders, "", 0);
  return folders;
}

std::unique_ptr<optim::Optimizer> optimizer_of(const sluice_engine_options& options) {
  optim::OptimizerSettings settings;
  if (options.optimizer != nullptr) settings.name = options.optimizer;
  settings.settings = settings_of(options.settings, options.setting_count, "options.settings");
  settings.storage = {state_type_of(options.state), options.no_master == 0, options.seed};
  return optim::make_optimizer(settings);
}

// Returns null where the optimizer has no matrix products.
std::unique_ptr<kernels::F32Products> products_of(const sluice_engine_options& options, const Planned& made) {
  if (!engine::has_products(made.profile.units, *made.optimizer)) return nullptr;
  if (options.sgemm != nullptr) return kernels::make_blas_products(options.sgemm);
  return kernels::load_matrix_library(made.threads);
}

engine::RankOf rank_of(const sluice_engine_options& options) {
  if (options.ranks != nullptr) return engine::rank_of(options.ranks->communicator);
  if (options.planned_ranks == 0) return {};
  if (options.planned_rank >= options.planned_ranks || options.planned_ranks > kMostPlanned)
    fail(ErrorCode::kInvalidArgument,
         "options.planned_rank is {}, and options.planned_ranks is {}; the ranks are 0 to one less than the "
         "latter, which is at most {}",
         options.planned_rank, options.planned_ranks, kMostPlanned);
  return {static_cast<int>(options.planned_rank), static_cast<int>(options.planned_ranks)};
}

std::uint64_t bytes_for_ranks(const sluice_engine_options& options) {
  if (const sluice_ranks* ranks = ranks_of(options)) return ranks->bytes();
  return options.planned_ranks < 2 ? 0 : bytes_of_ranks(static_cast<int>(options.planned_ranks));
}

// Returns the number of ranks that share this host's disks.
int ranks_here(const sluice_engine_options& options) {
  if (const sluice_ranks* ranks = ranks_of(options)) return ranks->ranks_here;
  return std::max(1, static_cast<int>(options.planned_ranks));
}

// Returns the number for one rank.
std::size_t micro_batches_of(const sluice_engine_options& options, int ranks) {
  const auto size = static_cast<std::uint32_t>(ranks);
  if (options.reproducible != 0 && options.micro_batches == 0)
    fail(ErrorCode::kInvalidArgument,
         "options.micro_batches is 0 with options.reproducible; state how many a step has over all ranks");
  if (options.micro_batches % size != 0)
    fail(ErrorCode::kInvalidArgument,
         "options.micro_batches is {}, and there are {} ranks; state how many a step has over all ranks, a "
         "multiple of {}",
         options.micro_batches, size, size);
  if (options.update_in_backward != 0 && size == 1 && options.micro_batches > 1)
    fail(ErrorCode::kInvalidArgument,
         "options.micro_batches is {} with options.update_in_backward, whose gradients are applied as they "
         "come; leave one out",
         options.micro_batches);
  if (options.update_in_backward != 0 && size > 1 && options.micro_batches != size)
    fail(
        ErrorCode::kInvalidArgument,
        "options.micro_batches is {} with options.update_in_backward on {} ranks, whose gradients are summed "
        "over them and applied as they come; state {}, one micro-batch of each rank in a step, or leave "
        "options.update_in_backward out",
        options.micro_batches, size, size);
  return std::max<std::size_t>(1, options.micro_batches / size);
}

// Whether options.sum_gradients asks for that; checks what it needs, also where there is one rank, which sums
// nothing.
bool sums_each_backward(const sluice_engine_options& options) {
  const std::string_view asked = options.sum_gradients == nullptr ? "step" : options.sum_gradients;
  if (asked == "step") return false;
  if (asked != "each_backward")
    fail(ErrorCode::kInvalidArgument,
         "options.sum_gradients is '{}'; it is 'step' (at a step's end) or 'each_backward'", asked);
  if (options.stage != SLUICE_STAGE(2) && options.stage != SLUICE_STAGE(3))
    fail(ErrorCode::kInvalidArgument,
         "options.sum_gradients is 'each_backward', and options.stage is {}; state stage 2 or 3, at which a "
         "rank keeps its part of gradients, or leave options.sum_gradients out",
         options.stage == 0 ? std::string("left to the plan") : std::to_string(options.stage - 1));
  if (options.micro_batches == 0)
    fail(
        ErrorCode::kInvalidArgument,
        "options.sum_gradients is 'each_backward', and options.micro_batches is 0; state how many a step has "
        "over all ranks");
  const char* const other =
      options.reproducible != 0         ? "options.reproducible, which adds pairwise over all micro-batches"
      : options.update_in_backward != 0 ? "options.update_in_backward, which applies each sum"
                                        : nullptr;
  if (other != nullptr)
    fail(ErrorCode::kInvalidArgument,
         "options.sum_gradients is 'each_backward', which adds up the sums of micro-batches, with {}; leave "
         "one out",
         other);
  return true;
}

engine::PlanRequest request_of(const sluice_engine_options& options) {
  engine::PlanRequest request;
  request.ranks = rank_of(options);
  if (request.ranks.size > 1 && options.stage > 0) request.stage = options.stage - 1;
  request.clip = options.update_in_backward == 0;
  request.reproducible = options.reproducible != 0;
  if (options.micro_batches > 0) request.group = 1;
  request.sums_each_backward = sums_each_backward(options);
  if (request.reproducible) {
    if (!request.clip)
      fail(ErrorCode::kInvalidArgument,
           "options.update_in_backward is given with options.reproducible, whose gradients are summed "
           "when all of them have come; leave one out");
  }
  if (options.prefetch > 0) request.prefetch = options.prefetch;
  const char* const places[] = {options.place_parameters, options.place_gradients, options.place_state};
  for (std::size_t part = 0; part < engine::kParts; ++part)
    if (places[part] != nullptr) request.places[part] = engine::tier_of_place(places[part]);
  if (options.device_memory == 0 && std::ranges::count(request.places, allocator::Tier::kDevice) > 0)
    fail(ErrorCode::kInvalidArgument,
         "a place is 'device', and options.device_memory is 0, with which the CPU computes; state it, or "
         "another place");
  request.updates = updates_of(options);
  return request;
}

// A place of everything ("disk" for all parts) is that of all parts that can be there.
void check_gradient_parts(const sluice_engine_options& options, const Planned& made) {
  const auto is_disk = [](const std::optional<allocator::Tier>& place) {
    return place == allocator::Tier::kDisk;
  };
  if (options.device_memory > 0 && made.plan.sums_each_backward &&
      is_disk(made.request.place(engine::Part::kGradient)) &&
      !std::ranges::all_of(made.request.places, is_disk))
    fail(ErrorCode::kInvalidArgument,
         "options.place_gradients is 'disk' with options.sum_gradients, and parts of gradients are in the "
         "memory of GPUs, or of the host, where GPUs compute; leave one out");
}

}  // namespace

std::function<void()> look_of(const sluice_engine_options& options) {
  return [stop = options.stop, context = options.stop_context] {
    if (stop != nullptr) stop_unless_zero(stop(context));
  };
}

Planned make_plan(const sluice_model& model, const sluice_engine_options& options, For purpose,
                  KnownByRanks known) {
  Planned made;
  made.groups = std::max<std::uint32_t>(1, options.groups);
  check_model(model, made.groups);
  if (options.memory == 0)
    fail(ErrorCode::kInvalidArgument, "options.memory is 0; state what memory there is");
  if (options.reserved > options.memory || options.trace_events > options.memory / engine::kTraceEventBytes)
    fail(ErrorCode::kBudget,
         "{} are reserved for what the process takes beside the engine{}, which is more than the memory of "
         "{}: state more, or reserve or trace less",
         format_size(options.reserved),
         options.trace_events == 0 ? ""
                                   : fmt::format(", and {} events of {} bytes are traced",
                                                 options.trace_events, engine::kTraceEventBytes),
         format_size(options.memory));
  check_device(options);
  made.request = request_of(options);
  made.threads = options.threads == 0 ? usable_cpus() : static_cast<int>(std::min(options.threads, 4096u));
  made.team = options.team;
  made.optimizer = optimizer_of(options);
  made.disk = folders_of(options);
  made.trace_events = options.trace_events;
  made.serve_touches = options.serve_touches != 0;
  const std::size_t held = std::max<std::size_t>(1, options.held_units) + (made.serve_touches ? 1 : 0);
  made.profile = engine::any_order_profile(own_units(units_of(model), options, made), held);
  made.profile.micro_batches = micro_batches_of(options, made.request.ranks.size);
  made.profile.ends_micro_batches = options.micro_batches > 0;
  made.products = products_of(options, made);
  if (made.products != nullptr)
    made.profile.hidden_bytes = engine::hidden_bytes(made.profile.units, *made.optimizer, *made.products);
  const std::vector<offload::DiskKnowledge> disks = offload::know_disks(made.disk);
  made.io = offload::make_io_service(offload::options_for(disks));
  engine::add_disk(disks, ranks_here(options), made.rates);
  made.rates.link = known.link;
  made.checkpoint_buffers =
      engine::CheckpointTensors(engine::Layout(made.model_units()), *made.optimizer)
          .buffer_bytes(made.section == nullptr ? made.request.ranks.size
                                                : ranks_of(options)->communicator.size());
  made.budget.memory = options.memory;
  made.budget.disk = offload::usable_disk(made.disk);
  know_device(options, purpose, std::move(known), made);
  const std::uint64_t holds = allocator::resident_bytes();
  made.budget.base = holds - std::min(holds, options.given_back) + engine::kReserve + options.reserved +
                     made.checkpoint_buffers + made.trace_events * engine::kTraceEventBytes +
                     bytes_for_ranks(options);
  made.ranks = ranks_of(options);
  made.data = options.ranks == nullptr ? nullptr : &options.ranks->communicator;
  made.sections = options.sections == nullptr ? nullptr : &options.sections->communicator;
  made.reserved = options.reserved;
  made.plan = engine::make_plan(made.profile, *made.optimizer, made.budget, made.request, made.rates);
  check_gradient_parts(options, made);
  if (purpose == For::kEngine) {
    engine::check_group_limit(made.plan.peak_memory, ranks_here(options),
                              "within options.memory the plan takes");
    engine::check_machine_memory(made.plan.peak_memory, ranks_here(options));
  }
  return made;
}

std::string Planned::to_text() const { return engine::to_json(plan, profile, budget).dump(2); }

}  // namespace sluice::c

using namespace sluice::c;  // NOLINT: what follows is of this room

sluice_status sluice_process_memory(uint64_t* resident, uint64_t* peak) {
  return guarded([&] {
    if (resident != nullptr) *resident = sluice::allocator::resident_bytes();
    if (peak != nullptr) *peak = sluice::allocator::peak_resident_bytes();
  });
}

sluice_engine::sluice_engine(Planned made)
    : planned(std::move(made)),
      ranks(planned.ranks),
      threads(planned.threads, planned.team),
      assembly(planned,
               {threads, *planned.io, *planned.optimizer, planned.products.get(), planned.data, device,
                planned.sections, planned.nccl.get()},
               {.trace_events = planned.trace_events, .may_replan = true}) {
  using namespace sluice;  // NOLINT: likewise
  if (device) engine->use_stream(default_stream());
  if (engine->state_reads() != nullptr && planned.data->rank() > 0 && device == nullptr)
    states.emplace(*engine, mutex);
  allocator::install_touch_reporter();
  if (!planned.serve_touches) return;
  touches.emplace([this](const sluice::allocator::TouchServer::Touch& touch) { return bring_in(touch); });
  engine->serve_touches(*touches);
}

// Called on the touch server's thread. Bytes from other ranks may come by functions of the caller, which do
// not return while they wait for a lock that the faulting thread holds.
std::string sluice_engine::bring_in(const sluice::allocator::TouchServer::Touch& touch) {
  if (caller == touch.thread)
    return "a function that the engine has called touches it, or memory of the engine was handed to a call; "
           "acquire the unit first, or hand in a copy";
  const auto functions = planned.ranks == nullptr ? nullptr : planned.ranks->functions;
  if (functions == nullptr) return bring_in_now(touch);
  const auto result = std::make_shared<std::promise<std::string>>();
  std::future<std::string> found = result->get_future();
  std::thread([this, touch, result] {
    try {
      result->set_value(bring_in_now(touch));
    } catch (...) {
      result->set_exception(std::current_exception());
    }
  }).detach();
  while (found.wait_for(std::chrono::milliseconds(100)) != std::future_status::ready)
    if (functions->is_late())
      return fmt::format(
          "it is put together from what other ranks have, and the caller's functions that move packets have "
          "not returned for {:.3g} s: they wait for a lock that the thread which touches it holds, as "
          "Python's; acquire the unit before (in Python read it by PyTorch's operations, as p.clone())",
          std::chrono::duration<double>(functions->limit()).count());
  return found.get();
}

std::string sluice_engine::bring_in_now(const sluice::allocator::TouchServer::Touch& touch) {
  const Turn turn(*this);
  if (engine->left()) return {};  // the access is repeated at the memory that is there now
  const auto unit = engine->unit_at(touch.address);
  if (!unit) return "no unit lies there";
  engine->touch(*unit, touch.write);
  return {};
}

sluice_status sluice_plan(const sluice_model* model, const sluice_engine_options* options, char** json) {
  return guarded([&] {
    char*& out = required(json, "json");
    const sluice_engine_options known = known_part(options, "options");
    const sluice::Interruptible interruptible(look_of(known));
    out = new_text(make_plan(required(model, "model"), known, For::kPlan).to_text());
  });
}

sluice_status sluice_engine_create(const sluice_model* model, const sluice_engine_options* options,
                                   sluice_engine** engine) {
  return guarded([&] {
    sluice_engine*& out = required(engine, "engine");
    const sluice_engine_options known = known_part(options, "options");
    if (known.planned_ranks > 0)
      sluice::fail(sluice::ErrorCode::kInvalidArgument,
                   "options.planned_ranks is {}, which is for sluice_plan(); state options.ranks, or 0",
                   known.planned_ranks);
    out = make_engine(required(model, "model"), known).release();
  });
}

void sluice_engine_destroy(sluice_engine* engine) { destroy(engine); }

sluice_status sluice_engine_plan(const sluice_engine* engine, char** json) {
  return guarded([&] { required(json, "json") = new_text(required(engine, "engine").planned.to_text()); });
}
