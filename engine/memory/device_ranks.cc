#include "engine/memory/device_ranks.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/bytes.h"
#include "core/error.h"

namespace sluice::engine {
namespace {

constexpr std::size_t kCopied = std::size_t{256} << 10;  // bytes that one thread copies at a time
// Large enough that the link is busy, and small beside a model's units.
constexpr std::size_t kMostOfPiece = std::size_t{4} << 20;  // elements

}  // namespace

// The squares of a parameter's blocks are added up piece by piece, so that pieces end where blocks do.
std::size_t DeviceRanks::piece_elements(const Layout& layout) {
  std::size_t most = 0;
  for (UnitId unit = 0; unit < layout.units().size(); ++unit)
    most = std::max(most, layout.unit_elements(unit));
  return std::min(kMostOfPiece, round_up(most, kUnitAlignment));
}

DeviceRanks::Room::Room(const Layout& layout, Of of, bool may_share) {
  std::size_t widest = 0, narrowest = sizeof(float);
  for (UnitId unit = 0; unit < layout.units().size(); ++unit) {
    widest = std::max(widest, size_of(layout.dtype(unit)));
    narrowest = std::min(narrowest, size_of(layout.dtype(unit)));
  }
  const bool of_gradients = of == Of::kGradients;
  wide = round_up(piece_elements(layout) * (of_gradients ? sizeof(float) : widest), kLine);
  const bool any_narrow = of_gradients && may_share && narrowest < sizeof(float);
  narrow = any_narrow ? round_up(piece_elements(layout) * 2, kLine) : 0;
}

DeviceRanks::DeviceRanks(const Layout& layout, Of of, bool may_share, DeviceWork& gpu, Threads& threads)
    : gpu_(gpu),
      threads_(threads),
      of_(of),
      piece_elements_(piece_elements(layout)),
      room_(layout, of, may_share) {}

std::size_t DeviceRanks::bytes(const Layout& layout, Of of, bool may_share) {
  return kPlaces * Room(layout, of, may_share).all();
}

void DeviceRanks::start(allocator::Ledger& ledger, Ranks& ranks) {
  memory_ = RankMemory(ledger, gpu_.device(), allocator::Purpose::kStaging, kPlaces * room_.all(),
                       ranks.communicator().hosts().all_on_one());
  ranks_ = &ranks;
  gpu_.add({memory_.data(), kPlaces * room_.all()}, room_.all());
  out_.emplace();
  in_.emplace();
}

DeviceRanks::~DeviceRanks() {
  out_.reset();
  in_.reset();
  gpu_.finish();  // it may still copy what is in the host memory
}

std::vector<ElementRange> DeviceRanks::pieces_of(ElementRange elements) const {
  std::vector<ElementRange> pieces;
  for (std::size_t at = elements.begin; at < elements.end; at = pieces.back().end)
    pieces.push_back({at, std::min(elements.end, (at / piece_elements_ + 1) * piece_elements_)});
  std::ranges::reverse(pieces);
  return pieces;
}

void DeviceRanks::add(Call call, Done done) {
  const std::vector<ElementRange> pieces = pieces_of(call.elements);
  if (pieces.empty()) return done(nullptr);
  const auto added = std::make_shared<Added>(Added{std::move(call), std::move(done), pieces.size(), nullptr});
  for (const ElementRange& elements : pieces) {
    const Piece piece{added, elements, added_++, std::make_shared<TransferGroup>()};
    out_->add([this, piece](Done&) { leave(piece); });
  }
}

void DeviceRanks::attempt(const Piece& piece, const std::function<void()>& action) {
  {
    const std::lock_guard lock(mutex_);
    if (piece.of->error != nullptr) return;
  }
  std::exception_ptr error;
  try {
    return action();
  } catch (...) {
    error = std::current_exception();
  }
  const std::lock_guard lock(mutex_);
  if (piece.of->error == nullptr) piece.of->error = std::move(error);
}

template <class Copy>
void DeviceRanks::for_each(const Piece& piece, const std::vector<ElementRange>& ranges, Array host,
                           const Copy& copy) const {
  const std::size_t size = size_of(host.type);
  for (const ElementRange& range : ranges) {
    const ElementRange both = intersection(range, piece.elements);
    if (both.size() > 0)
      copy(std::span(piece.of->call.data + both.begin * size, both.size() * size),
           std::span(static_cast<std::byte*>(host.at(both.begin - piece.elements.begin).data),
                     both.size() * size));
  }
}

// The host's threads copy what the others read, once the GPU has what was there before.
void DeviceRanks::copy_to_place(const Piece& piece) {
  for_each(piece, piece.of->call.out, given_array(piece), [&](auto there, auto here) {
    threads_.parallel_for(here.size(), kCopied, [&](std::size_t begin, std::size_t end) {
      std::memcpy(here.data() + begin, there.data() + begin, end - begin);
    });
  });
}

std::vector<ConstArray> DeviceRanks::of_ranks(const Piece& piece) const {
  std::vector<ConstArray> arrays;
  if (!is_shared(piece)) return arrays;
  for (int rank = 0; rank < ranks_->size(); ++rank) {
    if (rank == ranks_->rank()) {
      arrays.push_back(is_narrow(piece) ? given_array(piece) : array_of(piece));
      continue;
    }
    const auto type = static_cast<Dtype>(*memory_.of(rank, type_given(piece)));
    const std::size_t before = type == piece.of->call.type ? 0 : room_.wide;
    arrays.push_back({memory_.of(rank, place(piece)) + before, type});
  }
  return arrays;
}

// Until the GPU uses neither what is given there, nor what it becomes.
void DeviceRanks::wait_for_record(const Piece& piece) {
  const Call& call = piece.of->call;
  for (const Dtype type : {call.given, call.type})
    gpu_.wait({call.data + piece.elements.begin * size_of(type), piece.elements.size() * size_of(type)},
              DeviceWork::Use::kWrite);
}

void DeviceRanks::leave(const Piece& piece) {
  {
    std::unique_lock lock(mutex_);
    has_room_.wait(lock, [&] { return under_way_ < kPieces; });
    ++under_way_;
  }
  attempt(piece, [&] {
    const Call& call = piece.of->call;
    ensure(is_shared(piece) || !is_narrow(piece), "ranks that share nothing would sum {} in place of {}",
           name_of(call.given), name_of(call.type));
    gpu_.wait({place(piece), room_.all()}, DeviceWork::Use::kWrite);
    if (call.in_host)
      wait_for_record(piece);
    else
      for_each(piece, call.out, given_array(piece),
               [&](auto there, auto here) { gpu_.copy_out(here.data(), there); });
    gpu_.wait({place(piece), room_.all()}, DeviceWork::Use::kRead);
    if (!is_shared(piece)) return call.begin(piece.elements, array_of(piece), piece.ranks->add());
    if (call.in_host) copy_to_place(piece);
    *type_given(piece) = static_cast<std::byte>(call.given);
    ranks_->await_all(call.unit, of_ == Of::kGradients, piece.number, piece.ranks->add());
  });
  in_->add([this, piece](Done&) { come_back(piece); });
}

void DeviceRanks::come_back(const Piece& piece) {
  attempt(piece, [&] {
    piece.ranks->wait();
    const Call& call = piece.of->call;
    if (call.end) call.end(piece.elements, array_of(piece), of_ranks(piece));
    for_each(piece, call.in, array_of(piece),
             [&](auto there, auto here) { gpu_.copy_in(there.data(), here); });
  });
  bool last = false;
  {
    const std::lock_guard lock(mutex_);
    --under_way_;
    last = --piece.of->pieces_left == 0;
  }
  has_room_.notify_all();
  if (last) piece.of->done(piece.of->error);
}

void take_of_others(const Ranks& ranks, UnitId unit, ElementRange elements, Array array,
                    std::span<const ConstArray> of_ranks, Threads& threads) {
  for (std::size_t rank = 0; rank < of_ranks.size(); ++rank) {
    if (static_cast<int>(rank) == ranks.rank()) continue;
    const ElementRange there = intersection(ranks.shard(unit, static_cast<int>(rank)), elements);
    const std::size_t first = there.begin - elements.begin;
    const auto* const from = static_cast<const std::byte*>(of_ranks[rank].at(first).data);
    auto* const to = static_cast<std::byte*>(array.at(first).data);
    threads.parallel_for(
        there.size() * size_of(array.type), kCopied,
        [&](std::size_t begin, std::size_t end) { std::memcpy(to + begin, from + begin, end - begin); });
  }
}

}  // namespace sluice::engine
