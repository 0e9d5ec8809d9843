#include "engine/memory/shard_memory.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"

namespace sluice::engine {

void ShardMemory::share(Ranks& ranks, const std::string& name) {
  if (among_gpus_.size() == 0) return beside_gpu_.share(ranks, name, true);
  const std::string problem = among_gpus_.share(ranks.communicator(), name);
  if (!problem.empty()) fail(ErrorCode::kIo, "{}: {}", name, PeerMemory::refusal(problem));
}

void ShardMemory::leave(const std::vector<UnitId>& units) {
  for (const UnitId unit : units) offsets_[unit].reset();
  std::vector<UnitId> staying;
  for (UnitId unit = 0; unit < offsets_.size(); ++unit)
    if (has(unit)) staying.push_back(unit);
  std::ranges::sort(staying, {}, [&](UnitId unit) { return *offsets_[unit]; });
  bytes_ = 0;
  for (const UnitId unit : staying) {
    std::memmove(memory_.data() + bytes_, data(unit), rooms_[unit]);
    offsets_[unit] = bytes_;
    bytes_ += rooms_[unit];
  }
  memory_.resize(bytes_);
}

void ShardMemory::enter(UnitId unit, std::size_t bytes) {
  memory_.resize(bytes_ + room(bytes));
  offsets_[unit] = bytes_;
  rooms_[unit] = room(bytes);
  bytes_ += rooms_[unit];
}

}  // namespace sluice::engine
