#include "engine/plan/placement.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>

#include "core/bytes.h"
#include "core/error.h"
#include "engine/kind.h"
#include "engine/step/update_pipeline.h"
#include "engine/store/whole_store.h"

namespace sluice::engine {
namespace {

using allocator::Purpose;

std::size_t index(Purpose purpose) { return static_cast<std::size_t>(purpose); }

std::size_t choose_chunk(const Layout& layout, const PlanRequest& request) {
  if (request.chunk_elements && (*request.chunk_elements == 0 || *request.chunk_elements % kChunkGrain != 0))
    fail(ErrorCode::kInvalidArgument, "a chunk of {} elements is asked for; it must be a multiple of {}",
         *request.chunk_elements, kChunkGrain);
  std::size_t largest = 0;
  for (UnitId unit = 0; unit < layout.units().size(); ++unit)
    largest = std::max(largest, layout.unit_elements(unit));
  return std::min(request.chunk_elements.value_or(kChunkGrain), largest);
}

}  // namespace

Placement::Placement(const Profile& profile, const optim::Optimizer& optimizer, const PlanRequest& request)
    : profile_(profile),
      clip_(request.clip),
      layout_(profile.units),
      uses_(gradient_uses(profile)),
      format_(layout_, optimizer, choose_chunk(layout_, request)),
      whole_bytes_(WholeStore(layout_, optimizer).bytes()),
      rounds_(rounds_need(layout_, optimizer)),
      product_flops_(profile.units.size()) {
  check_masters(profile.units, optimizer);
  for (ParameterId p = 0; p < layout_.parameters(); ++p) {
    const ParameterSpec& spec = layout_.spec(p);
    const bool counts = layout_.trainable(layout_.place(p).unit) && !spec.continues();
    if (counts) product_flops_[layout_.place(p).unit] += optimizer.product_flops(kind_of(spec));
  }
  for (UnitId unit = 0; unit < layout_.units().size(); ++unit) {
    batches_.push_back(batches_of(layout_, optimizer, unit, format_.chunk_elements()));
    const UnitRange together = updated_together(layout_, optimizer, unit);
    together_.push_back(together.size() > 1);
    if (uses_[unit] != uses_[together.first])
      fail(ErrorCode::kInvalidArgument,
           "the schedule asks for the gradient of some units with a part of '{}' and not of '{}'; "
           "{} updates it as a whole",
           layout_.units()[unit].parameters.front().name, layout_.units()[unit].name, optimizer.name());
    for (int round = 0; together_[unit] && round < optimizer.rounds(); ++round)
      rounds_read_values_ |= optimizer.reads_values(round);
  }
}

std::string Placement::largest_of_rounds() const {
  const ParameterSpec& spec = layout_.spec(rounds_.largest);
  return fmt::format("'{}' ({})", spec.name, fmt::join(spec.shape, " x "));
}

std::size_t Placement::parameter_bytes(UnitId unit) const { return layout_.unit_bytes(unit); }

std::size_t Placement::gradient_bytes(UnitId unit) const {
  std::size_t bytes = 0;
  for (int use = 0; use < uses_[unit]; ++use)
    bytes += round_up(use_elements(layout_, unit, use) * sizeof(float), kHugePage);
  return bytes;
}

bool Placement::stores_gradient(UnitId unit, std::size_t groups) const {
  if (waits(unit) || !updated(unit)) return updated(unit);
  const auto uses =
      std::count_if(profile_.schedule.begin(), profile_.schedule.end(),
                    [&](const Access& access) { return access.unit == unit && access.gradient_use >= 0; });
  return groups > 1 || uses > 1;
}

std::size_t Placement::state_bytes(UnitId unit) const { return format_.bytes(unit); }

// Read at each access of each group, but not where the unit is still there from the access before or the next
// but one; written once, after its update. A narrow copy whose update waits is not read to be overwritten.
// What units have together reads values in a pass of its own.
Placement::Traffic Placement::parameter_traffic(UnitId unit, std::size_t groups) const {
  std::vector<std::size_t> positions;
  for (std::size_t i = 0; i < profile_.schedule.size(); ++i)
    if (profile_.schedule[i].unit == unit && profile_.schedule[i].parameters) positions.push_back(i);
  std::size_t reads = 0;
  for (std::size_t i = 0; i < positions.size(); ++i)
    reads += i == 0 || positions[i] - positions[i - 1] > 2 ? 1 : 0;
  reads *= groups;
  if (!updated(unit)) return {reads * parameter_bytes(unit), 0};
  if (together_[unit] && rounds_read_values_ && !format_.has_master(unit)) ++reads;
  if (format_.has_master(unit) && clip_ && reads > 0) --reads;
  return {reads * parameter_bytes(unit), parameter_bytes(unit)};
}

Placement::Traffic Placement::kept_gradient_traffic(UnitId unit, std::size_t groups) const {
  Traffic traffic;
  for (int use = 0; use < uses_[unit]; ++use) {
    const std::uint64_t bytes = use_elements(layout_, unit, use) * sizeof(float);
    // Between the groups, and between its own last use in a group and the unit's (a tied embedding's head).
    const bool is_last_use = use + 1 == uses_[unit];
    const std::size_t kept = is_last_use ? groups - 1 : 2 * groups - 1;
    traffic.read += kept * bytes;
    traffic.written += kept * bytes;
  }
  return traffic;
}

Placement::Traffic Placement::gradient_traffic(UnitId unit, std::size_t groups) const {
  Traffic traffic = kept_gradient_traffic(unit, groups);
  if (waits(unit) && updated(unit)) {
    const std::size_t size = size_of(profile_.any_order ? Dtype::kF32 : layout_.dtype(unit));
    const std::uint64_t bytes = layout_.unit_elements(unit) * size;
    for (const Batch& batch : batches_[unit])
      for (std::size_t chunk = batch.first_chunk; chunk < batch.end_chunk; ++chunk)
        traffic.read += static_cast<std::size_t>(batch.rounds + 1) * format_.chunk_size(unit, chunk) * size;
    traffic.written += bytes;
  }
  return traffic;
}

Placement::Traffic Placement::state_traffic(UnitId unit) const {
  Traffic traffic;
  for (const Batch& batch : batches_[unit])
    for (std::size_t chunk = batch.first_chunk; chunk < batch.end_chunk; ++chunk) {
      traffic.read += static_cast<std::size_t>(batch.rounds + 1) * format_.chunk_bytes(unit, chunk);
      traffic.written += format_.chunk_bytes(unit, chunk);
    }
  return traffic;
}

// What an access needs in frames: parameters, the gradient of use 0, those of further uses.
std::array<std::size_t, 3> Placement::extents_of(const Access& access, const UnitPlan& unit) const {
  std::array<std::size_t, 3> extents = {};
  if (access.parameters && !unit.resident(Part::kParameters))
    extents[0] = divide_up(parameter_bytes(access.unit), kHugePage);
  if (unit.resident(Part::kGradient)) return extents;
  for (int use = 0; use < uses_[access.unit]; ++use)
    if (use == access.gradient_use || access.final)
      extents[use == 0 ? 1 : 2] =
          divide_up(use_elements(layout_, access.unit, use) * sizeof(float), kHugePage);
  return extents;
}

std::size_t Placement::extents(const std::vector<UnitPlan>& units, const Lookahead& lookahead) const {
  return profile_.any_order ? extents_in_any_order(units, profile_.held_units + lookahead.ahead())
                            : extents_in_order(units, 1 + lookahead.ahead()) + extents_of_passes(units);
}

// In a schedule the siblings of a unit that is needed may be none of those that are near: a pass over each
// comes between.
std::size_t Placement::extents_of_passes(const std::vector<UnitPlan>& units) const {
  std::size_t most = 0;
  for (UnitId unit = 0; unit < units.size(); ++unit)
    if (together_[unit]) most = std::max(most, extents_of({unit, true, -1, false}, units[unit])[0]);
  return most;
}

// The largest units may be the ones that meet.
std::size_t Placement::extents_in_any_order(const std::vector<UnitPlan>& units, std::size_t window) const {
  std::vector<std::size_t> needs;
  for (UnitId unit = 0; unit < units.size(); ++unit) {
    const auto extents = extents_of({unit, true, 0, true}, units[unit]);
    needs.push_back(extents[0] + extents[1] + extents[2]);
  }
  std::sort(needs.begin(), needs.end(), std::greater<>());
  needs.resize(std::min(needs.size(), window));
  return std::accumulate(needs.begin(), needs.end(), std::size_t{0});
}

std::size_t Placement::extents_in_order(const std::vector<UnitPlan>& units, std::size_t window) const {
  const std::size_t n = profile_.schedule.size();
  std::size_t most = 0;
  for (std::size_t start = 0; start < n; ++start) {
    std::vector<std::array<std::size_t, 3>> taken(units.size());
    for (std::size_t i = 0; i < std::min(n, window); ++i) {
      const Access& access = profile_.schedule[(start + i) % n];
      const auto extents = extents_of(access, units[access.unit]);
      for (std::size_t part = 0; part < extents.size(); ++part)
        if (extents[part] > 0) taken[access.unit][part] = extents[part];
    }
    std::size_t sum = 0;
    for (const auto& extents : taken) sum += extents[0] + extents[1] + extents[2];
    most = std::max(most, sum);
  }
  return most;
}

bool Placement::needs_staging(const std::vector<UnitPlan>& units) const {
  for (UnitId unit = 0; unit < units.size(); ++unit)
    if (!units[unit].resident(Part::kState) || (!units[unit].resident(Part::kGradient) && waits(unit)))
      return true;
  return false;
}

bool Placement::needs_scratch() const {
  for (UnitId unit = 0; unit < layout_.units().size(); ++unit) {
    const std::size_t arrays = layout_.trainable(unit) ? format_.arrays() : 0;
    for (std::size_t array = format_.masters(); array < arrays; ++array)
      if (format_.array(array).type != Dtype::kF32) return true;
    if (layout_.dtype(unit) != Dtype::kF32 && !format_.has_master(unit)) return true;
  }
  return false;
}

std::size_t Placement::activation_bytes(const std::vector<UnitPlan>& units, std::size_t group) const {
  std::size_t bytes = profile_.border_gradient_bytes;
  for (UnitId unit = 0; unit < units.size(); ++unit)
    bytes += profile_.unit_profiles[unit].input_bytes +
             profile_.unit_profiles[unit].choices[units[unit].choice].kept_bytes;
  return bytes * group;
}

std::size_t Placement::workspace_bytes(const std::vector<UnitPlan>& units) const {
  std::size_t most = 0;
  for (UnitId unit = 0; unit < units.size(); ++unit)
    most = std::max(most, profile_.unit_profiles[unit].choices[units[unit].choice].workspace_bytes);
  return profile_.workspace_bytes + most;
}

double Placement::element_bytes() const {
  double elements = 0, bytes = static_cast<double>(whole_bytes_);
  for (ParameterId p = 0; p < layout_.parameters(); ++p) {
    const Layout::Place& place = layout_.place(p);
    if (!layout_.trainable(place.unit)) continue;
    elements += static_cast<double>(place.elements);
    bytes += static_cast<double>(place.elements) * format_.element_bytes(p);
  }
  return elements == 0 ? 0 : bytes / elements;
}

// Each round reads gradient and values. The application reads gradient, master and state, writes master,
// state and, beside a master, the parameter.
double Placement::update_bytes(ParameterId parameter, int rounds) const {
  const UnitId unit = layout_.place(parameter).unit;
  const std::size_t passes = (format_.has_master(unit) ? 2 : 3) + 2 * static_cast<std::size_t>(rounds);
  return 2 * format_.element_bytes(parameter) + static_cast<double>(passes * size_of(layout_.dtype(unit)));
}

template <class Body>
void Placement::for_each_updated(UnitId unit, const Body& body) const {
  for (const Batch& batch : batches_[unit])
    for (ParameterId p = batch.first; p < batch.end && updated(unit); ++p)
      body(p, update_bytes(p, batch.rounds));
}

double Placement::update_seconds(UnitId unit, const MachineRates& rates) const {
  double elements = 0, bytes = 0;
  for_each_updated(unit, [&](ParameterId p, double each) {
    const auto count = static_cast<double>(layout_.place(p).elements);
    elements += count;
    bytes += count * each;
  });
  const double arithmetic = elements * rates.update_seconds.value_or(0);
  return std::max(arithmetic, bytes / rates.memory_bandwidth) + product_flops_[unit] / rates.flops;
}

double Placement::least_update_bytes() const {
  double least = std::numeric_limits<double>::infinity();
  for (UnitId unit = 0; unit < batches_.size(); ++unit)
    for_each_updated(unit, [&](ParameterId, double each) { least = std::min(least, each); });
  return least;
}

std::array<std::uint64_t, allocator::kPurposes> Placement::resident_bytes(
    const std::vector<UnitPlan>& units) const {
  std::array<std::uint64_t, allocator::kPurposes> bytes = {};
  std::uint64_t state = 0;
  for (UnitId unit = 0; unit < units.size(); ++unit) {
    if (units[unit].resident(Part::kParameters))
      bytes[index(Purpose::kParameter)] += round_up(parameter_bytes(unit), kHugePage);
    if (units[unit].resident(Part::kGradient)) bytes[index(Purpose::kGradient)] += gradient_bytes(unit);
    if (units[unit].resident(Part::kState)) state += state_bytes(unit);
  }
  bytes[index(Purpose::kOptimizerState)] = round_up(state, kHugePage) + round_up(whole_bytes_, kHugePage);
  return bytes;
}

template <class Body>
void Placement::for_each_record(const std::vector<UnitPlan>& units, const Body& body) const {
  for (UnitId unit = 0; unit < units.size(); ++unit) {
    if (!units[unit].resident(Part::kParameters))
      body(Purpose::kParameter, parameter_bytes(unit), offload::RecordStore::kBlock);
    if (!units[unit].resident(Part::kState) && state_bytes(unit) > 0)
      body(Purpose::kOptimizerState, state_bytes(unit), format_.block_bytes(unit));
    if (units[unit].resident(Part::kGradient) || !units[unit].gradient_stored) continue;
    for (int use = 0; use < uses_[unit]; ++use)
      body(Purpose::kGradient, use_elements(layout_, unit, use) * sizeof(float),
           offload::RecordStore::kBlock);
  }
}

std::array<std::uint64_t, allocator::kPurposes> Placement::disk_bytes(
    const std::vector<UnitPlan>& units) const {
  std::array<std::uint64_t, allocator::kPurposes> bytes = {};
  for_each_record(units,
                  [&](Purpose purpose, std::size_t size, std::size_t) { bytes[index(purpose)] += size; });
  return bytes;
}

std::size_t Placement::metadata_bytes(const std::vector<UnitPlan>& units) const {
  std::size_t bytes = 0;
  for_each_record(units, [&](Purpose, std::size_t size, std::size_t block) {
    bytes += offload::RecordStore::metadata_bytes(size, block);
  });
  return bytes;
}

}  // namespace sluice::engine
