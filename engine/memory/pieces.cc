#include "engine/memory/pieces.h"

#include <algorithm>

#include "core/error.h"

namespace sluice::engine {

Pieces::Use Pieces::copy_to(std::span<std::byte> into, Done done) {
  return [into, done = std::move(done)](std::span<const std::byte> bytes, std::exception_ptr error,
                                        const Done& used) {
    if (error == nullptr) std::ranges::copy(bytes, into.begin());
    if (used) used(nullptr);
    done(std::move(error));
  };
}

Pieces::~Pieces() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return under_way_ == 0; });
}

void Pieces::start(allocator::Ledger& ledger, std::size_t bytes) {
  memory_ = allocator::Region(ledger, allocator::Purpose::kStaging, pieces_.size() * bytes);
  start(memory_.data(), bytes);
}

void Pieces::start(std::byte* memory, std::size_t bytes) {
  for (std::size_t i = 0; i < pieces_.size(); ++i) pieces_[i].data = memory + i * bytes;
}

void Pieces::resize(allocator::Ledger& ledger, std::size_t count) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return under_way_ == 0; });  // a reader may learn of the end before this
  pieces_.clear();
  memory_ = {};
  pieces_.resize(count);
  start(ledger);
}

void Pieces::read(const Key& key, std::size_t bytes, Use use) {
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
      const bool is_brought = std::ranges::any_of(pieces_, [&](const Piece& p) { return p.key == key; });
      std::vector<Request>& all = requests_[key];
      if (all.empty() && !is_brought) unread_.push_back(key);
      all.push_back(std::move(request));
    }
  }
  if (there == nullptr) return advance();
  give(*there, request);  // NOLINT(bugprone-use-after-move): it was not moved
}

// Chooses pieces that every rank has taken first, then the one that was filled first.
Pieces::Piece* Pieces::free_piece() {
  Piece* best = nullptr;
  const auto rank_of = [&](const Piece& p) {
    return std::pair(p.key.has_value() && p.given < readers_, p.since);
  };
  for (Piece& piece : pieces_)
    if (!piece.busy && piece.uses == 0 && (best == nullptr || rank_of(piece) < rank_of(*best))) best = &piece;
  return best;
}

// Brings requested parts as long as pieces are free. A nested call returns at once.
void Pieces::advance() {
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
      piece->since = ++brought_;
      unread_.pop_front();
      ++under_way_;
    }
    try {
      bring_(*piece->key, piece->data,
             [this, piece](std::exception_ptr error) { on_brought(*piece, std::move(error)); });
    } catch (...) {
      on_brought(*piece, std::current_exception());
    }
  }
}

void Pieces::on_brought(Piece& piece, std::exception_ptr error) {
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

void Pieces::give(Piece& piece, const Request& request) {
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

// Comes last in every path, because the destructor waits for it.
void Pieces::end_one() {
  const std::lock_guard lock(mutex_);
  --under_way_;
  changed_.notify_all();
}

Pieces::Loan::Loan(Pieces& pieces) : pieces_(pieces) {
  std::unique_lock lock(pieces_.mutex_);
  pieces_.changed_.wait(lock, [&] { return (piece_ = pieces_.free_piece()) != nullptr; });
  piece_->key.reset();
  piece_->busy = true;
}

Pieces::Loan::~Loan() {
  {
    const std::lock_guard lock(pieces_.mutex_);
    piece_->busy = false;
  }
  pieces_.advance();
}

}  // namespace sluice::engine
