#include "engine/steps/stores.h"

#include <algorithm>
#include <utility>

#include "core/bytes.h"
#include "core/error.h"
#include "engine/updates/device_executor.h"

namespace sluice::engine {

std::vector<allocator::Tier> Stores::state_tiers(const Plan& plan) {
  std::vector<allocator::Tier> tiers;
  for (const UnitPlan& unit : plan.units) tiers.push_back(unit.tier(Part::kState));
  return tiers;
}

Stores::Stores(const Profile& profile, const Plan& the_plan, const optim::Optimizer& the_optimizer,
               const Resources& the_resources)
    : resources(checked(profile, the_plan, the_resources)),
      optimizer(the_optimizer),
      plan(the_plan),
      layout(profile.units),
      ranks(resources.communicator == nullptr
                ? std::nullopt
                : std::optional<Ranks>(std::in_place, *resources.communicator, layout, optimizer,
                                       plan.partitions_state())),
      sections(resources.sections == nullptr ? std::nullopt : std::optional<Sections>(*resources.sections)),
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
      gpu_shards(gpu && parameter_shards ? std::optional<DeviceShards>(std::in_place, *parameter_shards, *gpu)
                                         : std::nullopt),
      backings(make_backings(resources.disk, parameter_shards ? &*parameter_shards : nullptr,
                             host_records ? &*host_records : nullptr, gpu_disk ? &*gpu_disk : nullptr,
                             gpu_shards ? &*gpu_shards : nullptr)),
      pager(resources.ledger, *backings, waits, work()),
      gradients(layout, profile, plan, ranks ? &*ranks : nullptr, pager, work()),
      gradient_parts(layout, plan, ranks ? &*ranks : nullptr, gradients, pager, work()),
      states(layout,
             StateFormat(layout, optimizer, plan.chunk_elements,
                         Shards::of(plan.ranks.rank, plan.ranks.size, plan.partitions_state())),
             state_tiers(plan), *backings, work(), plan.updated_by_cpu()),
      wholes(layout, optimizer),
      sums_of_ranks(ranks && ranks->any_partitioned() ? std::optional<SumsOfRanks>(std::in_place, *ranks)
                                                      : std::nullopt),
      one_thread(1, resources.threads.team()),
      rank_threads(gpu && ranks ? std::optional<Threads>(std::in_place, resources.threads.count())
                                : std::nullopt),
      executor(make_executor()),
      cpu_executor(make_cpu_executor()),
      updates(layout, optimizer, states, executor ? *executor : *cpu_executor,
              plan.serving_pieces > 0 && !gpu, {work(), cpu_executor.get()}),
      host_staging(gpu ? std::optional<HostStaging>(std::in_place, states, *gpu) : std::nullopt),
      nccl_turns(plan.ranks.by_nccl && gathers_on_gpu()
                     ? std::optional<NcclTurns>(std::in_place, *resources.communicator)
                     : std::nullopt),
      device_sums(gpu && ranks
                      ? std::optional<DeviceRanks>(std::in_place, layout, DeviceRanks::Of::kGradients,
                                                   meeting(), *gpu, *rank_threads, by_nccl())
                      : std::nullopt),
      device_gathers(gathers_on_gpu()
                         ? std::optional<DeviceRanks>(std::in_place, layout, DeviceRanks::Of::kParameters,
                                                      meeting(), *gpu, *rank_threads, by_nccl())
                         : std::nullopt),
      queue(layout, optimizer, pager, gradients, updates, waits, parameters,
            {ranks && ranks->any_partitioned() ? &*ranks : nullptr,
             parameter_shards ? &*parameter_shards : nullptr, &gradient_parts,
             profile.any_order && ranks && ranks->any_partitioned(), work(),
             device_gathers ? &*device_gathers : nullptr, rank_threads ? &*rank_threads : nullptr}) {
  // The client may access parameters at any time, unless they are on a GPU.
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
  gradient_parts.define(plan, *backings);
  if (gpu_disk) gpu_disk->set_piece(DeviceDisk::piece_bytes(layout, states.format()));
  if (plan.uses_disk() || gpu) backings->allocate();
  pager.start(plan.extent_bytes, plan.extents);
  states.start(resources.ledger);
  wholes.start(resources.ledger);
  if (parameter_shards) parameter_shards->start(resources.ledger, work());
  if (gpu_shards) gpu_shards->start(resources.ledger);
  gradients.start(resources.ledger);
  gradient_parts.start(resources.ledger);
  for (UpdateExecutor* const one : {executor.get(), cpu_executor.get()})
    if (one != nullptr) one->start(resources.ledger);
  updates.set_slots(resources.ledger, plan.staging_slots);
  updates.set_cpu_slots(resources.ledger, plan.host_slots);
  if (host_staging) host_staging->start(resources.ledger, plan.staging_slots > 0 ? updates.slot(0) : nullptr);
  for (std::optional<DeviceRanks>* const one : {&device_sums, &device_gathers})
    if (*one) (*one)->start(resources.ledger, *ranks);
  if (ranks && ranks->any_partitioned() && !parameter_shards) ranks->serve({});
  pager.on_stall([this] { return queue.finish_some(); });
  if (parameter_shards) pager.meanwhile([this] { queue.advance_while_waiting(); });
}

// Other ranks may wait for updates in progress.
Stores::~Stores() {
  queue.end_what_goes_on_alone();
  if (ranks && ranks->any_partitioned()) {
    if (!parameter_shards) ranks->communicator().serve({});
    ranks->state_reads().end();
  }
  if (gpu) gpu->finish();
}

void Stores::take_shard(UnitId unit) {
  const Array values{pager.data(parameters[unit]), layout.dtype(unit)};
  if (!gpu_shards || parameter_shards->on_gpus())
    return parameter_shards->take(unit, static_cast<const std::byte*>(values.data));
  const Shards& shards = states.format().shards();
  for (std::size_t chunk = 0; chunk < shards.chunks(unit); ++chunk) {
    const ElementRange elements = shards.chunk(unit, chunk);
    const std::size_t size = size_of(values.type);
    const ConstArray here = host_staging->bring_values(values.at(elements.begin), elements.size());
    parameter_shards->take(unit, (elements.begin - own(unit).begin) * size,
                           {static_cast<const std::byte*>(here.data), elements.size() * size});
  }
}

const Resources& Stores::checked(const Profile& profile, const Plan& plan, const Resources& resources) {
  if (plan.compute() != allocator::Tier::kDevice) return resources;
  if (resources.device == nullptr)
    fail(ErrorCode::kInvalidArgument, "the plan computes on a GPU, and the engine was given none");
  ensure(!plan.ranks.by_nccl || resources.nccl != nullptr,
         "the plan's ranks exchange by NCCL, of which none is given");
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
  if (!profile.any_order || plan.reproducible)
    fail(ErrorCode::kInvalidArgument,
         "a GPU is asked for, and it is used by a client that acquires units in any order and asks for no "
         "reproducible sums; leave out device memory, or the rest");
  for (const UnitSpec& unit : profile.units)
    if (unit.parameters.front().continues())
      fail(ErrorCode::kInvalidArgument,
           "'{}' spans several units, which a GPU does not have yet; make it one unit",
           unit.parameters.front().name);
  return resources;
}

ByNccl Stores::by_nccl() {
  if (!plan.ranks.by_nccl) return {};
  return {resources.nccl, nccl_turns ? &*nccl_turns : nullptr};
}

bool Stores::gathers_on_gpu() const {
  for (UnitId unit = 0; gpu && ranks && unit < layout.units().size(); ++unit)
    if (layout.trainable(unit) && partitions_state(unit) && !partitions_parameters(unit)) return true;
  return false;
}

std::unique_ptr<UpdateExecutor> Stores::make_inline(Threads& threads) {
  return make_inline_executor(
      layout, optimizer, states.format(), wholes,
      {threads, resources.products, resources.trace, sums_of_ranks ? &*sums_of_ranks : nullptr});
}

std::unique_ptr<UpdateExecutor> Stores::make_executor() {
  if (!gpu) return make_inline(resources.threads);
  if (std::ranges::all_of(plan.units, &UnitPlan::updated_by_cpu)) return nullptr;
  return make_device_executor(layout, optimizer, states.format(), *gpu, resources.threads);
}

std::unique_ptr<UpdateExecutor> Stores::make_cpu_executor() {
  if (!gpu || std::ranges::none_of(plan.units, &UnitPlan::updated_by_cpu)) return nullptr;
  std::vector<std::unique_ptr<UpdateExecutor>> executors;
  if (optimizer.rounds() > 0) {
    executors.push_back(make_inline(resources.threads));
  } else {
    for (int i = 0; i < chunks_at_a_time(resources.threads.count()); ++i)
      executors.push_back(make_inline(one_thread));
  }
  return make_thread_executor(std::move(executors));
}

void Stores::set_schedule(const std::vector<Access>& accesses, const std::vector<std::vector<Access>>& held) {
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
  pager.set_schedule(std::move(used), held_then);
}

void Stores::share_memory() {
  if (std::exchange(memory_is_shared, true)) return;
  if (gpu_shards) gpu_shards->share();
  std::vector<bool> sums_in_host, gathers_in_host;
  for (UnitId unit = 0; unit < plan.units.size(); ++unit) {
    sums_in_host.push_back(plan.sums_in_host(unit));
    gathers_in_host.push_back(plan.units[unit].gathers_in_host());
  }
  if (device_sums) ranks->set_summed_by_gpus(device_sums->share("what ranks sum of gradients", sums_in_host));
  if (device_gathers) device_gathers->share("what ranks gather of units", gathers_in_host);
}

void Stores::settle() {
  queue.settle();
  pager.wait_all();
  if (ranks) ranks->state_reads().wait_until_sent();
}

}  // namespace sluice::engine
