#include "core/device.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <string_view>

#include "bindings/c/handles.h"
#include "bindings/c/status.h"
#include "core/bytes.h"
#include "core/json.h"
#include "core/log.h"
#include "engine/machine/between_gpus.h"
#include "engine/machine/gpu_rates.h"
#include "engine/machine/machine_rates.h"
#include "engine/planner/planner.h"
#include "engine/ranks/agreement.h"

namespace sluice::c {
namespace {

constexpr std::uint64_t kAssumedContext = 512 * kMiB;  // measured on large GPUs

Json facts_of(const Planned& planned) {
  Json facts = engine::to_json(planned.rates.gpu, planned.rates.memory_bandwidth);
  facts["base"] = planned.context;
  facts["computing"] = planned.request.computing.value_or(0);
  return facts;
}

Json to_json(const Device& device, const Planned& planned) {
  const DeviceInfo& info = device.info();
  return {{"index", info.index},
          {"name", info.name},
          {"pci_address", info.pci_address},
          {"compute_capability", fmt::format("{}.{}", info.major, info.minor)},
          {"driver", fmt::format("{}.{}", info.driver / 1000, info.driver % 1000 / 10)},
          {"memory", info.memory},
          {"free", device.free_memory()},
          {"shared", planned.shares_gpu},
          {"facts", facts_of(planned)}};
}

double checked_seconds(double seconds, const char* what) {
  if (!(seconds >= 0) || !std::isfinite(seconds))
    fail(ErrorCode::kInvalidArgument, "{} is {}; state seconds, as a number that is 0 or more", what,
         seconds);
  return seconds;
}

void take_stated(const sluice_device_facts& facts, Planned& made) {
  const auto checked = [](double rate, const char* name) {
    if (!(rate > 0) || !std::isfinite(rate))
      fail(ErrorCode::kInvalidArgument,
           "options.device_facts.{} is {}; state all of them as numbers above 0, or leave out "
           "options.device_facts, so that they are measured",
           name, rate);
    return rate;
  };
  engine::GpuRates& gpu = made.rates.gpu;
  gpu.source = engine::Source::kStated;
  gpu.in = checked(facts.to_gpu, "to_gpu");
  gpu.out = checked(facts.from_gpu, "from_gpu");
  gpu.both = checked(facts.both_ways, "both_ways");
  gpu.update_seconds = 1 / checked(facts.gpu_updates, "gpu_updates");
  made.rates.memory_bandwidth = checked(facts.cpu_memory, "cpu_memory");
  if (const double computing = checked_seconds(facts.computing, "options.device_facts.computing");
      computing > 0)
    made.request.computing = computing;
  made.context = facts.base;
  if (!(facts.between_gpus >= 0) || !std::isfinite(facts.between_gpus))
    fail(ErrorCode::kInvalidArgument,
         "options.device_facts.between_gpus is {}; state a number of bytes a second, or 0 where it is not "
         "known",
         facts.between_gpus);
  gpu.between = facts.between_gpus;
}

enum class Links : std::uint8_t { kAny, kGpus, kNccl, kHost };

// Returns the links that options.links requests; kAny: the measurement decides.
Links links_of(const sluice_engine_options& options) {
  if (options.links == nullptr) return Links::kAny;
  const std::string_view links = options.links;
  if (links != "gpus" && links != "nccl" && links != "host")
    fail(ErrorCode::kInvalidArgument,
         "options.links is '{}'; it may be 'gpus', 'nccl' or 'host', or NULL, with which it is 'gpus' where "
         "these read each other's memory, or else 'nccl' where that is faster than what joins hosts, if a "
         "step becomes shorter so",
         links);
  if (options.device_memory == 0)
    fail(ErrorCode::kInvalidArgument,
         "options.links is '{}', and options.device_memory is 0, with which the CPU computes; state how much "
         "of the GPU's memory may be taken, or leave options.links out",
         links);
  return links == "gpus" ? Links::kGpus : links == "nccl" ? Links::kNccl : Links::kHost;
}

// Sets how and how fast all ranks' GPUs exchange data: as the ranks have measured, or for a plan alone as
// stated.
void join_gpus(const sluice_engine_options& options, For purpose, engine::BetweenGpus found, Planned& made) {
  double& between = made.rates.gpu.between;  // the stated value
  engine::RankOf& ranks = made.request.ranks;
  const Links asked = links_of(options);
  ranks.by_nccl = purpose == For::kEngine ? found.nccl != nullptr : asked == Links::kNccl;
  const bool may_meet = ranks.size > 1 && ranks.size <= engine::kMostBetweenGpus &&
                        (ranks.by_nccl || ranks.on_hosts().all_on_one());
  if (purpose == For::kPlan && (asked == Links::kGpus || asked == Links::kNccl) && !(may_meet && between > 0))
    fail(ErrorCode::kInvalidArgument,
         "a plan is asked for with options.links '{}', which is for 2 to {} ranks on one host, with "
         "options.device_facts.between_gpus",
         options.links, engine::kMostBetweenGpus);
  ranks.gpus_meet =
      may_meet && (purpose == For::kEngine ? found.bytes_a_second > 0 : between > 0 && asked != Links::kHost);
  between = !ranks.gpus_meet ? 0 : between > 0 ? between : found.bytes_a_second;
  made.request.chooses_links = asked == Links::kAny;
  made.nccl = std::move(found.nccl);
  made.context += found.nccl_bytes;
}

Dtype type_of_trained(const std::vector<engine::UnitSpec>& units) {
  const auto trained = std::ranges::find_if(units, &engine::UnitSpec::trainable);
  return trained == units.end() ? Dtype::kF32 : trained->dtype;
}

std::uint64_t left(std::uint64_t budget, std::uint64_t taken) { return budget - std::min(budget, taken); }

// Returns the bytes that a context takes, or an assumed value where the GPU allows no second one.
std::uint64_t context_of(Device& gpu) {
  try {
    return gpu.measure_context();
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kBudget) throw;
    log().warn("{} is assumed for what CUDA's context takes, which cannot be measured: {}",
               format_size(kAssumedContext), error.what());
    return kAssumedContext;
  }
}

void measure(const sluice_engine_options& options, const std::function<void()>& begin_phase, Planned& made) {
  made.context = context_of(*made.gpu);
  Threads threads(made.threads, made.team);
  engine::GpuWork work{*made.gpu, threads, *made.optimizer, type_of_trained(made.profile.units),
                       made.products.get()};
  // The free memory may be fragmented.
  work.device_bytes = std::min<std::uint64_t>(
      left(options.device_memory, options.device_reserved + made.context), made.gpu->free_memory() / 2);
  work.host_bytes = left(options.memory, allocator::resident_bytes() + options.reserved);
  work.begin_phase = begin_phase;
  engine::measure_gpu(work, made.rates);
}

// Returns the index that is named, or else, of one of several ranks, that of LOCAL_RANK.
int index_of_gpu(const sluice_engine_options& options) {
  if (options.device == SLUICE_FIRST_DEVICE) return 0;
  const char* const local_rank = ranks_of(options) == nullptr ? nullptr : std::getenv("LOCAL_RANK");
  if (options.device != 0 || local_rank == nullptr) return static_cast<int>(options.device);
  const std::string_view text = local_rank;
  unsigned index = 0;
  if (std::from_chars(text.data(), text.data() + text.size(), index).ec != std::errc()) return 0;
  const auto count = static_cast<unsigned>(device_count());
  if (count == 1) return 0;  // other ranks see others
  if (index >= count)
    fail(ErrorCode::kInvalidArgument,
         "options.device names no GPU, so that it is GPU {} on the rank with LOCAL_RANK={}, and this process "
         "sees {} GPUs; start as many ranks on a machine as it has GPUs, look at CUDA_VISIBLE_DEVICES, or "
         "name the GPU of each rank",
         index, text, count);
  return static_cast<int>(index);
}

}  // namespace

std::unique_ptr<Device> open_fitting(const sluice_engine_options& options) {
  std::unique_ptr<Device> device = open_device(index_of_gpu(options));
  if (options.device_memory > device->info().memory)
    fail(ErrorCode::kBudget,
         "options.device_memory is {}, and GPU {} ({}) has {}; state less, with room for CUDA itself",
         format_size(options.device_memory), device->info().index, device->info().name,
         format_size(device->info().memory));
  return device;
}

engine::BetweenGpus know_links(const sluice_engine_options& options, comm::Communicator& communicator,
                               Device& gpu, const std::optional<engine::Link>& link) {
  const std::uint64_t room = std::min<std::uint64_t>(
      left(options.device_memory, options.device_reserved + kAssumedContext), gpu.free_memory() / 2);
  const Links asked = links_of(options);
  const auto refused = [&](Links way) {
    return asked == Links::kAny || asked == way ? "" : fmt::format("options.links is '{}'", options.links);
  };
  engine::BetweenGpus reads =
      engine::measure_reads_between_gpus(communicator, gpu, room, refused(Links::kGpus));
  if (reads.bytes_a_second > 0) return reads;
  engine::BetweenGpus nccl = engine::measure_nccl(communicator, gpu, room, refused(Links::kNccl));
  if (nccl.bytes_a_second == 0) return asked == Links::kNccl ? std::move(nccl) : std::move(reads);
  const std::vector<std::string> all =
      engine::exchange(communicator, "what joins GPUs", asked == Links::kNccl ? "asks" : "");
  const bool is_used = std::ranges::count(all, "asks") > 0 || !link || nccl.bytes_a_second > link->bandwidth;
  if (communicator.rank() == 0)
    log().info("NCCL carries {:.3g} GB/s to each GPU{}, so GPUs exchange {}", nccl.bytes_a_second / 1e9,
               link ? fmt::format(", and what else joins ranks {:.3g} GB/s", link->bandwidth / 1e9) : "",
               is_used ? "by it" : "through host memory");
  return is_used ? std::move(nccl) : std::move(reads);
}

void check_links(const sluice_engine_options& options, const engine::BetweenGpus& found) {
  if (found.bytes_a_second > 0) return;
  if (links_of(options) == Links::kGpus)
    fail(ErrorCode::kIo,
         "options.links is 'gpus', and GPUs do not read each other's memory: {}; leave it out, so that ranks "
         "use NCCL or the host's memory",
         found.problem);
  if (links_of(options) == Links::kNccl)
    fail(
        ErrorCode::kIo,
        "options.links is 'nccl', and GPUs do not exchange by NCCL: {}; leave it out, so that ranks use what "
        "there is",
        found.problem);
}

void check_device(const sluice_engine_options& options) {
  (void)links_of(options);
  if (options.device_memory == 0) {
    const bool is_named = options.device != 0 && options.device != SLUICE_FIRST_DEVICE;
    if (is_named || options.device_reserved != 0)
      fail(
          ErrorCode::kInvalidArgument,
          "options.device is {}, options.device_reserved {}, and options.device_memory 0, with which the CPU "
          "computes; state how much of the GPU's memory may be taken, or leave them out",
          options.device, options.device_reserved);
    return;
  }
  if (options.device_reserved >= options.device_memory)
    fail(ErrorCode::kBudget,
         "{} are reserved of the GPU's memory, and options.device_memory is {}; state more of it, or reserve "
         "less",
         format_size(options.device_reserved), format_size(options.device_memory));
  if (options.serve_touches != 0)
    fail(ErrorCode::kInvalidArgument,
         "options.serve_touches is given with options.device_memory, and touches of a GPU's memory cannot be "
         "served; leave one out, and acquire units before they are used");
}

std::optional<allocator::Tier> updates_of(const sluice_engine_options& options) {
  if (options.updates == nullptr) return std::nullopt;
  const std::string_view by = options.updates;
  if (by != "gpu" && by != "cpu")
    fail(ErrorCode::kInvalidArgument,
         "options.updates is '{}'; it may be 'gpu' or 'cpu', or NULL, with which the plan chooses", by);
  if (options.device_memory == 0)
    fail(ErrorCode::kInvalidArgument,
         "options.updates is '{}', and options.device_memory is 0, with which the CPU computes and updates; "
         "state how much of the GPU's memory may be taken, or leave options.updates out",
         by);
  return by == "cpu" ? allocator::Tier::kHost : allocator::Tier::kDevice;
}

void know_device(const sluice_engine_options& options, For purpose, KnownByRanks known, Planned& made) {
  if (options.device_memory == 0) {
    if (options.device_facts != nullptr)
      fail(ErrorCode::kInvalidArgument,
           "options.device_facts are given, and options.device_memory is 0, with which the CPU computes; "
           "state how much of the GPU's memory may be taken, or leave them out");
    return;
  }
  made.budget.device = options.device_memory;
  made.gpu = std::move(known.gpu);
  made.shares_gpu = known.shares_gpu;
  if (purpose == For::kEngine && made.gpu == nullptr) made.gpu = open_fitting(options);
  made.context = kAssumedContext;
  made.rates.cores = made.threads;
  if (options.device_facts != nullptr)
    take_stated(known_part(options.device_facts, "options.device_facts"), made);
  else if (made.gpu)
    measure(options, known.begin_phase, made);
  join_gpus(options, purpose, std::move(known.between_gpus), made);
  if (made.request.ranks.size > 1)
    made.rates.rank_processor_seconds =
        engine::seconds_of_received_byte(made.request.ranks.on_hosts().all_on_one(), made.rates);
  made.budget.device_base = options.device_reserved + made.context;
}

}  // namespace sluice::c

using namespace sluice::c;  // NOLINT: what follows is of this room

sluice_status sluice_engine_use_stream(sluice_engine* engine, void* stream) {
  return with_engine(engine, [&](sluice_engine& e) {
    e.engine->use_stream(stream == nullptr ? sluice::default_stream() : static_cast<CUstream_st*>(stream));
  });
}

sluice_status sluice_engine_predict(const sluice_engine* engine, double computing, char** json) {
  return guarded([&] {
    const Planned& planned = required(engine, "engine").planned;
    char*& out = required(json, "json");
    if (engine->device == nullptr)
      sluice::fail(sluice::ErrorCode::kState,
                   "the CPU computes, whose plan knows what that takes; ask sluice_engine_plan()");
    sluice::engine::Plan plan = planned.plan;
    sluice::engine::state_computing(planned.profile, *planned.optimizer, planned.rates,
                                    checked_seconds(computing, "computing"), plan);
    out = new_text(sluice::engine::to_json(plan, planned.profile, planned.budget).dump(2));
  });
}

sluice_status sluice_engine_device(const sluice_engine* engine, char** json) {
  return ask(engine, [&](const sluice_engine& e) {
    char*& out = required(json, "json");
    out = e.device == nullptr ? nullptr : new_text(to_json(*e.device, e.planned).dump());
  });
}
