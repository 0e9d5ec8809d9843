#include "engine/layout/state_format.h"

#include <algorithm>
#include <utility>

#include "core/bytes.h"
#include "engine/layout/kind.h"
#include "offload/records.h"

namespace sluice::engine {
namespace {

// Blocks of 1 MiB at least, and of up to 4 MiB where that divides a chunk evenly.
std::size_t blocks_of(std::size_t chunk_bytes) {
  const std::size_t most = std::max<std::size_t>(1, chunk_bytes / offload::RecordStore::kBlock);
  for (std::size_t blocks = most; 4 * blocks >= most; --blocks)
    if (chunk_bytes / kDiskBlock % blocks == 0) return blocks;
  return most;
}

}  // namespace

StateFormat::StateFormat(const Layout& layout, const optim::Optimizer& optimizer, std::size_t chunk_elements,
                         const Shards::Ranks& ranks)
    : layout_(layout), shards_(layout, optimizer, chunk_elements, ranks) {
  const auto is_narrow = [&](ParameterId p) {
    const UnitId unit = layout.location(p).unit;
    return layout.trainable(unit) && layout.dtype(unit) != Dtype::kF32 && optimizer.keeps_master();
  };
  for (ParameterId p = 0; p < layout.parameters(); ++p) masters_ |= is_narrow(p) ? 1 : 0;
  if (masters_ > 0) arrays_.push_back({"master"});
  for (optim::StateArray& array : optimizer.state()) arrays_.push_back(std::move(array));
  for (std::size_t array = 0; array < arrays_.size(); ++array) {
    std::vector<bool> has;
    for (ParameterId p = 0; p < layout.parameters(); ++p)
      has.push_back(array < masters_ ? is_narrow(p)
                                     : optimizer.keeps(array - masters_, kind_of(layout.spec(p))));
    everywhere_.push_back(std::find(has.begin(), has.end(), false) == has.end());
    has_.push_back(std::move(has));
  }
  for (UnitId unit = 0; unit < layout.units().size(); ++unit) {
    units_.push_back(shape_of(unit));
    // All chunks but the last one take the same.
    if (const std::size_t chunks = shards_.chunks(unit); chunks > 0 && layout.trainable(unit))
      most_chunk_bytes_ = std::max({most_chunk_bytes_, chunk_bytes(unit, 0), chunk_bytes(unit, chunks - 1)});
  }
  if (ranks.end - ranks.first < ranks.world)
    most_chunk_bytes_ = std::max(
        most_chunk_bytes_,
        StateFormat(layout, optimizer, chunk_elements, {ranks.world, 0, ranks.world}).most_chunk_bytes());
}

bool StateFormat::has_master(UnitId unit) const {
  return masters_ > 0 && has_[0][layout_.first_parameter(unit)];
}

// Each round reads gradient and values. The application reads gradient, master and state, and writes master,
// state and, beside a master, the parameter.
double StateFormat::update_bytes(ParameterId parameter, int rounds) const {
  const UnitId unit = layout_.location(parameter).unit;
  const std::size_t passes = (has_master(unit) ? 2 : 3) + 2 * static_cast<std::size_t>(rounds);
  return 2 * element_bytes(parameter) + static_cast<double>(passes * size_of(layout_.dtype(unit)));
}

double StateFormat::element_bytes(ParameterId parameter) const {
  double bytes = 0;
  for (std::size_t array = 0; array < arrays_.size(); ++array) {
    if (!has(array, parameter)) continue;
    const Dtype type = arrays_[array].type;
    bytes += static_cast<double>(size_of(type)) +
             (type == Dtype::kU8 ? sizeof(float) / static_cast<double>(optim::kScaleBlock) : 0);
  }
  return bytes;
}

StateFormat::RecordShape StateFormat::shape_of(UnitId unit) const {
  RecordShape result;
  if (!layout_.trainable(unit) || shards_.chunks(unit) == 0) return result;
  const std::size_t last = shards_.chunks(unit) - 1;
  std::size_t most = last == 0 ? filled_bytes(unit, 0) : 0;
  // Where each array has all parameters, no chunk takes more than a full one.
  const bool are_alike = std::ranges::count(everywhere_, false) == 0;
  for (std::size_t chunk = 0; chunk < last; ++chunk) {
    most = std::max(most, filled_bytes(unit, chunk));
    if (are_alike && shards_.chunk(unit, chunk).size() == shards_.chunk_elements()) break;
  }
  const std::size_t blocks = blocks_of(most);
  result.block = round_up(divide_up(most, blocks), kDiskBlock);
  result.stride = blocks * result.block;
  result.bytes = last * result.stride + filled_bytes(unit, last);
  return result;
}

std::size_t StateFormat::chunk_bytes(UnitId unit, std::size_t chunk) const {
  const RecordShape& own = units_[unit];
  return chunk + 1 < shards_.chunks(unit) ? own.stride : own.bytes - chunk * own.stride;
}

std::size_t StateFormat::array_bytes(UnitId unit, std::size_t chunk, std::size_t array) const {
  const std::size_t elements = position(unit, chunk, array, shards_.chunk(unit, chunk).size());
  const std::size_t scales = arrays_[array].type == Dtype::kU8 ? elements / optim::kScaleBlock : 0;
  return elements * size_of(arrays_[array].type) + scales * sizeof(float);
}

std::size_t StateFormat::filled_bytes(UnitId unit, std::size_t chunk) const {
  std::size_t bytes = 0;
  for (std::size_t array = 0; array < arrays_.size(); ++array) bytes += array_bytes(unit, chunk, array);
  return round_up(bytes, kDiskBlock);
}

// Padding counts as elements of the parameter before it.
std::size_t StateFormat::position(UnitId unit, std::size_t chunk, std::size_t array,
                                  std::size_t first) const {
  if (everywhere_[array]) return first;
  const std::size_t begin = shards_.chunk(unit, chunk).begin, end = begin + first;
  std::size_t elements = 0;
  for (ParameterId p = layout_.first_parameter(unit); p < layout_.end_parameter(unit); ++p) {
    if (!has(array, p)) continue;
    const bool last = p + 1 == layout_.end_parameter(unit);
    const std::size_t next = last ? layout_.unit_elements(unit) : layout_.location(p + 1).offset;
    elements += intersection({begin, end}, {layout_.location(p).offset, next}).size();
  }
  return elements;
}

optim::StatePart StateFormat::part(std::byte* data, UnitId unit, std::size_t chunk, std::size_t array,
                                   std::size_t first) const {
  for (std::size_t before = 0; before < array; ++before) data += array_bytes(unit, chunk, before);
  const std::size_t at = position(unit, chunk, array, first);
  optim::StatePart part = {Array{data, arrays_[array].type}.at(at)};
  if (arrays_[array].type == Dtype::kU8) {
    std::byte* const scales = data + position(unit, chunk, array, shards_.chunk(unit, chunk).size());
    part.scales = reinterpret_cast<float*>(scales) + at / optim::kScaleBlock;
  }
  return part;
}

}  // namespace sluice::engine
