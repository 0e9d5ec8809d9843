#include "engine/memory/relayed_shards.h"

#include <algorithm>

#include "core/bytes.h"
#include "core/error.h"

namespace sluice::engine {
namespace {

constexpr std::size_t kPiece = Pieces::kMostBytes;

bool shares_host(const comm::Hosts& hosts, int rank) { return hosts.with(rank).size() > 1; }

}  // namespace

RelayedShards::Need RelayedShards::need_of(const Layout& layout, const Shards& all, UnitId unit,
                                           const comm::Hosts& hosts, int rank) {
  Need need;
  for (int owner = 0; shares_host(hosts, rank) && owner < hosts.ranks(); ++owner) {
    if (hosts.on_one(owner, rank)) continue;
    const std::size_t bytes = all.shard(unit, owner).size() * size_of(layout.dtype(unit));
    for (std::size_t piece = 0; piece * kPiece < bytes; ++piece) {
      if (hosts.relay(rank, owner, piece) != rank) continue;
      ++need.pieces;
      need.bytes = std::max(need.bytes, std::min(kPiece, bytes - piece * kPiece));
    }
  }
  return need;
}

RelayedShards::RelayedShards(const Layout& layout, Ranks& ranks, std::size_t pieces, std::size_t piece_bytes)
    : layout_(layout),
      ranks_(ranks),
      piece_bytes_(piece_bytes),
      pieces_(
          pieces, static_cast<int>(ranks.communicator().hosts().with(ranks.rank()).size()),
          [this](const Pieces::Key& key, std::byte* into, Done done) { bring(key, into, std::move(done)); }) {
  calls_->shards = this;
}

RelayedShards::~RelayedShards() {
  {
    std::unique_lock lock(calls_->mutex);
    calls_->shards = nullptr;
    calls_->ended.wait(lock, [this] { return calls_->running == 0; });
  }
  const auto gone = std::make_exception_ptr(
      Error(ErrorCode::kState, "a shard is read through an engine that is destroyed"));
  for (const auto& [version, all] : waiting_)
    for (const Waiting& waiting : all) waiting.use({}, gone, {});
}

int RelayedShards::source(int owner, std::size_t piece) const {
  const comm::Hosts& hosts = ranks_.communicator().hosts();
  const bool relayed = !hosts.on_one(owner, ranks_.rank()) && shares_host(hosts, ranks_.rank());
  return relayed ? hosts.relay(ranks_.rank(), owner, piece) : owner;
}

void RelayedShards::read(const comm::Read& read, Pieces::Use use) {
  if (pieces_.none())
    return use({},
               std::make_exception_ptr(Error(
                   ErrorCode::kState, "a shard is read through a rank whose plan knows nothing of its host")),
               {});
  const Version version{read.owner, static_cast<UnitId>(read.key), read.version};
  Waiting waiting{read, std::move(use)};
  bool is_first = false;
  {
    const std::lock_guard lock(mutex_);
    const auto newest = published_.find({version.owner, version.unit});
    if (newest == published_.end() || newest->second < version.version) {
      std::vector<Waiting>& all = waiting_[version];
      is_first = all.empty();
      all.push_back(std::move(waiting));
      if (!is_first) return;
    }
  }
  if (is_first) return ask(version);
  give(waiting);  // NOLINT(bugprone-use-after-move): it was not moved
}

// The owner answers once it has published the version.
void RelayedShards::ask(const Version& version) {
  ranks_.communicator().read(version.owner, version.unit, version.version, 0, {},
                             [calls = calls_, version](const std::exception_ptr& error) {
                               std::unique_lock lock(calls->mutex);
                               RelayedShards* const shards = calls->shards;
                               if (shards == nullptr) return;
                               ++calls->running;
                               lock.unlock();
                               shards->on_asked(version, error);
                               lock.lock();
                               --calls->running;
                               calls->ended.notify_all();
                             });
}

void RelayedShards::on_asked(const Version& version, const std::exception_ptr& error) {
  std::vector<Waiting> all;
  {
    const std::lock_guard lock(mutex_);
    all = std::move(waiting_.extract(version).mapped());
    std::uint64_t& newest = published_[{version.owner, version.unit}];
    if (error == nullptr) newest = std::max(newest, version.version);
  }
  for (const Waiting& waiting : all) error == nullptr ? give(waiting) : waiting.use({}, error, {});
}

void RelayedShards::give(const Waiting& waiting) {
  const comm::Read& read = waiting.read;
  pieces_.read({read.owner, static_cast<UnitId>(read.key), read.version, read.offset / kPiece}, read.bytes,
               waiting.use);
}

void RelayedShards::bring(const Pieces::Key& key, std::byte* into, Done done) {
  const std::size_t shard = ranks_.shard(key.unit, key.owner).size() * size_of(layout_.dtype(key.unit));
  const std::size_t offset = key.index * kPiece;
  ranks_.communicator().read(key.owner, key.unit, key.version, offset,
                             {into, std::min(kPiece, shard - offset)}, std::move(done));
}

}  // namespace sluice::engine
