#include "engine/memory/device_ranks.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/bytes.h"
#include "core/error.h"
#include "kernels/grid.h"

namespace sluice::engine {
namespace {

constexpr std::size_t kCopied = std::size_t{256} << 10;  // bytes that one thread copies at a time
constexpr std::size_t kLine = 64;
// Large enough to keep links busy while ranks notify each other of pieces, and small beside a model's units.
constexpr std::size_t kInHost = 4, kMostInHost = std::size_t{4} << 20;  // pieces, and their elements
constexpr std::size_t kOnGpus = 2, kMostOnGpus = std::size_t{8} << 20;

DeviceAddress address_of(const std::byte* memory) { return reinterpret_cast<DeviceAddress>(memory); }

}  // namespace

// Pieces end where blocks of the grid do, since squares are added up by block within a piece.
DeviceRanks::Pace DeviceRanks::pace(const Layout& layout, bool on_gpus) {
  std::size_t most = 0;
  for (UnitId unit = 0; unit < layout.units().size(); ++unit)
    most = std::max(most, layout.unit_elements(unit));
  return {on_gpus ? kOnGpus : kInHost,
          std::min(on_gpus ? kMostOnGpus : kMostInHost, round_up(most, kUnitAlignment))};
}

namespace {

// The sizes of the widest and the narrowest type of any unit.
std::pair<std::size_t, std::size_t> sizes_of_types(const Layout& layout) {
  std::size_t widest = 0, narrowest = sizeof(float);
  for (UnitId unit = 0; unit < layout.units().size(); ++unit) {
    widest = std::max(widest, size_of(layout.dtype(unit)));
    narrowest = std::min(narrowest, size_of(layout.dtype(unit)));
  }
  return {widest, narrowest};
}

}  // namespace

DeviceRanks::Room DeviceRanks::room_in_host(const Layout& layout, Of of, bool may_share) {
  const auto [widest, narrowest] = sizes_of_types(layout);
  const std::size_t elements = pace(layout, false).elements;
  const bool of_gradients = of == Of::kGradients;
  Room room;
  room.wide = round_up(elements * (of_gradients ? sizeof(float) : widest), kLine);
  if (of_gradients && may_share && narrowest < sizeof(float)) room.narrow = round_up(elements * 2, kLine);
  return room;
}

DeviceRanks::Room DeviceRanks::room_on_gpus(const Layout& layout, Of of) {
  const std::size_t elements = pace(layout, true).elements;
  const bool of_gradients = of == Of::kGradients;
  Room room;
  room.wide = round_up(elements * (of_gradients ? sizeof(float) : sizes_of_types(layout).first), kLine);
  if (of_gradients) room.squares = round_up(elements / kernels::kGridBlock * sizeof(double), kLine);
  return room;
}

DeviceRanks::DeviceRanks(const Layout& layout, Of of, Meeting meeting, DeviceWork& gpu, Threads& threads)
    : gpu_(gpu),
      threads_(threads),
      of_(of),
      meeting_(meeting),
      in_host_{pace(layout, false), room_in_host(layout, of, meeting.may_share)},
      on_gpus_places_{pace(layout, true), room_on_gpus(layout, of)},
      on_gpus_(layout.units().size()) {}

std::size_t DeviceRanks::bytes(const Layout& layout, Of of, Meeting meeting) {
  const std::size_t pieces = places(pace(layout, false)) * room_in_host(layout, of, meeting.may_share).all();
  const std::size_t squares = places(pace(layout, true)) * room_on_gpus(layout, of).squares;
  return round_up(pieces, kHugePage) + (meeting.on_gpus ? round_up(squares, kHugePage) : 0);
}

std::size_t DeviceRanks::device_bytes(const Layout& layout, Of of, Meeting meeting) {
  return meeting.on_gpus ? round_up(places(pace(layout, true)) * room_on_gpus(layout, of).all(), kHugePage)
                         : 0;
}

void DeviceRanks::start(allocator::Ledger& ledger, Ranks& ranks) {
  ranks_ = &ranks;
  const auto purpose = allocator::Purpose::kStaging;
  in_host_.memory =
      RankMemory(ledger, gpu_.device(), purpose, in_host_.bytes(), ranks.communicator().hosts().all_on_one());
  gpu_.add({in_host_.memory.data(), in_host_.bytes()}, in_host_.room.all());
  if (meeting_.on_gpus) {
    on_gpus_places_.memory = PeerMemory(ledger, gpu_.device(), purpose, on_gpus_places_.bytes());
    gpu_.add({on_gpus_places_.memory.data(), on_gpus_places_.bytes()}, on_gpus_places_.room.all());
  }
  if (const std::size_t each = on_gpus_places_.room.squares; meeting_.on_gpus && each > 0) {
    const std::size_t all = places(on_gpus_places_.pace) * each;
    squares_ = RegisteredRegion(ledger, gpu_.device(), purpose, all);
    gpu_.add({squares_.data(), all}, each);
  }
  out_.emplace();
  in_.emplace();
}

std::vector<bool> DeviceRanks::share(const std::string& name, const std::vector<bool>& in_host) {
  in_host_.memory.share(*ranks_, name, false);
  if (!meeting_.on_gpus) return on_gpus_;
  const std::string problem = on_gpus_places_.memory.share(ranks_->communicator(), name);
  if (!problem.empty()) fail(ErrorCode::kIo, "{}: {}", name, PeerMemory::refusal(problem));
  std::string own;
  for (const bool each : in_host) own += each ? '1' : '0';
  on_gpus_.assign(on_gpus_.size(), true);
  for (const std::string& told : ranks_->exchange(name, own, {})) {
    ensure(told.size() == on_gpus_.size(), "a rank tells of {} units, of which there are {}", told.size(),
           on_gpus_.size());
    for (UnitId unit = 0; unit < told.size(); ++unit) on_gpus_[unit] = on_gpus_[unit] && told[unit] == '0';
  }
  return on_gpus_;
}

DeviceRanks::~DeviceRanks() {
  out_.reset();
  in_.reset();
  gpu_.finish();  // it may still copy from the host memory
}

std::vector<ElementRange> DeviceRanks::pieces_of(ElementRange elements, std::size_t most) const {
  std::vector<ElementRange> pieces;
  for (std::size_t at = elements.begin; at < elements.end; at = pieces.back().end)
    pieces.push_back({at, std::min(elements.end, (at / most + 1) * most)});
  std::ranges::reverse(pieces);
  return pieces;
}

void DeviceRanks::add(Call call, Done done) {
  const bool on_gpus = is_on_gpus(call.unit);
  ensure(!on_gpus || !call.in_host, "a unit that is in the host's memory meets on GPUs");
  const std::size_t most = on_gpus ? on_gpus_places_.pace.elements : in_host_.pace.elements;
  const std::vector<ElementRange> pieces = pieces_of(call.elements, most);
  if (pieces.empty()) return done(nullptr);
  const auto added =
      std::make_shared<Added>(Added{std::move(call), std::move(done), on_gpus, pieces.size(), nullptr});
  std::size_t& number = on_gpus ? on_gpus_places_.added : in_host_.added;
  for (const ElementRange& elements : pieces) {
    const auto piece =
        std::make_shared<Piece>(Piece{added, elements, number++, std::make_shared<TransferGroup>()});
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
void DeviceRanks::for_each(const Piece& piece, const std::vector<ElementRange>& ranges, Array place,
                           const Copy& copy) const {
  const std::size_t size = size_of(place.type);
  for (const ElementRange& range : ranges) {
    const ElementRange both = intersection(range, piece.elements);
    if (both.size() > 0)
      copy(std::span(piece.of->call.data + both.begin * size, both.size() * size),
           std::span(static_cast<std::byte*>(place.at(both.begin - piece.elements.begin).data),
                     both.size() * size));
  }
}

// For a call in host memory: copies this rank's input to where other ranks read it.
void DeviceRanks::copy_to_place(const Piece& piece) {
  for_each(piece, piece.of->call.out, given_array(piece), [&](auto there, auto here) {
    threads_.parallel_for(here.size(), kCopied, [&](std::size_t begin, std::size_t end) {
      std::memcpy(here.data() + begin, there.data() + begin, end - begin);
    });
  });
}

std::vector<ConstArray> DeviceRanks::of_ranks(const Piece& piece) const {
  std::vector<ConstArray> arrays;
  if (!piece.of->on_gpus && !is_shared(piece)) return arrays;
  for (int rank = 0; rank < ranks_->size(); ++rank) {
    const Dtype type = (*piece.types)[static_cast<std::size_t>(rank)];
    if (piece.of->on_gpus)
      arrays.push_back({on_gpus_places_.memory.of(rank, begin_of_place(piece)), type});
    else if (rank == ranks_->rank())
      arrays.push_back(is_narrow(piece) ? given_array(piece) : array_of(piece));
    else
      arrays.push_back({in_host_.memory.of(rank, begin_of_place(piece)) +
                            (type == piece.of->call.type ? 0 : in_host_.room.wide),
                        type});
  }
  return arrays;
}

// Waits until the GPU uses the elements no more, neither as input nor as result.
void DeviceRanks::wait_for_record(const Piece& piece) {
  const Call& call = piece.of->call;
  for (const Dtype type : {call.given, call.type})
    gpu_.wait({call.data + piece.elements.begin * size_of(type), piece.elements.size() * size_of(type)},
              DeviceWork::Use::kWrite);
}

void DeviceRanks::meet(Piece& piece) {
  piece.types = ranks_->meet(piece.of->call.unit, of_ == Of::kGradients, piece.number, piece.of->call.given,
                             piece.ranks->add());
}

void DeviceRanks::leave(const std::shared_ptr<Piece>& piece) {
  {
    std::unique_lock lock(mutex_);
    has_room_.wait(lock, [&] { return under_way(*piece) < pace(*piece).pieces; });
    ++under_way(*piece);
  }
  attempt(*piece, [&] { piece->of->on_gpus ? leave_on_gpu(*piece) : leave_in_host(*piece); });
  in_->add([this, piece](Done&) { come_back(*piece); });
}

void DeviceRanks::leave_in_host(Piece& piece) {
  const Call& call = piece.of->call;
  ensure(is_shared(piece) || !is_narrow(piece), "ranks that share nothing would sum {} in place of {}",
         name_of(call.given), name_of(call.type));
  gpu_.wait(place(piece), DeviceWork::Use::kWrite);
  if (call.in_host)
    wait_for_record(piece);
  else
    for_each(piece, call.out, given_array(piece),
             [&](auto there, auto here) { gpu_.copy_out(here.data(), there); });
  gpu_.wait(place(piece), DeviceWork::Use::kRead);
  if (!is_shared(piece)) return call.begin(piece.elements, array_of(piece), piece.ranks->add());
  if (call.in_host) copy_to_place(piece);
  meet(piece);
}

// The place is free of readers: see places().
void DeviceRanks::leave_on_gpu(Piece& piece) {
  const DeviceWork::Memory to = place(piece);
  for_each(piece, piece.of->call.out, given_array(piece), [&](auto there, auto here) {
    const DeviceWork::Memory from = there;
    gpu_.queue(gpu_.ranks(), {&from, 1}, {&to, 1}, [&] {
      gpu_.device().copy(gpu_.ranks(), address_of(here.data()), address_of(there.data()), here.size());
    });
  });
  gpu_.wait(to, DeviceWork::Use::kRead);
  meet(piece);
}

void DeviceRanks::come_back(const Piece& piece) {
  attempt(piece, [&] {
    piece.ranks->wait();
    piece.of->on_gpus ? come_back_from_gpus(piece) : come_back_from_host(piece);
  });
  bool last = false;
  {
    const std::lock_guard lock(mutex_);
    --under_way(piece);
    last = --piece.of->pieces_left == 0;
  }
  has_room_.notify_all();
  if (last) piece.of->done(piece.of->error);
}

void DeviceRanks::come_back_from_host(const Piece& piece) {
  const Call& call = piece.of->call;
  if (call.end) call.end(piece.elements, array_of(piece), of_ranks(piece));
  for_each(piece, call.in, array_of(piece), [&](auto there, auto here) { gpu_.copy_in(there.data(), here); });
}

// Waits until the GPU has read the input of all ranks.
void DeviceRanks::come_back_from_gpus(const Piece& piece) {
  const Call& call = piece.of->call;
  const Room& room = on_gpus_places_.room;
  const DeviceWork::Memory here = place(piece);
  std::byte* const squares = begin_of_place(piece) + room.wide;
  std::vector<DeviceWork::Memory> written = {here};
  for_each(piece, call.in, array_of(piece), [&](auto there, auto) { written.push_back(there); });
  gpu_.queue(gpu_.ranks(), {}, written,
             [&] { call.make(piece.elements, of_ranks(piece), reinterpret_cast<double*>(squares)); });
  if (!call.made) return gpu_.wait(here, DeviceWork::Use::kRead);
  std::byte* const to = squares_.data() + piece.number % places(on_gpus_places_.pace) * room.squares;
  gpu_.copy_out(to, {squares, room.squares}, DeviceWork::Flow::kNumbers);
  gpu_.wait({to, room.squares}, DeviceWork::Use::kRead);
  call.made(piece.elements, {reinterpret_cast<const double*>(to), room.squares / sizeof(double)});
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

void take_of_others(const Ranks& ranks, UnitId unit, ElementRange elements, Array unit_data,
                    std::span<const ConstArray> of_ranks, DeviceWork& gpu) {
  for (std::size_t rank = 0; rank < of_ranks.size(); ++rank) {
    const ElementRange there = intersection(ranks.shard(unit, static_cast<int>(rank)), elements);
    if (static_cast<int>(rank) == ranks.rank() || there.size() == 0) continue;
    gpu.device().copy(
        gpu.ranks(), address_of(static_cast<const std::byte*>(unit_data.at(there.begin).data)),
        address_of(static_cast<const std::byte*>(of_ranks[rank].at(there.begin - elements.begin).data)),
        there.size() * size_of(unit_data.type));
  }
}

}  // namespace sluice::engine
