#include "engine/planner/placement.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "core/bytes.h"
#include "core/error.h"
#include "engine/layout/kind.h"
#include "engine/memory/pager.h"
#include "engine/memory/shard_memory.h"
#include "engine/memory/stored_shards.h"
#include "engine/memory/whole_store.h"
#include "engine/updates/update_pipeline.h"
#include "optim/elementwise.h"

namespace sluice::engine {
namespace {

std::size_t choose_chunk(const Layout& layout, const PlanRequest& request) {
  if (request.chunk_elements && (*request.chunk_elements == 0 || *request.chunk_elements % kChunkGrain != 0))
    fail(ErrorCode::kInvalidArgument, "a chunk of {} elements is asked for; it must be a multiple of {}",
         *request.chunk_elements, kChunkGrain);
  std::size_t largest = 0;
  for (UnitId unit = 0; unit < layout.units().size(); ++unit)
    largest = std::max(largest, layout.unit_elements(unit));
  return std::min(request.chunk_elements.value_or(kChunkGrain), largest);
}

// Whether each rank has a shard of what is updated of a unit, by unit.
std::vector<bool> are_cut(const std::vector<std::size_t>& stages) {
  std::vector<bool> cut;
  for (const std::size_t stage : stages) cut.push_back(stage > 0);
  return cut;
}

// The first place that can be, or a later one that is asked for. Only shards in the last one may be on disk.
ShardPlace choose_shards(const PlanRequest& request, bool updates_by_gpu) {
  if (request.place(Part::kParameters) == allocator::Tier::kDisk) return ShardPlace::kHost;
  const bool meet = request.compute == allocator::Tier::kDevice && request.ranks.gpus_read();
  const ShardPlace first = !meet            ? ShardPlace::kHost
                           : updates_by_gpu ? ShardPlace::kGpu
                                            : ShardPlace::kPassed;
  return std::max(first, request.shards.value_or(first));
}

}  // namespace

Placement::Placement(const Profile& profile, const optim::Optimizer& optimizer, const PlanRequest& request)
    : profile_(profile),
      clip_(request.clip),
      compute_(request.compute),
      updates_by_gpu_(compute_ == allocator::Tier::kDevice && optimizer.elementwise({}).has_value() &&
                      request.updates != allocator::Tier::kHost),
      shards_(choose_shards(request, updates_by_gpu_)),
      ranks_(request.ranks),
      stages_(request.stages.empty() ? std::vector(profile.units.size(), request.stage.value_or(0))
                                     : request.stages),
      asks_for_parts_(!request.whole_gradients &&
                      (std::ranges::count(stages_, std::size_t{2}) > 0 || request.stage == kMostStage)),
      sums_each_backward_(request.sums_each_backward),
      layout_(profile.units),
      uses_(gradient_uses(profile)),
      sums_(request.reproducible, request.ranks, profile.micro_batches, profile.pieces),
      hosts_(request.ranks.on_hosts()),
      format_(layout_, optimizer, choose_chunk(layout_, request),
              Shards::of(request.ranks.rank, request.ranks.size, are_cut(stages_))),
      whole_bytes_(WholeStore(layout_, optimizer).bytes()),
      rounds_(rounds_need(layout_, optimizer)),
      product_flops_(profile.units.size()),
      units_(profile.units.size()) {
  for (int round = 0; round < optimizer.rounds(); ++round)
    round_reads_values_.push_back(optimizer.reads_values(round));
  find_positions();
  buffers_ = gradient_buffers(
      profile, sums_,
      profile.whole_step ? profile.whole_step->group : request.group.value_or(profile.micro_batches));
  check_masters(profile.units, optimizer);
  for (ParameterId p = 0; p < layout_.parameters(); ++p) {
    const ParameterSpec& spec = layout_.spec(p);
    const bool counts = layout_.trainable(layout_.location(p).unit) && !spec.continues();
    if (counts) product_flops_[layout_.location(p).unit] += optimizer.product_flops(kind_of(spec));
  }
  for (UnitId unit = 0; unit < layout_.units().size(); ++unit) {
    buckets_.push_back(buckets_of(layout_, optimizer, format_.shards(), unit));
    const UnitRange together = updated_together(layout_, optimizer, unit);
    together_.push_back(together.size() > 1);
    if ((stages_[unit] > 0) != (stages_[together.first] > 0))
      fail(ErrorCode::kInvalidArgument,
           "the state of some units with a part of '{}' is asked to be partitioned, and that of '{}' not; {} "
           "updates it as a whole",
           layout_.units()[unit].parameters.front().name, layout_.units()[unit].name, optimizer.name());
    if (uses_[unit] != uses_[together.first])
      fail(ErrorCode::kInvalidArgument,
           "the schedule asks for the gradient of some units with a part of '{}' and not of '{}'; "
           "{} updates it as a whole",
           layout_.units()[unit].parameters.front().name, layout_.units()[unit].name, optimizer.name());
    for (int round = 0; together_[unit] && round < optimizer.rounds(); ++round)
      rounds_read_values_ |= optimizer.reads_values(round);
    measure(unit);
  }
  find_routes(optimizer);
  find_relayed();
  find_passed();
}

void Placement::find_relayed() {
  if (!partitions_any_parameters() || hosts_.all_on_one()) return;
  for (UnitId unit = 0; unit < layout_.units().size(); ++unit) {
    if (!partitions_parameters(unit)) continue;
    const auto need = RelayedShards::need_of(layout_, *all_shards_, unit, hosts_, ranks_.rank);
    relayed_ = {std::max(relayed_.pieces, need.pieces), std::max(relayed_.bytes, need.bytes)};
  }
}

void Placement::find_passed() {
  if (!passes_shards()) return;
  for (UnitId unit = 0; unit < layout_.units().size(); ++unit) {
    if (!partitions_parameters(unit)) continue;
    const auto need = PassedShards::need_of(layout_, *all_shards_, unit, ranks_.rank, ranks_.size);
    passed_ = {std::max(passed_.places, need.places), std::max(passed_.bytes, need.bytes)};
  }
}

void Placement::find_positions() {
  for (std::size_t i = profile_.schedule.size(); i-- > 0;) units_[profile_.schedule[i].unit].at.first = i;
  for (std::size_t i = 0; i < profile_.schedule.size(); ++i) {
    const Access& access = profile_.schedule[i];
    Positions& at = units_[access.unit].at;
    at.last = i;
    at.last_writes.resize(std::max(at.last_writes.size(), static_cast<std::size_t>(access.gradient_use + 1)));
    if (access.gradient_use >= 0) at.last_writes[static_cast<std::size_t>(access.gradient_use)] = i;
    at.writes.resize(static_cast<std::size_t>(uses_[access.unit]));
    at.additions.resize(at.writes.size());
    for (std::size_t use = 0; use < at.writes.size(); ++use) {
      const bool writes = static_cast<int>(use) == access.gradient_use;
      at.writes[use] += writes ? 1 : 0;
      at.additions[use] += access.final && !writes ? 1 : 0;
    }
    if (access.parameters) at.parameters.push_back(i);
    if (access.gradient_use >= 0 || access.final) at.gradient.push_back(i);
  }
}

std::string Placement::largest_of_rounds() const {
  const ParameterSpec& spec = layout_.spec(rounds_.largest);
  return fmt::format("'{}' ({})", spec.name, fmt::join(spec.shape, " x "));
}

std::size_t Placement::parameter_bytes(UnitId unit) const { return layout_.unit_bytes(unit); }

std::size_t Placement::gradient_bytes(UnitId unit) const {
  const Sizes& sizes = units_[unit].sizes[index(Part::kGradient)];
  return sizes.own + sizes.shared;
}

bool Placement::stores_gradient(UnitId unit, std::size_t groups) const {
  if (!updated(unit) || (waits(unit) && !partitions_gradient(unit, groups))) return updated(unit);
  return groups > 1 || units_[unit].at.gradient.size() > 1;
}

bool Placement::partitions_parameters(UnitId unit) const {
  return stages_[unit] >= 3 && !is_packed(parameter_bytes(unit));
}

bool Placement::gathers_any() const {
  for (UnitId unit = 0; unit < stages_.size(); ++unit)
    if (updated(unit) && stages_[unit] > 0 && !partitions_parameters(unit)) return true;
  return false;
}

// A gradient that others are added to is kept whole, where it is, until its update; in any order each may be.
bool Placement::partitions_gradient(UnitId unit, std::size_t groups) const {
  return stages_[unit] >= 2 && !profile_.any_order && updated(unit) && waits(unit) &&
         !is_packed(parameter_bytes(unit)) && groups == 1 && units_[unit].at.gradient.size() <= 1;
}

bool Placement::keeps_gradient_shard(UnitId unit) const {
  return sums_in_backward() && stages_[unit] > 0 && updated(unit) &&
         (sums_each_backward_ || !is_packed(parameter_bytes(unit)));
}

std::size_t Placement::state_bytes(UnitId unit) const { return format_.bytes(unit); }

// Parameters are read at each access, unless the unit is still there from one of the two accesses before, and
// written once, after the update. A narrow copy that a waiting update will overwrite is not read.
Placement::Traffic Placement::parameter_traffic(UnitId unit, std::size_t groups) const {
  std::size_t reads = units_[unit].at.fetches * groups;
  if (!updated(unit)) return {reads * parameter_bytes(unit), 0};
  if (together_[unit] && rounds_read_values_ && !format_.has_master(unit)) ++reads;
  if (format_.has_master(unit) && clip_ && reads > 0) --reads;
  return {reads * parameter_bytes(unit), parameter_bytes(unit)};
}

// Where the CPU has changed parameters elsewhere, all fetches bring them. Where an update in frames is
// gathered before step() returns, others have those frames before the unit is used again.
Placement::Traffic Placement::parameter_traffic_of_gpu(UnitId unit, const UnitPlan& plan) const {
  Traffic traffic = parameter_traffic(unit, micro_batches());
  if (!updated(unit)) return traffic;
  const bool changes = changes_on_gpu(unit, plan);
  if (clip_ && (changes ? gathers(unit, plan) : format_.has_master(unit)))
    traffic.read += parameter_bytes(unit);
  if (!changes) traffic.written = 0;
  return traffic;
}

Placement::Traffic Placement::summed_gradient_traffic(UnitId unit, const UnitPlan& plan) const {
  if (ranks_.size == 1 || !updated(unit) || !clip_ || !plan.gradient_stored || sums_in_backward() ||
      compute_ == kCpuTier || plan.tier(Part::kGradient) != allocator::Tier::kDisk)
    return {};
  const std::size_t elements = layout_.unit_elements(unit);
  return {elements * size_of(moved_gradient_type(unit)), elements * sizeof(float)};
}

// A use of a gradient is kept from one access that writes it to the next, and to the one that adds all uses.
Placement::Traffic Placement::kept_gradient_traffic(UnitId unit, std::size_t groups) const {
  if (!updated(unit)) return {};
  const UnitCosts& own = units_[unit];
  std::uint64_t kept = 0;
  for (std::size_t use = 0; use < own.use_bytes.size(); ++use) {
    const std::size_t accesses = groups * own.at.writes[use] + own.at.additions[use];
    kept += (std::max<std::size_t>(accesses, 1) - 1) * own.use_bytes[use] * buffers_[unit];
  }
  return {kept, kept};
}

Placement::Traffic Placement::gradient_traffic(UnitId unit, std::size_t groups, bool whole) const {
  Traffic traffic = kept_gradient_traffic(unit, groups);
  if (waits(unit) && updated(unit)) {
    traffic.read +=
        (whole ? final_elements(unit) : units_[unit].elements_read) * size_of(updated_gradient_type(unit));
    traffic.written += moved_gradient_bytes(unit);
  }
  return traffic;
}

Placement::Traffic Placement::traffic(UnitId unit, Part part, const UnitPlan& plan, std::size_t groups,
                                      bool whole) const {
  if (part == Part::kState) return state_traffic(unit);
  if (part == Part::kGradient && keeps_gradient_shard(unit)) {
    const std::uint64_t bytes = sums_in_step() * gradient_record_bytes(unit);
    return {bytes, bytes};
  }
  if (part == Part::kGradient) return gradient_traffic(unit, groups, whole);
  if (!plan.shard_on_disk) return parameter_traffic(unit, groups);
  return {fetched_of_shard(unit, groups) + shard_traffic(unit).read, shard_traffic(unit).written};
}

Placement::Traffic Placement::disk_traffic_of_gpu(UnitId unit, Part part, const UnitPlan& plan) const {
  Traffic moved = traffic(unit, part, plan, micro_batches(), brings_whole_gradient(unit, plan));
  if (part == Part::kGradient) {
    const Traffic summed = summed_gradient_traffic(unit, plan);
    return {moved.read + summed.read, moved.written + summed.written};
  }
  if (part == Part::kState || plan.shard_on_disk) return moved;
  moved.read = parameter_traffic_of_gpu(unit, plan).read;
  if (crosses(unit, plan) && !changes_on_gpu(unit, plan))
    moved.read += value_reads(unit, buckets_[unit].front()) * parameter_bytes(unit);
  return moved;
}

std::size_t Placement::part_bytes(UnitId unit, Part part, const UnitPlan& plan) const {
  if (part == Part::kState) return state_bytes(unit);
  if (part == Part::kGradient)
    return plan.gradient_in_shards ? gradient_record_bytes(unit) : gradient_bytes(unit);
  return plan.shard_on_disk ? shard_bytes(unit) : parameter_bytes(unit);
}

std::size_t Placement::chunks_of_typical_unit() const {
  std::vector<std::size_t> chunks;
  for (UnitId unit = 0; unit < layout_.units().size(); ++unit)
    if (state_bytes(unit) > 0) chunks.push_back(format_.shards().chunks(unit));
  if (chunks.empty()) return 0;
  const auto median = chunks.begin() + static_cast<std::ptrdiff_t>(chunks.size() / 2);
  std::nth_element(chunks.begin(), median, chunks.end());
  return *median;
}

FrameNeeds Placement::frame_needs(const Lookahead& lookahead, std::size_t extent_bytes) const {
  return {profile_, layout_, uses_, buffers_, together_, lookahead, extent_bytes};
}

void Placement::measure(UnitId unit) {
  UnitCosts& own = units_[unit];
  for (const Bucket& bucket : buckets_[unit]) {
    if (bucket.first_chunk == bucket.end_chunk) continue;
    const auto times = static_cast<std::size_t>(bucket.rounds + 1);
    const Shards& shards = format_.shards();
    own.elements_read +=
        times * (shards.chunk(unit, bucket.end_chunk - 1).end - shards.chunk(unit, bucket.first_chunk).begin);
    const std::size_t bytes = format_.chunk_bytes(unit, bucket.first_chunk, bucket.end_chunk);
    own.state_traffic.read += times * bytes;
    own.state_traffic.written += bytes;
  }
  using offload::RecordStore;
  auto& [parameters, gradient, state] = own.sizes;
  const bool packed = is_packed(parameter_bytes(unit));
  const auto take = [&](Sizes& sizes, std::size_t bytes) {
    (packed ? sizes.shared : sizes.own) += packed ? packed_bytes(bytes) : round_up(bytes, kHugePage);
    sizes.disk += bytes;
    sizes.metadata += RecordStore::metadata_bytes(bytes, RecordStore::kBlock);
  };
  take(parameters, parameter_bytes(unit));
  if (packed && profile_.any_order && compute_ == kCpuTier)
    parameters.own = packed_exposed_bytes(std::exchange(parameters.shared, 0));
  for (int use = 0; use < uses_[unit]; ++use) {
    const std::size_t bytes = use_elements(layout_, unit, use) * sizeof(float);
    own.use_bytes.push_back(bytes);
    for (std::size_t buffer = 0; buffer < buffers_[unit]; ++buffer) take(gradient, bytes);
  }
  own.gradient_shard.disk =
      final_gradient_bytes(format_.shards().here(unit).size(), final_gradient_type(profile_, unit));
  own.gradient_shard.metadata = RecordStore::metadata_bytes(own.gradient_shard.disk, RecordStore::kBlock);
  own.parameter_shard.disk =
      StoredShards::backing_bytes(format_.shards().here(unit).size() * size_of(layout_.dtype(unit)));
  own.parameter_shard.metadata = RecordStore::metadata_bytes(own.parameter_shard.disk, RecordStore::kBlock);
  own.shard_traffic = measured_shard_traffic(unit);
  if (const std::size_t bytes = state_bytes(unit); bytes > 0)
    state = {0, bytes, bytes, RecordStore::metadata_bytes(bytes, format_.block_bytes(unit))};
  const std::vector<std::size_t>& read_at = own.at.parameters;
  for (std::size_t i = 0; i < read_at.size(); ++i)
    own.at.fetches += i == 0 || read_at[i] - read_at[i - 1] > 2 ? 1 : 0;
}

// With masters an update only writes values, unless a chunk also has parameters of other buckets. Without
// them its application reads them, and so do some rounds.
std::uint64_t Placement::value_reads(UnitId unit, const Bucket& bucket) const {
  if (format_.has_master(unit)) return buckets_[unit].size() == 1 ? 0 : 1;
  return 1 + static_cast<std::uint64_t>(
                 std::count(round_reads_values_.begin(), round_reads_values_.begin() + bucket.rounds, true));
}

Placement::Traffic Placement::measured_shard_traffic(UnitId unit) const {
  Traffic traffic;
  if (!updated(unit)) return traffic;
  for (const Bucket& bucket : buckets_[unit]) {
    std::uint64_t bytes = 0;
    for (std::size_t chunk = bucket.first_chunk; chunk < bucket.end_chunk; ++chunk)
      bytes +=
          round_up(format_.shards().chunk(unit, chunk).size() * size_of(layout_.dtype(unit)), kDiskBlock);
    traffic.read += value_reads(unit, bucket) * bytes;
    traffic.written += bytes;
  }
  return traffic;
}

std::uint64_t Placement::read_apart(const std::vector<UnitPlan>& units, std::size_t group) const {
  std::uint64_t bytes = 0;
  for (UnitId unit = 0; unit < units.size(); ++unit)
    if (units[unit].shard_on_disk)
      bytes += static_cast<std::uint64_t>(ranks_.size - 1) * fetched_of_shard(unit, profile_.repeats(group));
  return bytes;
}

void Placement::count(UnitId unit, Part part, const UnitPlan& plan, std::uint64_t times,
                      Footprint& footprint) const {
  const bool gradient = part == Part::kGradient;
  const bool stored_shard =
      part == Part::kParameters && plan.tier(part) == allocator::Tier::kRanks && plan.shard_on_disk;
  const Sizes& sizes = stored_shard                          ? units_[unit].parameter_shard
                       : gradient && plan.gradient_in_shards ? units_[unit].gradient_shard
                                                             : units_[unit].sizes[index(part)];
  if (stored_shard) footprint.shards_on_disk += times;
  if (plan.resident(part) && part == Part::kState && plan.updated_on != plan.compute) {
    footprint.cpu_state += times * sizes.disk;
  } else if (plan.resident(part)) {
    footprint.own[index(part)] += times * sizes.own;
    footprint.shared[index(part)] += times * sizes.shared;
  } else if (plan.tier(part) == allocator::Tier::kRanks && !stored_shard) {
    const Dtype type = gradient ? final_gradient_type(profile_, unit) : layout_.dtype(unit);
    footprint.shards[index(part)] +=
        times * ShardMemory::room(format_.shards().here(unit).size() * size_of(type));
  } else if (!gradient || plan.gradient_stored || plan.gradient_shard_in_record()) {
    if (plan.tier(part) == allocator::Tier::kHost) {
      footprint.host[index(part)] += times * sizes.disk;
      return;
    }
    footprint.disk[index(part)] += times * sizes.disk;
    if (part == Part::kState && plan.updated_on != plan.compute) footprint.cpu_disk += times * sizes.disk;
    footprint.metadata += times * sizes.metadata;
  }
}

void Placement::count(UnitId unit, const UnitPlan& plan, std::uint64_t times, Footprint& footprint) const {
  footprint.streamed += streams(unit, plan) ? times : 0;
  footprint.cpu_streamed += streams_through_cpu(unit, plan) ? times : 0;
  for (std::size_t part = 0; part < kParts; ++part)
    count(unit, static_cast<Part>(part), plan, times, footprint);
}

Footprint Placement::footprint(const std::vector<UnitPlan>& units) const {
  Footprint footprint;
  for (UnitId unit = 0; unit < units.size(); ++unit) count(unit, units[unit], 1, footprint);
  return footprint;
}

void Placement::to_memory(UnitId unit, Part part, allocator::Tier tier, UnitPlan& plan,
                          Footprint& footprint) const {
  footprint.streamed -= streams(unit, plan) ? 1 : 0;
  footprint.cpu_streamed -= streams_through_cpu(unit, plan) ? 1 : 0;
  count(unit, part, plan, -std::uint64_t{1}, footprint);
  const bool shard = part == Part::kGradient && plan.gradient_in_shards;
  if (part == Part::kParameters && plan.shard_on_disk)
    plan.shard_on_disk = false;
  else
    plan.place(part, shard ? allocator::Tier::kRanks : tier);
  if (shard) plan.gradient_stored = false;
  count(unit, part, plan, 1, footprint);
  footprint.streamed += streams(unit, plan) ? 1 : 0;
  footprint.cpu_streamed += streams_through_cpu(unit, plan) ? 1 : 0;
}

bool Placement::needs_scratch() const {
  // Rank 0 saves what the others have.
  if (std::ranges::any_of(stages_, [](std::size_t stage) { return stage > 0; })) return true;
  for (UnitId unit = 0; unit < layout_.units().size(); ++unit) {
    const std::size_t arrays = layout_.trainable(unit) ? format_.arrays() : 0;
    for (std::size_t array = format_.masters(); array < arrays; ++array)
      if (format_.array(array).type != Dtype::kF32) return true;
    if (layout_.dtype(unit) != Dtype::kF32 && !format_.has_master(unit)) return true;
  }
  return false;
}

std::size_t Placement::activation_bytes(const std::vector<UnitPlan>& units, std::size_t group) const {
  std::vector<std::size_t> choices;
  for (const UnitPlan& unit : units) choices.push_back(unit.choice);
  return engine::activation_bytes(profile_, choices, group);
}

std::size_t Placement::workspace_bytes(const std::vector<UnitPlan>& units) const {
  std::size_t most = 0;
  for (UnitId unit = 0; unit < units.size(); ++unit)
    most = std::max(most, profile_.unit_profiles[unit].choices[units[unit].choice].workspace_bytes);
  return profile_.workspace_bytes + most;
}

std::size_t Placement::sums_bytes() const { return engine::sums_bytes(profile_, layout_, sums_); }

double Placement::element_bytes() const {
  double elements = 0, bytes = static_cast<double>(whole_bytes_);
  for (ParameterId p = 0; p < layout_.parameters(); ++p) {
    const Layout::Location& location = layout_.location(p);
    if (!layout_.trainable(location.unit)) continue;
    elements += static_cast<double>(location.elements);
    bytes += static_cast<double>(location.elements) * format_.element_bytes(p);
  }
  return elements == 0 ? 0 : bytes / elements;
}

template <class Body>
void Placement::for_each_updated(UnitId unit, const Body& body) const {
  for (const Bucket& bucket : buckets_[unit])
    for (ParameterId p = bucket.first; p < bucket.end && updated(unit); ++p)
      body(p, format_.update_bytes(p, bucket.rounds));
}

// Of one sum and one gather. Messages of ranks pass through host memory: gradients leave, and means return,
// unless the gradient waits there for its update in any case; and where the CPU has not updated them there,
// this rank's parameters leave, and the others' come. Reads between GPUs do not pass through it.
Placement::OfRanks Placement::link_traffic_of_ranks(UnitId unit, const UnitPlan& plan) const {
  if (ranks_.size == 1 || !updated(unit)) return {};
  const std::size_t all = layout_.unit_elements(unit), own = format_.shards().here(unit).size();
  OfRanks traffic;
  if (plan.gradient_shard_in_record())
    traffic.kept = elements_of_parameters(unit, format_.shards().here(unit)) * sizeof(float);
  if (!sums_in_host(plan) && !sums_on_gpus(plan))
    traffic.sum = {own * sizeof(float), all * size_of(moved_gradient_type(unit))};
  if (!gathers(unit, plan) || plan.gathers_in_host() || gathers_on_gpus(plan)) return traffic;
  const std::size_t size = size_of(layout_.dtype(unit));
  traffic.gather = {(all - own) * size, own * size};
  return traffic;
}

// Gradients in host memory are copied to where others read them, and whole where the sum will take their
// place; half of such a sum is moved there in the end (DeviceRanks). A sum reads this rank's part of all
// ranks' gradients, and is written and measured.
Placement::Moved Placement::moved_of_shared(UnitId unit, const UnitPlan& plan) const {
  if (!reads_pieces(unit) || !updated(unit)) return {};
  const std::size_t all = layout_.unit_elements(unit), own = format_.shards().here(unit).size();
  const std::size_t given = size_of(moved_gradient_type(unit)), size = size_of(layout_.dtype(unit));
  const bool narrow = given < sizeof(float);
  const std::size_t in_record = 2 * given * (narrow ? all : all - own) + (narrow ? sizeof(float) * own : 0);
  Moved moved;
  if (!sums_on_gpus(plan))
    moved.sum = own * (static_cast<std::size_t>(ranks_.size) * given + 2 * sizeof(float)) +
                (sums_in_host(plan) ? in_record : 0);
  if (gathers(unit, plan) && !gathers_on_gpus(plan))
    moved.gather = 2 * size * (all - own + (plan.gathers_in_host() ? own : 0));
  return moved;
}

// Of a part of a unit, without what pads parameters.
std::size_t Placement::elements_of_parameters(UnitId unit, const ElementRange& part) const {
  std::size_t elements = 0;
  for (ParameterId p = layout_.first_parameter(unit); p < layout_.end_parameter(unit); ++p)
    elements += intersection(part, elements_of(layout_, p)).size();
  return elements;
}

Placement::Traffic Placement::link_traffic(UnitId unit, const UnitPlan& plan) const {
  Traffic traffic;
  const auto add = [&](const Traffic& more) {
    traffic.read += more.read;
    traffic.written += more.written;
  };
  const OfRanks of_ranks = link_traffic_of_ranks(unit, plan);
  const std::uint64_t sums = sums_in_step();
  add({sums * of_ranks.sum.read, sums * of_ranks.sum.written});
  add(of_ranks.gather);
  add({(sums - 1) * of_ranks.kept, sums * of_ranks.kept});  // a part comes where one is added to it
  const bool crosses = this->crosses(unit, plan), stored = plan.gradient_stored && updated(unit);
  const std::uint64_t gradients = moved_gradient_bytes(unit);
  const std::uint64_t passes = crosses ? 1 + buckets_[unit].front().rounds : 0;
  // Of partitioned parameters a GPU has what it fetches, and the CPU the shard that it updates. GPUs that
  // have the shards copy them from each other.
  const bool in_shards = plan.tier(Part::kParameters) == allocator::Tier::kRanks;
  if (in_shards) add({units_[unit].at.fetches * micro_batches() * fetched_by_link(unit, plan), 0});
  if (!in_shards && !plan.resident(Part::kParameters)) add(parameter_traffic_of_gpu(unit, plan));
  add(summed_gradient_traffic(unit, plan));
  if (!crosses) {
    if (!plan.resident(Part::kGradient) && stored)
      add(gradient_traffic(unit, micro_batches(), brings_whole_gradient(unit, plan)));
    if (plan.gradient_shard_in_record()) add({gradient_record_bytes(unit), 0});
    if (!plan.resident(Part::kState)) add(state_traffic(unit));
    return traffic;
  }
  // The CPU reads gradients, once for each round, and values where there are no masters, and writes
  // parameters, all where they are, of what this rank updates.
  const std::uint64_t elements = units_[unit].elements_read / passes;
  const std::uint64_t values = elements * size_of(layout_.dtype(unit));
  // A part that waits in the host has left after its sum.
  const bool leaves_by_chunks = plan.resident(Part::kGradient) || !stored;
  const std::uint64_t chunks = passes * elements * size_of(updated_gradient_type(unit));
  if (!plan.gradient_shard_in_record()) add({0, leaves_by_chunks ? chunks : gradients});
  if (stored && brings_whole_gradient(unit, plan))
    add({final_elements(unit) * size_of(updated_gradient_type(unit)), chunks});
  if (!plan.resident(Part::kGradient) && stored) add(kept_gradient_traffic(unit, micro_batches()));
  if (changes_on_gpu(unit, plan)) add({values, value_reads(unit, buckets_[unit].front()) * values});
  return traffic;
}

double Placement::update_seconds(UnitId unit, const MachineRates& rates) const {
  if (!updated(unit)) return 0;
  double elements = 0, bytes = 0;
  const ElementRange own = format_.shards().here(unit);
  for_each_updated(unit, [&](ParameterId p, double each) {
    const auto count = static_cast<double>(format_.shards().slice(p, own).count);
    elements += count;
    bytes += count * each;
  });
  const double arithmetic = elements * rates.update_seconds.value_or(0);
  return std::max(arithmetic, bytes / rates.memory_bandwidth) + product_flops_[unit] / rates.flops;
}

double Placement::update_seconds(UnitId unit, const UnitPlan& plan, const MachineRates& rates) const {
  if (plan.updated_by_cpu() || !updated(unit)) return update_seconds(unit, rates);
  return static_cast<double>(format_.shards().here(unit).size()) * rates.gpu.update_seconds;
}

std::size_t Placement::chunk_for(const MachineRates& rates) const {
  double moved = std::numeric_limits<double>::infinity();  // bytes moved for each element
  for (UnitId unit = 0; unit < buckets_.size(); ++unit)
    for_each_updated(unit, [&](ParameterId, double each) { moved = std::min(moved, each); });
  return chunk_elements(moved, rates.memory_bandwidth);
}

}  // namespace sluice::engine
