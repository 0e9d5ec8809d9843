#include "engine/memory/passed_shards.h"

#include <algorithm>
#include <utility>

#include "core/bytes.h"
#include "core/error.h"

namespace sluice::engine {
namespace {

constexpr std::size_t kUnitsPassed = 3;  // in flight at a time

}  // namespace

PassedShards::Need PassedShards::need_of(const Layout& layout, const Shards& all, UnitId unit, int rank,
                                         int ranks) {
  const auto shard = [&](int of) { return all.shard(unit, of).size() * size_of(layout.dtype(unit)); };
  std::size_t largest = 0;
  for (int of = 0; of < ranks; ++of) largest = std::max(largest, shard(of));
  const std::size_t places = std::max(std::size_t{1}, divide_up(shard(rank), kMostBytes));
  return {kUnitsPassed * places, std::min(kMostBytes, round_up(largest, kParameterAlignment))};
}

PassedShards::PassedShards(const Need& need, int ranks, Source source)
    : need_(need),
      source_(std::move(source)),
      pieces_(need.places, ranks, [this](const Pieces::Key& key, std::byte* into, Done done) {
        bring(key, into, std::move(done));
      }) {}

void PassedShards::start(allocator::Ledger& ledger, DeviceWork& gpu) {
  gpu_ = &gpu;
  places_ = {ledger, gpu.device(), allocator::Purpose::kStaging, need_.places * need_.bytes};
  pieces_.start(places_.data(), need_.bytes);
  bringing_.emplace();
}

void PassedShards::share(comm::Communicator& communicator, const std::string& name) {
  const std::string problem = places_.share(communicator, name);
  if (!problem.empty()) fail(ErrorCode::kIo, "{}: {}", name, PeerMemory::refusal(problem));
  for (int rank = 0; rank < communicator.size(); ++rank) gpu_->add(places_.memory_of(rank), need_.bytes);
}

void PassedShards::lend(UnitId unit, std::uint64_t version, std::size_t offset, std::size_t bytes,
                        Pieces::Use use) {
  pieces_.read({.unit = unit, .version = version, .index = offset / kMostBytes}, bytes, std::move(use));
}

void PassedShards::bring(const Pieces::Key& key, std::byte* into, Done done) {
  const auto work = [this, key, into](Done&) {
    const std::span<const std::byte> shard = source_(key.unit);
    const std::size_t offset = key.index * kMostBytes, bytes = std::min(kMostBytes, shard.size() - offset);
    gpu_->copy_in(into, shard.subspan(offset, bytes), DeviceWork::Flow::kPassed);
    gpu_->wait({into, bytes}, DeviceWork::Use::kRead);
  };
  bringing_->add(work, std::move(done));
}

}  // namespace sluice::engine
