#include "engine/steps/core.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>

#include "core/bytes.h"
#include "core/json.h"

namespace sluice::engine {

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

std::vector<allocator::Tier> Core::state_tiers(const Plan& plan) {
  std::vector<allocator::Tier> tiers;
  for (const UnitPlan& unit : plan.units) tiers.push_back(unit.tier(Part::kState));
  return tiers;
}

std::vector<std::optional<std::size_t>> Core::gradient_shard_sizes(const Profile& profile) const {
  std::vector<std::optional<std::size_t>> sizes(layout.units().size());
  for (UnitId unit = 0; unit < sizes.size(); ++unit)
    if (plan.units[unit].tier(Part::kGradient) == allocator::Tier::kRanks)
      sizes[unit] = ranks->own(unit).size() * size_of(final_gradient_type(profile, unit));
  return sizes;
}

Core::Core(const Profile& profile, const Plan& the_plan, const optim::Optimizer& the_optimizer,
           const Resources& the_resources)
    : resources(checked(profile, the_plan, the_resources)),
      optimizer(the_optimizer),
      plan(the_plan),
      layout(profile.units),
      ranks(resources.communicator == nullptr
                ? std::nullopt
                : std::optional<Ranks>(std::in_place, *resources.communicator, layout, optimizer,
                                       plan.partitions_state())),
      waits(resources.trace),
      gpu(plan.compute() == allocator::Tier::kDevice
              ? std::optional<DeviceWork>(std::in_place, *resources.device)
              : std::nullopt),
      host_records(gpu ? std::optional<HostRecords>(std::in_place, resources.ledger, *gpu) : std::nullopt),
      gpu_disk(gpu && resources.disk != nullptr
                   ? std::optional<DeviceDisk>(std::in_place, resources.ledger, *gpu, *resources.disk)
                   : std::nullopt),
      parameter_shards(ranks && plan.partitions_any(Part::kParameters)
                           ? std::optional<ParameterShards>(std::in_place, layout, plan, *ranks)
                           : std::nullopt),
      gradient_shards(gradient_shard_sizes(profile)),
      backings(make_backings(resources.disk, parameter_shards ? &*parameter_shards : nullptr,
                             host_records ? &*host_records : nullptr, gpu_disk ? &*gpu_disk : nullptr)),
      pager(resources.ledger, *backings, waits, work()),
      gradients(layout, profile, plan, ranks ? &*ranks : nullptr, pager, work()),
      states(layout,
             StateFormat(layout, optimizer, plan.chunk_elements,
                         Shards::of(plan.ranks.rank, plan.ranks.size, plan.partitions_state())),
             state_tiers(plan), *backings, work(), plan.updated_by_cpu()),
      wholes(layout, optimizer),
      sums_of_ranks(ranks && ranks->any_partitioned() ? std::optional<SumsOfRanks>(std::in_place, *ranks)
                                                      : std::nullopt),
      one_thread(1, resources.threads.team()),
      executor(make_executor()),
      cpu_executor(make_cpu_executor()),
      updates(layout, optimizer, states, executor ? *executor : *cpu_executor, plan.serving_pieces > 0,
              {work(), cpu_executor.get()}),
      host_staging(gpu ? std::optional<HostStaging>(std::in_place, states, *gpu) : std::nullopt),
      queue(layout, optimizer, pager, gradients, updates, waits, parameters,
            {ranks && ranks->any_partitioned() ? &*ranks : nullptr,
             parameter_shards ? &*parameter_shards : nullptr, &gradient_shards,
             profile.any_order && ranks && ranks->any_partitioned()}),
      has_values(layout.units().size()),
      applied(layout.parameters()) {
  // The client may touch parameters at any time, unless they are on a GPU.
  const bool exposed = profile.any_order && !gpu;
  for (UnitId unit = 0; unit < layout.units().size(); ++unit)
    parameters.push_back(pager.define(
        {"parameters of " + name_of(unit), layout.unit_bytes(unit), allocator::Purpose::kParameter,
         plan.units[unit].tier(Part::kParameters), exposed, true, is_packed(layout.unit_bytes(unit)),
         layout.units()[unit].parameters.front().continues(), unit}));
  for (UnitId unit = 0; unit < layout.units().size(); ++unit)
    for (int use = 0; use < gradients.uses(unit); ++use)
      for (const HoldingId holding : gradients.holdings(unit, use)) pager.follow(holding, parameters[unit]);
  if (parameter_shards) parameter_shards->define(*backings);
  if (gpu_disk) gpu_disk->set_piece(DeviceDisk::piece_bytes(layout, states.format()));
  if (plan.uses_disk() || gpu) backings->allocate();
  pager.start(plan.extent_bytes, plan.extents);
  states.start(resources.ledger);
  wholes.start(resources.ledger);
  if (parameter_shards) parameter_shards->start(resources.ledger);
  gradients.start(resources.ledger);
  gradient_shards.start(resources.ledger, allocator::Purpose::kGradient);
  for (UpdateExecutor* const one : {executor.get(), cpu_executor.get()})
    if (one != nullptr) one->start(resources.ledger);
  updates.set_slots(resources.ledger, plan.staging_slots);
  updates.set_cpu_slots(resources.ledger, plan.host_slots);
  if (host_staging) host_staging->start(resources.ledger, plan.staging_slots > 0 ? updates.slot(0) : nullptr);
  pager.on_stall([this] { return queue.finish_some(); });
  if (parameter_shards) pager.meanwhile([this] { queue.advance_while_waiting(); });
}

Core::~Core() {
  if (gpu) gpu->finish();
}

const Resources& Core::checked(const Profile& profile, const Plan& plan, const Resources& resources) {
  if (plan.compute() != allocator::Tier::kDevice) return resources;
  if (resources.device == nullptr)
    fail(ErrorCode::kInvalidArgument, "the plan computes on a GPU, and the engine was given none");
  const std::uint64_t needed =
      plan.device_bytes - plan.bytes[static_cast<std::size_t>(allocator::Tier::kDevice)]
                                    [static_cast<std::size_t>(allocator::Purpose::kBase)];
  if (needed > resources.device->free_memory())
    fail(ErrorCode::kBudget,
         "the plan takes {} of the memory of {}, of which {} are free; end what else uses it, or give less "
         "device memory",
         format_size(needed), resources.device->info().name, format_size(resources.device->free_memory()));
  ensure(resources.device->info().extent_bytes == kHugePage, "{} maps memory in pieces of {}",
         resources.device->info().name, resources.device->info().extent_bytes);
  if (!profile.any_order || resources.communicator != nullptr || plan.reproducible)
    fail(ErrorCode::kInvalidArgument,
         "a GPU is asked for, and it is used by one rank alone, not reproducibly, and by a client that "
         "acquires units in any order; leave out device memory, or the rest");
  for (const UnitSpec& unit : profile.units)
    if (unit.parameters.front().continues())
      fail(ErrorCode::kInvalidArgument,
           "'{}' spans several units, which a GPU does not have yet; make it one unit",
           unit.parameters.front().name);
  return resources;
}

ValueStreams Core::streams(UnitId unit) {
  Ranks* const parts = partitions_state(unit) ? &*ranks : nullptr;
  for (int rank = 0; parts != nullptr && rank < parts->size() &&
                     formats_of_ranks_.size() < static_cast<std::size_t>(parts->size());
       ++rank)
    formats_of_ranks_.emplace_back(layout, optimizer, plan.chunk_elements,
                                   Shards::of(rank, parts->size(), plan.partitions_state()));
  return {
      layout, states, updates, resources, parts, &formats_of_ranks_, host_staging ? &*host_staging : nullptr};
}

void Core::set_schedule(const std::vector<Access>& accesses, const std::vector<std::vector<Access>>& held) {
  const auto append = [this](std::vector<HoldingId>& to, const Access& access) {
    if (access.parameters) to.push_back(parameters[access.unit]);
    for (int use = 0; use < gradients.uses(access.unit); ++use)
      if (use == access.gradient_use || access.final)
        for (const HoldingId holding : gradients.holdings(access.unit, use)) to.push_back(holding);
  };
  std::vector<std::vector<HoldingId>> used(accesses.size()), held_then(held.size());
  for (std::size_t i = 0; i < accesses.size(); ++i) append(used[i], accesses[i]);
  for (std::size_t i = 0; i < held.size(); ++i)
    for (const Access& access : held[i]) append(held_then[i], access);
  pager.set_schedule(std::move(used), std::move(held_then));
}

void Core::require_values(UnitId unit) const {
  if (!has_values[unit])
    refuse(ErrorCode::kState,
           "unit '{}' has no values yet, or was given them by a source that failed; load it first",
           name_of(unit));
}

std::exception_ptr Core::load(UnitId unit, const UnitSource& source) {
  report_work();  // other ranks may load faster
  if (!source.values) require_values(unit);
  settle();
  has_values[unit] = false;
  std::byte* values = pager.acquire(parameters[unit], Pager::Use::kModify);
  std::exception_ptr failed =
      load_values(streams(unit), unit, {values, layout.dtype(unit)}, source, partitions_parameters(unit));
  try {
    if (failed == nullptr) wholes.load(unit, source.whole);
  } catch (...) {
    failed = std::current_exception();
  }
  pager.written(parameters[unit], layout.unit_bytes(unit));
  if (partitions_parameters(unit))
    take_shard(unit, failed == nullptr);
  else
    pager.release(parameters[unit]);
  has_values[unit] = failed == nullptr;
  if (!source.state)  // state of zeros belongs to a parameter that was never updated
    std::fill(applied.begin() + layout.first_parameter(unit), applied.begin() + layout.end_parameter(unit),
              0);
  return failed;
}

// Makes this rank's part of the unit, which is held whole, the shard that all read, once nobody reads the one
// before. Without values everything stays as it was.
void Core::take_shard(UnitId unit, bool loaded) {
  const HoldingId values = parameters[unit];
  const bool was_published = parameter_shards->was_published(unit);
  if (loaded) {
    if (was_published) wait_for_edit(unit);
    parameter_shards->take(unit, pager.data(values));
    parameter_shards->expect(unit);
  }
  pager.release(values);
  if (!loaded && !was_published) return pager.discard(values);
  pager.outdate(values);
  pager.unpark(values);
  if (loaded) parameter_shards->publish(unit);
}

std::exception_ptr Core::save(UnitId unit, const UnitSink& sink) {
  require_values(unit);
  report_work();  // others wait for the rank that writes
  settle();
  if (sink.values && partitions_state(unit)) return save_parameters_alone(unit, sink);
  const bool sends = partitions_state(unit) && ranks->rank() > 0;  // what it has of the state alone
  std::byte* const values = sends ? nullptr : pager.acquire(parameters[unit], Pager::Use::kRead);
  if (!sends && unit + 1 < parameters.size()) pager.prefetch_one(parameters[unit + 1]);
  std::exception_ptr failed = save_values(streams(unit), unit, {values, layout.dtype(unit)}, sink);
  if (failed == nullptr && partitions_state(unit)) gather_wholes(unit);
  try {
    if (failed == nullptr) wholes.save(unit, sink.whole);
  } catch (...) {
    failed = std::current_exception();
  }
  if (!sends) pager.release(parameters[unit]);
  return failed;
}

std::exception_ptr Core::save_own(UnitId unit, const UnitSink& sink, const WantedElements& wanted) {
  require_values(unit);
  report_work();
  settle();
  OwnParameters own;
  std::exception_ptr failed;
  if (partitions_parameters(unit) && parameter_shards->on_disk(unit)) {
    own.read = [&](std::size_t offset, std::span<std::byte> into, Done done) {
      parameter_shards->read(unit, offset, into, std::move(done));
    };
  } else if (partitions_parameters(unit)) {
    own.shard = {parameter_shards->data(unit), layout.dtype(unit)};
  } else if (wanted.parameters({0, layout.unit_elements(unit)})) {
    const std::byte* const values = pager.acquire(parameters[unit], Pager::Use::kRead);
    failed = save_wanted_parameters(streams(unit), unit, {values, layout.dtype(unit)}, sink, wanted);
    pager.release(parameters[unit]);
  }
  if (failed == nullptr) failed = save_own_chunks(streams(unit), unit, own, sink, wanted);
  try {
    if (failed == nullptr) wholes.save(unit, sink.whole);
  } catch (...) {
    failed = std::current_exception();
  }
  return failed;
}

std::exception_ptr Core::save_parameters_alone(UnitId unit, const UnitSink& sink) {
  const std::byte* const values = pager.acquire(parameters[unit], Pager::Use::kRead);
  std::exception_ptr failed = save_parameters(streams(unit), unit, {values, layout.dtype(unit)}, sink);
  pager.release(parameters[unit]);
  return failed;
}

// Brings to rank 0 the arrays of whole parameters from the rank that has the first element: one that is cut
// nowhere is updated there alone.
void Core::gather_wholes(UnitId unit) {
  for (ParameterId p = layout.first_parameter(unit); p < layout.end_parameter(unit); ++p) {
    if (layout.spec(p).continues()) continue;
    const int owner = ranks->owner(unit, layout.location(p).offset);
    const std::span<std::byte> values = std::as_writable_bytes(wholes.values(p));
    if (owner == 0 || values.empty()) continue;
    if (ranks->rank() == owner) ranks->send_whole(p, values);
    if (ranks->rank() == 0) ranks->receive_whole(owner, p, values);
  }
}

// Nobody reads the shards that are about to change, when all have come here.
void Core::wait_for_edit(UnitId unit) {
  waits.during(Waits::For::kRanks, "the edit of " + name_of(unit),
               [&] { ranks->wait_for_edit(unit, [this] { serve_ranks(); }); });
}

void Core::settle() {
  queue.settle();
  pager.wait_all();
}

void Core::begin_step(const StepSettings& given) {
  if (in_step) refuse(ErrorCode::kState, "begin_step() is called twice without step()");
  if (given.clip > 0 && !plan.clip)
    refuse(ErrorCode::kInvalidArgument,
           "clipping by norm {} is asked for, and the plan was made without clipping", given.clip);
  settings = given;
  clip_factor = 1;
  ++steps;
  in_step = true;
}

void Core::check_settings(const StepSettings& given) const {
  // Loops compute with these numbers in f32.
  const auto finite = [](double value) { return std::isfinite(static_cast<float>(value)); };
  const auto usable = [&](double value) { return finite(value) && value >= 0; };
  for (const GroupSettings& group : given.groups) {
    if (!usable(group.learning_rate) || !usable(group.weight_decay))
      refuse(
          ErrorCode::kInvalidArgument,
          "a learning rate of {} and a weight decay of {} are given; both must be 0 or more, and finite in "
          "32 bits",
          group.learning_rate, group.weight_decay);
    if (group.settings != nullptr && group.settings->optimizer() != optimizer.name())
      refuse(ErrorCode::kInvalidArgument, "settings of {} are given, and the optimizer is {}",
             group.settings->optimizer(), optimizer.name());
  }
  const auto is_clip = [&](double value) {
    return usable(value) && (value == 0 || static_cast<float>(value) > 0);
  };
  if (!is_clip(given.clip) || !is_clip(given.clip_value) || !finite(given.gradient_factor))
    refuse(ErrorCode::kInvalidArgument,
           "a clip of {}, a clip by value of {} and a gradient factor of {} are given; all must be finite in "
           "32 bits, and the clips 0, or above 0 in 32 bits",
           given.clip, given.clip_value, given.gradient_factor);
  std::uint32_t needed = 0;
  for (ParameterId p = 0; p < layout.parameters(); ++p) needed = std::max(needed, layout.spec(p).group + 1);
  if (given.groups.size() < needed)
    refuse(ErrorCode::kInvalidArgument, "settings of {} parameter groups are given, and the model has {}",
           given.groups.size(), needed);
}

void Core::wait_for_ranks(const std::string& what, TransferGroup& group) {
  waits.during(Waits::For::kRanks, what, [&] { group.wait([this] { serve_ranks(); }); });
}

void Core::fail_with(const std::string& why) {
  failure = why;
  if (resources.communicator != nullptr) resources.communicator->fail(why);
}

// The others are told of an error before anything waits for them.
void Core::serve_ranks() {
  try {
    queue.serve_ranks();
  } catch (const std::exception& error) {
    if (resources.communicator != nullptr) resources.communicator->fail(error.what());
    throw;
  }
}

void Core::gather_squares(std::span<const ParameterId> of) {
  std::vector<ParameterId> in_parts;
  std::ranges::copy_if(of, std::back_inserter(in_parts),
                       [&](ParameterId p) { return partitions_state(layout.location(p).unit); });
  if (in_parts.empty()) return;
  const std::string name = "the norm of the gradients";
  waits.during(Waits::For::kRanks, name, [&] {
    gradients.take_squares(in_parts,
                           ranks->exchange(name, gradients.squares(in_parts), [this] { serve_ranks(); }));
  });
}

StepResult Core::measure() const { return {gradients.norm() * std::abs(settings.gradient_factor), 1.0}; }

void Core::clip(StepResult& result) {
  // torch.nn.utils.clip_grad_norm_ adds the same 1e-6.
  if (settings.clip > 0) clip_factor = std::min(1.0, settings.clip / (result.gradient_norm + 1e-6));
  result.clip_factor = clip_factor;
}

bool Core::representable(double norm) {
  return norm <= static_cast<double>(std::numeric_limits<float>::max());
}

void Core::refuse_not_finite(std::optional<ParameterId> parameter, double norm) const {
  if (parameter)
    refuse(ErrorCode::kNotFinite, "the gradient of '{}' is not finite; no parameter was changed",
           layout.spec(*parameter).name);
  refuse(ErrorCode::kNotFinite,
         "the norm of the gradients is {} with a gradient factor of {}; no parameter was changed", norm,
         settings.gradient_factor);
}

}  // namespace sluice::engine
