#include "engine/memory/stored_shards.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/bytes.h"
#include "core/error.h"

namespace sluice::engine {

StoredShards::StoredShards(std::size_t units, std::size_t pieces, int readers)
    : count_(pieces),
      shards_(units),
      pieces_(pieces, readers, [this](const Pieces::Key& key, std::byte* into, Done done) {
        backing(key.unit).fetch(key.index * kPiece, {into, piece_bytes(key.unit, key.index)},
                                std::move(done));
      }) {}

void StoredShards::start_beside_gpu(allocator::Ledger& ledger, DeviceWork& gpu, bool may_share) {
  gpu_ = &gpu;
  memory_ = {ledger, gpu.device(), allocator::Purpose::kStaging, count_ * kPiece, may_share};
  pieces_.start(memory_.data(), kPiece);
  gpu.add({memory_.data(), count_ * kPiece}, kPiece);
}

void StoredShards::share(Ranks& ranks, const std::vector<std::size_t>& pieces) {
  memory_.share(ranks, "the shards of parameters on disk", true);
  for (int rank = 0; rank < ranks.size() && is_shared(); ++rank)
    gpu_->add({memory_.of(rank), pieces[static_cast<std::size_t>(rank)] * kPiece}, kPiece);
}

void StoredShards::define(UnitId unit, const std::string& name, std::size_t bytes, Backings& backings) {
  shards_[unit] = {bytes, backings.make({allocator::Tier::kDisk, name, backing_bytes(bytes),
                                         allocator::Purpose::kParameter, kPiece, unit})};
}

// A GPU's record has another one for the CPU.
Backing& StoredShards::backing(UnitId unit) const {
  Backing& record = *shards_[unit].record;
  Backing* const of_cpu = record.for_cpu().backing;
  return of_cpu == nullptr ? record : *of_cpu;
}

std::size_t StoredShards::piece_bytes(UnitId unit, std::size_t index) const {
  return std::min(kPiece, backing_bytes(shards_[unit].bytes) - index * kPiece);
}

void StoredShards::read(UnitId unit, std::uint64_t version, std::size_t offset, std::size_t bytes,
                        Pieces::Use use) {
  if (offset % kPiece != 0 || bytes > kPiece || offset + bytes > shards_[unit].bytes)
    return use({},
               std::make_exception_ptr(
                   Error(ErrorCode::kState, "a piece of a shard is read as if it were elsewhere")),
               {});
  pieces_.read({.unit = unit, .version = version, .index = offset / kPiece}, bytes, std::move(use));
}

void StoredShards::copy(UnitId unit, std::uint64_t version, std::size_t offset, std::span<std::byte> into,
                        Done done) {
  const std::size_t pieces = divide_up(into.size(), kPiece);
  if (pieces == 0) return done(nullptr);
  const Done part = after(pieces, std::move(done));
  for (std::size_t i = 0; i < pieces; ++i) {
    const std::span<std::byte> to = into.subspan(i * kPiece, std::min(kPiece, into.size() - i * kPiece));
    read(unit, version, offset + i * kPiece, to.size(), Pieces::copy_to(to, part));
  }
}

void StoredShards::write(UnitId unit, std::size_t offset, std::span<const std::byte> values) {
  for (std::size_t at = 0; at < values.size(); at += kPiece) {
    const Pieces::Loan piece(pieces_);
    store_piece(unit, (offset + at) / kPiece, values.data() + at, piece.data());
  }
}

void StoredShards::store_piece(UnitId unit, std::size_t index, const std::byte* values, std::byte* piece) {
  const std::size_t all = piece_bytes(unit, index);
  const std::size_t bytes = std::min(kPiece, shards_[unit].bytes - index * kPiece);
  std::memcpy(piece, values, bytes);
  std::fill(piece + bytes, piece + all, std::byte{0});
  TransferGroup group;
  backing(unit).store(index * kPiece, {piece, all}, group.add());
  group.wait();
}

void StoredShards::write_through(UnitId unit, const std::byte* values, std::byte* piece,
                                 const std::function<void()>& moved) {
  for (std::size_t i = 0; i * kPiece < shards_[unit].bytes; ++i) {
    store_piece(unit, i, values + i * kPiece, piece);
    moved();
  }
}

void StoredShards::read_through(UnitId unit, std::byte* values, std::byte* piece,
                                const std::function<void()>& moved) const {
  for (std::size_t i = 0; i * kPiece < shards_[unit].bytes; ++i) {
    TransferGroup group;
    backing(unit).fetch(i * kPiece, {piece, piece_bytes(unit, i)}, group.add());
    group.wait();
    std::memcpy(values + i * kPiece, piece, std::min(kPiece, shards_[unit].bytes - i * kPiece));
    moved();
  }
}

}  // namespace sluice::engine
