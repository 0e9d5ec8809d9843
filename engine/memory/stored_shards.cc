#include "engine/memory/stored_shards.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/bytes.h"
#include "core/error.h"

namespace sluice::engine {

StoredShards::StoredShards(std::size_t units, std::size_t pieces, int readers)
    : shards_(units), pieces_(pieces, readers, [this](const Pieces::Key& key, std::byte* into, Done done) {
        shards_[key.unit].backing->fetch(key.index * kPiece, {into, piece_bytes(key.unit, key.index)},
                                         std::move(done));
      }) {}

void StoredShards::define(UnitId unit, const std::string& name, std::size_t bytes, Backings& backings) {
  shards_[unit] = {bytes, backings.make({allocator::Tier::kDisk, name, backing_bytes(bytes),
                                         allocator::Purpose::kParameter, kPiece, unit})};
}

std::size_t StoredShards::piece_bytes(UnitId unit, std::size_t index) const {
  return std::min(kPiece, backing_bytes(shards_[unit].bytes) - index * kPiece);
}

void StoredShards::read(UnitId unit, std::size_t offset, std::size_t bytes, Pieces::Use use) {
  if (offset % kPiece != 0 || bytes > kPiece || offset + bytes > shards_[unit].bytes)
    return use({},
               std::make_exception_ptr(
                   Error(ErrorCode::kState, "a piece of a shard is read as if it were elsewhere")),
               {});
  pieces_.read({.unit = unit, .index = offset / kPiece}, bytes, std::move(use));
}

void StoredShards::copy(UnitId unit, std::size_t offset, std::span<std::byte> into, Done done) {
  const std::size_t pieces = divide_up(into.size(), kPiece);
  if (pieces == 0) return done(nullptr);
  const Done part = after(pieces, std::move(done));
  for (std::size_t i = 0; i < pieces; ++i) {
    const std::span<std::byte> to = into.subspan(i * kPiece, std::min(kPiece, into.size() - i * kPiece));
    read(unit, offset + i * kPiece, to.size(), Pieces::copy_to(to, part));
  }
}

void StoredShards::write(UnitId unit, const std::byte* values) {
  for (std::size_t i = 0; i * kPiece < shards_[unit].bytes; ++i) write_piece(unit, i, values + i * kPiece);
  forget(unit);
}

void StoredShards::write_piece(UnitId unit, std::size_t index, const std::byte* values) {
  const Pieces::Loan piece(pieces_);
  store_piece(unit, index, values, piece.data());
}

void StoredShards::store_piece(UnitId unit, std::size_t index, const std::byte* values, std::byte* piece) {
  const std::size_t all = piece_bytes(unit, index);
  const std::size_t bytes = std::min(kPiece, shards_[unit].bytes - index * kPiece);
  std::memcpy(piece, values, bytes);
  std::fill(piece + bytes, piece + all, std::byte{0});
  TransferGroup group;
  shards_[unit].backing->store(index * kPiece, {piece, all}, group.add());
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
    shards_[unit].backing->fetch(i * kPiece, {piece, piece_bytes(unit, i)}, group.add());
    group.wait();
    std::memcpy(values + i * kPiece, piece, std::min(kPiece, shards_[unit].bytes - i * kPiece));
    moved();
  }
}

}  // namespace sluice::engine
