#include "engine/store/stored_shards.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "core/bytes.h"
#include "core/error.h"

namespace sluice::engine {

StoredShards::StoredShards(std::size_t units, std::size_t pieces, int readers)
    : readers_(readers), shards_(units), pieces_(pieces) {}

StoredShards::~StoredShards() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return under_way_ == 0; });
}

void StoredShards::define(UnitId unit, const std::string& name, std::size_t bytes, Backings& backings) {
  shards_[unit] = {bytes, backings.make({allocator::Tier::kDisk, name, backing_bytes(bytes),
                                         allocator::Purpose::kParameter, kPiece, unit})};
}

void StoredShards::set_pieces(allocator::Ledger& ledger, std::size_t pieces) {
  const std::lock_guard lock(mutex_);
  ensure(under_way_ == 0, "shards are read while a new plan moves them");
  pieces_.clear();
  memory_ = {};
  pieces_.resize(pieces);
  start(ledger);
}

void StoredShards::start(allocator::Ledger& ledger) {
  memory_ = allocator::Region(ledger, allocator::Purpose::kStaging, pieces_.size() * kPiece);
  for (std::size_t i = 0; i < pieces_.size(); ++i) pieces_[i].data = memory_.data() + i * kPiece;
}

std::size_t StoredShards::piece_bytes(const Key& key) const {
  return std::min(kPiece, backing_bytes(shards_[key.first].bytes) - key.second * kPiece);
}

void StoredShards::read(UnitId unit, std::size_t offset, std::size_t bytes, Use use) {
  const Key key = {unit, offset / kPiece};
  if (offset % kPiece != 0 || bytes > kPiece || offset + bytes > shards_[unit].bytes)
    return use({},
               std::make_exception_ptr(
                   Error(ErrorCode::kState, "a piece of a shard is read as if it were elsewhere")),
               {});
  Request request{bytes, std::move(use)};
  Piece* there = nullptr;
  {
    const std::lock_guard lock(mutex_);
    ++under_way_;
    const auto found = std::ranges::find_if(pieces_, [&](const Piece& p) { return !p.busy && p.key == key; });
    if (found != pieces_.end()) {
      there = &*found;
      ++there->uses;
      ++there->given;
    } else {
      const bool is_read = std::ranges::any_of(pieces_, [&](const Piece& p) { return p.key == key; });
      std::vector<Request>& all = requests_[key];
      if (all.empty() && !is_read) unread_.push_back(key);
      all.push_back(std::move(request));
    }
  }
  if (there != nullptr) return give(*there, request);
  advance();
}

void StoredShards::copy(UnitId unit, std::size_t offset, std::span<std::byte> into, Done done) {
  const std::size_t pieces = divide_up(into.size(), kPiece);
  if (pieces == 0) return done(nullptr);
  const Done part = after(pieces, std::move(done));
  for (std::size_t i = 0; i < pieces; ++i) {
    const std::span<std::byte> to = into.subspan(i * kPiece, std::min(kPiece, into.size() - i * kPiece));
    read(unit, offset + i * kPiece, to.size(),
         [to, part](std::span<const std::byte> bytes, std::exception_ptr error, const Done& used) {
           if (error == nullptr) std::memcpy(to.data(), bytes.data(), bytes.size());
           if (used) used(nullptr);
           part(std::move(error));
         });
  }
}

// Those that every rank has taken go first, then those that were read first.
StoredShards::Piece* StoredShards::free_piece() {
  Piece* best = nullptr;
  const auto rank_of = [&](const Piece& p) {
    return std::pair(p.key.has_value() && p.given < readers_, p.since);
  };
  for (Piece& piece : pieces_)
    if (!piece.busy && piece.uses == 0 && (best == nullptr || rank_of(piece) < rank_of(*best))) best = &piece;
  return best;
}

// Begins to read what waits, as far as there is memory. Calls that come from within it return at once.
void StoredShards::advance() {
  for (bool first = true;; first = false) {
    Piece* piece = nullptr;
    {
      const std::lock_guard lock(mutex_);
      if (first && advancing_) return;
      advancing_ = !unread_.empty() && (piece = free_piece()) != nullptr;
      if (!advancing_) return;
      piece->key = unread_.front();
      piece->busy = true;
      piece->given = 0;
      piece->since = ++reads_;
      unread_.pop_front();
      ++under_way_;
    }
    const Key key = *piece->key;
    try {
      shards_[key.first].backing->fetch(
          key.second * kPiece, {piece->data, piece_bytes(key)},
          [this, piece](std::exception_ptr error) { on_read(*piece, std::move(error)); });
    } catch (...) {
      on_read(*piece, std::current_exception());
    }
  }
}

void StoredShards::on_read(Piece& piece, std::exception_ptr error) {
  std::vector<Request> requests;
  {
    const std::lock_guard lock(mutex_);
    requests = std::move(requests_.extract(*piece.key).mapped());
    piece.busy = false;
    piece.uses = piece.given = error == nullptr ? static_cast<int>(requests.size()) : 0;
    if (error != nullptr) piece.key.reset();
  }
  for (const Request& request : requests) {
    if (error == nullptr) {
      give(piece, request);
    } else {
      request.use({}, error, {});
      end_one();
    }
  }
  advance();
  end_one();
}

void StoredShards::give(Piece& piece, const Request& request) {
  request.use({piece.data, request.bytes}, nullptr, [this, &piece](const std::exception_ptr&) {
    {
      const std::lock_guard lock(mutex_);
      --piece.uses;
      changed_.notify_all();
    }
    advance();
    end_one();
  });
}

// Comes last, because the destructor waits for it.
void StoredShards::end_one() {
  const std::lock_guard lock(mutex_);
  --under_way_;
  changed_.notify_all();
}

void StoredShards::write(UnitId unit, const std::byte* values) {
  for (std::size_t i = 0; i * kPiece < shards_[unit].bytes; ++i) write_piece(unit, i, values + i * kPiece);
  forget(unit);
}

void StoredShards::store_piece(const Key& key, const std::byte* values, std::byte* piece) {
  const auto& [unit, index] = key;
  const std::size_t all = piece_bytes(key);
  const std::size_t bytes = std::min(kPiece, shards_[unit].bytes - index * kPiece);
  std::memcpy(piece, values, bytes);
  std::fill(piece + bytes, piece + all, std::byte{0});
  TransferGroup group;
  shards_[unit].backing->store(index * kPiece, {piece, all}, group.add());
  group.wait();
}

void StoredShards::write_through(UnitId unit, const std::byte* values, std::byte* piece) {
  for (std::size_t i = 0; i * kPiece < shards_[unit].bytes; ++i)
    store_piece({unit, i}, values + i * kPiece, piece);
}

void StoredShards::read_through(UnitId unit, std::byte* values, std::byte* piece) const {
  for (std::size_t i = 0; i * kPiece < shards_[unit].bytes; ++i) {
    TransferGroup group;
    shards_[unit].backing->fetch(i * kPiece, {piece, piece_bytes({unit, i})}, group.add());
    group.wait();
    std::memcpy(values + i * kPiece, piece, std::min(kPiece, shards_[unit].bytes - i * kPiece));
  }
}

void StoredShards::write_piece(UnitId unit, std::size_t index, const std::byte* values) {
  Piece* piece = nullptr;
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return (piece = free_piece()) != nullptr; });
    piece->key.reset();
    piece->busy = true;
  }
  std::exception_ptr error;
  try {
    store_piece({unit, index}, values, piece->data);
  } catch (...) {
    error = std::current_exception();
  }
  {
    const std::lock_guard lock(mutex_);
    piece->busy = false;
  }
  advance();
  if (error != nullptr) std::rethrow_exception(error);
}

void StoredShards::forget(UnitId unit) {
  const std::lock_guard lock(mutex_);
  for (Piece& piece : pieces_) {
    if (!piece.key || piece.key->first != unit) continue;
    ensure(!piece.busy, "a shard was changed while it was read");
    piece.key.reset();
  }
}

}  // namespace sluice::engine
