#include "engine/memory/device_ranks.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/bytes.h"
#include "core/error.h"
#include "kernels/device_sum.h"
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

// With NCCL each rank's part of a sum has a line of its own.
DeviceRanks::Room DeviceRanks::room_on_gpus(const Layout& layout, Of of, bool by_nccl) {
  const std::size_t elements =
      pace(layout, true).elements + (by_nccl ? kernels::DeviceSum::kMostRanks * kernels::kGridBlock : 0);
  const bool of_gradients = of == Of::kGradients;
  Room room;
  room.wide = round_up(elements * (of_gradients ? sizeof(float) : sizes_of_types(layout).first), kLine);
  if (of_gradients) room.squares = round_up(elements / kernels::kGridBlock * sizeof(double), kLine);
  return room;
}

DeviceRanks::DeviceRanks(const Layout& layout, Of of, Meeting meeting, DeviceWork& gpu, Threads& threads,
                         ByNccl by_nccl)
    : gpu_(gpu),
      threads_(threads),
      of_(of),
      meeting_(meeting),
      by_nccl_(by_nccl),
      in_host_{pace(layout, false), room_in_host(layout, of, meeting.may_share)},
      on_gpus_places_{pace(layout, true), room_on_gpus(layout, of, meeting.by_nccl)},
      on_gpus_(layout.units().size()) {}

std::size_t DeviceRanks::bytes(const Layout& layout, Of of, Meeting meeting) {
  const std::size_t pieces = places(pace(layout, false)) * room_in_host(layout, of, meeting.may_share).all();
  const std::size_t squares = places(pace(layout, true)) * room_on_gpus(layout, of, meeting.by_nccl).squares;
  return round_up(pieces, kHugePage) + (meeting.on_gpus ? round_up(squares, kHugePage) : 0);
}

std::size_t DeviceRanks::device_bytes(const Layout& layout, Of of, Meeting meeting) {
  if (!meeting.on_gpus) return 0;
  return round_up(places(pace(layout, true)) * room_on_gpus(layout, of, meeting.by_nccl).all(), kHugePage);
}

void DeviceRanks::start(allocator::Ledger& ledger, Ranks& ranks) {
  ranks_ = &ranks;
  const auto purpose = allocator::Purpose::kStaging;
  in_host_.memory =
      RankMemory(ledger, gpu_.device(), purpose, in_host_.bytes(), ranks.communicator().hosts().all_on_one());
  gpu_.add({in_host_.memory.data(), in_host_.bytes()}, in_host_.room.all());
  if (meeting_.on_gpus) {
    on_gpus_places_.memory =
        PeerMemory(ledger, gpu_.device(), purpose, on_gpus_places_.bytes(), !meeting_.by_nccl);
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
  if (!meeting_.by_nccl)
    if (const std::string problem = on_gpus_places_.memory.share(ranks_->communicator(), name);
        !problem.empty())
      fail(ErrorCode::kIo, "{}: {}", name, PeerMemory::refusal(problem));
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

// A place has room for what each rank sends of this one's part of a stripe, also where shards are empty.
std::vector<Stripe> DeviceRanks::stripes(const Call& call, std::size_t most) const {
  if (!ranks_->partitioned(call.unit)) return stripes_of({&call.elements, 1}, most);
  const auto size = static_cast<std::size_t>(ranks_->size());
  std::vector<ElementRange> shards;
  for (int rank = 0; rank < ranks_->size(); ++rank)
    shards.push_back(intersection(ranks_->shard(call.unit, rank), call.elements));
  if (!meeting_.by_nccl) return stripes_of(shards, most);
  const auto any = std::ranges::count_if(shards, [](ElementRange shard) { return shard.size() > 0; });
  return stripes_of(shards, (most + size * kernels::kGridBlock) / size * static_cast<std::size_t>(any));
}

namespace {

// Each GPU begins with the part of the next rank, since all would wait for one GPU's link if they read from
// it at the same time.
void begin_behind(ElementRange own, std::vector<Stripe::Part>& parts) {
  const auto behind =
      std::ranges::find_if(parts, [&](const Stripe::Part& part) { return part.elements.begin >= own.end; });
  std::rotate(parts.begin(), behind, parts.end());
}

}  // namespace

void DeviceRanks::add(Call call, Done done) {
  const bool on_gpus = is_on_gpus(call.unit);
  ensure(!on_gpus || !call.in_host, "a unit that is in the host's memory meets on GPUs");
  const std::size_t most = on_gpus ? on_gpus_places_.pace.elements : in_host_.pace.elements;
  std::vector<Stripe> stripes = this->stripes(call, most);
  if (stripes.empty()) return done(nullptr);
  const ElementRange own = intersection(ranks_->own(call.unit), call.elements);
  const ElementRange shifted = overwriting(stripes, own, size_of(call.type) / size_of(call.given));
  const std::size_t shift = call.elements.end - own.end;
  const auto added = std::make_shared<Added>(
      Added{std::move(call), std::move(done), on_gpus, stripes.size(), shifted, shift, nullptr});
  std::size_t& number = on_gpus ? on_gpus_places_.added : in_host_.added;
  for (Stripe& stripe : stripes) {
    if (on_gpus) begin_behind(own, stripe.parts);
    const auto piece =
        std::make_shared<Piece>(Piece{added, std::move(stripe), number++, std::make_shared<TransferGroup>()});
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

namespace {

// Calls copy(elements) for the parts of the ranges that are among these elements.
template <class Copy>
void for_common(const std::vector<ElementRange>& ranges, ElementRange elements, const Copy& copy) {
  for (const ElementRange& range : ranges)
    if (const ElementRange both = intersection(range, elements); both.size() > 0) copy(both);
}

std::span<std::byte> memory_of(Array array, std::size_t elements) {
  return {static_cast<std::byte*>(array.data), elements * size_of(array.type)};
}

}  // namespace

template <class Copy>
void DeviceRanks::for_each_out(const Piece& piece, const Copy& copy) const {
  const Call& call = piece.of->call;
  for (const Stripe::Part& part : piece.stripe.parts)
    for_common(call.out, part.elements, [&](ElementRange both) {
      copy(memory_of(Array{call.data, call.given}.at(both.begin), both.size()),
           memory_of(given_array(piece, part).at(both.begin - part.elements.begin), both.size()));
    });
}

template <class Copy>
void DeviceRanks::for_each_in(const Piece& piece, const Copy& copy) const {
  for (const Stripe::Part& part : piece.stripe.parts)
    for_common(piece.of->call.in, part.elements, [&](ElementRange both) {
      copy(memory_of(results(*piece.of, both), both.size()),
           memory_of(array_of(piece, part).at(both.begin - part.elements.begin), both.size()));
    });
}

// For a call in host memory: copies this rank's input to where other ranks read it.
void DeviceRanks::copy_to_place(const Piece& piece) {
  for_each_out(piece, [&](auto there, auto here) {
    threads_.parallel_for(here.size(), kCopied, [&](std::size_t begin, std::size_t end) {
      std::memcpy(here.data() + begin, there.data() + begin, end - begin);
    });
  });
}

std::vector<ConstArray> DeviceRanks::of_ranks(const Piece& piece, const Stripe::Part& part) const {
  std::vector<ConstArray> arrays;
  if (!piece.of->on_gpus && !is_shared(piece)) return arrays;
  for (int rank = 0; rank < ranks_->size(); ++rank) {
    const Dtype type = (*piece.types)[static_cast<std::size_t>(rank)];
    const auto in_place = [&](const std::byte* place) {
      return ConstArray{place + part.at * size_of(type), type};
    };
    if (piece.of->on_gpus)
      arrays.push_back(in_place(on_gpus_places_.memory.of(rank, begin_of_place(piece))));
    else if (rank == ranks_->rank())
      arrays.push_back(is_narrow(piece) ? given_array(piece, part) : array_of(piece, part));
    else
      arrays.push_back(in_place(in_host_.memory.of(rank, begin_of_place(piece)) +
                                (type == piece.of->call.type ? 0 : in_host_.room.wide)));
  }
  return arrays;
}

// Waits until the GPU uses the elements no more, neither as input nor as result.
void DeviceRanks::wait_for_record(const Piece& piece) {
  const Call& call = piece.of->call;
  for (const Stripe::Part& part : piece.stripe.parts)
    for (const Array& array :
         {Array{call.data, call.given}.at(part.elements.begin), results(*piece.of, part.elements)})
      gpu_.wait(memory_of(array, part.elements.size()), DeviceWork::Use::kWrite);
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
    for_each_out(piece, [&](auto there, auto here) { gpu_.copy_out(here.data(), there); });
  gpu_.wait(place(piece), DeviceWork::Use::kRead);
  if (!is_shared(piece)) {
    for (const Stripe::Part& part : piece.stripe.parts)
      call.begin(part.elements, array_of(piece, part), piece.ranks->add());
    return;
  }
  if (call.in_host) copy_to_place(piece);
  meet(piece);
}

// The place is free of readers: see places().
void DeviceRanks::leave_on_gpu(Piece& piece) {
  if (meeting_.by_nccl) return meet(piece);
  const DeviceWork::Memory to = place(piece);
  for_each_out(piece, [&](auto there, auto here) {
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
  if (last) attempt(piece, [&] { shift_back(*piece.of); });
  if (last) piece.of->done(piece.of->error);
}

void DeviceRanks::come_back_from_host(const Piece& piece) {
  const Call& call = piece.of->call;
  for (const Stripe::Part& part : piece.stripe.parts)
    if (call.end) call.end(part.elements, array_of(piece, part), of_ranks(piece, part));
  for_each_in(piece, [&](auto there, auto here) { gpu_.copy_in(there.data(), here); });
}

// Waits until the GPU has read the input of all ranks, except where NCCL gathers.
void DeviceRanks::come_back_from_gpus(const Piece& piece) {
  const bool is_sum = static_cast<bool>(piece.of->call.made);
  if (meeting_.by_nccl)
    is_sum ? sum_by_nccl(piece) : gather_by_nccl(piece);
  else
    make_from_peers(piece);
  if (is_sum) return give_squares(piece);
  if (!meeting_.by_nccl) gpu_.wait(place(piece), DeviceWork::Use::kRead);
}

void DeviceRanks::make_from_peers(const Piece& piece) {
  const Call& call = piece.of->call;
  std::byte* const squares = begin_of_place(piece) + on_gpus_places_.room.wide;
  std::vector<DeviceWork::Memory> written = {place(piece)};
  for_each_in(piece, [&](auto there, auto) { written.push_back(there); });
  gpu_.queue(gpu_.ranks(), {}, written, [&] {
    for (const Stripe::Part& part : piece.stripe.parts)
      call.make(part.elements, results(*piece.of, part.elements), of_ranks(piece, part),
                reinterpret_cast<double*>(squares) + part.at / kernels::kGridBlock);
  });
}

std::vector<Stripe::Part> DeviceRanks::shares(const Piece& piece) const {
  std::vector<Stripe::Part> shares(static_cast<std::size_t>(ranks_->size()));
  const UnitId unit = piece.of->call.unit;
  if (ranks_->partitioned(unit)) {
    for (const Stripe::Part& part : piece.stripe.parts)
      shares[static_cast<std::size_t>(ranks_->owner(unit, part.elements.begin))] = part;
    return shares;
  }
  const Stripe::Part& all = piece.stripe.parts.front();
  for (std::size_t rank = 0; rank < shares.size(); ++rank) {
    const ElementRange share = share_of(all.elements.size(), rank, shares.size());
    shares[rank] = {{all.elements.begin + share.begin, all.elements.begin + share.end}, all.at + share.begin};
  }
  return shares;
}

void DeviceRanks::take_turn(const Piece& piece, const std::function<void()>& queue) {
  if (by_nccl_.turns == nullptr) return queue();
  by_nccl_.turns->take(2 * piece.number + (of_ == Of::kGradients ? 0 : 1), queue);
}

// Each rank adds what all have of its share. Where the unit is not partitioned, it then sends its results and
// their squares to the others.
void DeviceRanks::sum_by_nccl(const Piece& piece) {
  const Call& call = piece.of->call;
  const auto me = static_cast<std::size_t>(ranks_->rank());
  const std::vector<Stripe::Part> shares = this->shares(piece);
  const ElementRange own = shares[me].elements;
  std::byte* const place = begin_of_place(piece);
  auto* const squares = reinterpret_cast<double*>(place + on_gpus_places_.room.wide);
  const auto given = [&](const ElementRange& elements) {
    return memory_of(Array{call.data, call.given}.at(elements.begin), elements.size());
  };
  const auto result = [&](const ElementRange& elements) {
    return memory_of(results(*piece.of, elements), elements.size());
  };
  const auto squares_of = [&](const Stripe::Part& share) {
    return std::as_writable_bytes(std::span(squares + share.at / kernels::kGridBlock,
                                            divide_up(share.elements.size(), kernels::kGridBlock)));
  };
  std::vector<comm::Nccl::Message> sent, received, sent_results, received_results;
  std::vector<ConstArray> of_ranks;
  std::vector<DeviceWork::Memory> used = {this->place(piece)};
  const auto add = [](std::vector<comm::Nccl::Message>& to, std::size_t rank, std::span<std::byte> memory) {
    to.push_back({static_cast<int>(rank), address_of(memory.data()), memory.size()});
  };
  const std::size_t room = round_up(own.size() * sizeof(float), kLine);
  ensure(shares.size() * room <= on_gpus_places_.room.wide, "a part of {} elements is too large", own.size());
  for (std::size_t rank = 0; rank < shares.size(); ++rank) {
    const Dtype type = (*piece.types)[rank];
    of_ranks.push_back({place + rank * room, type});
    used.push_back(given(shares[rank].elements));
    used.push_back(result(shares[rank].elements));
    if (rank == me) continue;
    add(sent, rank, given(shares[rank].elements));
    add(received, rank, {place + rank * room, own.size() * size_of(type)});
    if (ranks_->partitioned(call.unit)) continue;
    add(sent_results, rank, result(own));
    add(sent_results, rank, squares_of(shares[me]));
    add(received_results, rank, result(shares[rank].elements));
    add(received_results, rank, squares_of(shares[rank]));
  }
  take_turn(piece, [&] {
    gpu_.queue(gpu_.ranks(), {}, used, [&] {
      if (own.size() > 0)
        gpu_.device().copy(gpu_.ranks(), address_of(place + me * room), address_of(given(own).data()),
                           given(own).size());
      by_nccl_.nccl->exchange(gpu_.ranks(), sent, received);
      if (own.size() > 0)
        call.make(own, results(*piece.of, own), of_ranks, squares + shares[me].at / kernels::kGridBlock);
      if (!sent_results.empty()) by_nccl_.nccl->exchange(gpu_.ranks(), sent_results, received_results);
    });
  });
}

void DeviceRanks::gather_by_nccl(const Piece& piece) {
  const auto me = static_cast<std::size_t>(ranks_->rank());
  const std::vector<Stripe::Part> shares = this->shares(piece);
  std::vector<comm::Nccl::Message> sent, received;
  std::vector<DeviceWork::Memory> used;
  for (std::size_t rank = 0; rank < shares.size(); ++rank) {
    const auto memory = [&](const ElementRange& elements) {
      used.push_back(memory_of(results(*piece.of, elements), elements.size()));
      return address_of(used.back().data());
    };
    const std::size_t size = size_of(piece.of->call.type);
    if (rank == me) continue;
    const ElementRange own = shares[me].elements, theirs = shares[rank].elements;
    sent.push_back({static_cast<int>(rank), memory(own), own.size() * size});
    received.push_back({static_cast<int>(rank), memory(theirs), theirs.size() * size});
  }
  take_turn(piece, [&] {
    gpu_.queue(gpu_.ranks(), {}, used, [&] { by_nccl_.nccl->exchange(gpu_.ranks(), sent, received); });
  });
}

void DeviceRanks::give_squares(const Piece& piece) {
  const Call& call = piece.of->call;
  const Room& room = on_gpus_places_.room;
  const std::byte* const squares = begin_of_place(piece) + room.wide;
  std::byte* const to = squares_.data() + piece.number % places(on_gpus_places_.pace) * room.squares;
  gpu_.copy_out(to, {squares, room.squares}, DeviceWork::Flow::kNumbers);
  gpu_.wait({to, room.squares}, DeviceWork::Use::kRead);
  if (by_nccl_.nccl != nullptr) by_nccl_.nccl->check();
  const std::span all(reinterpret_cast<const double*>(to), room.squares / sizeof(double));
  for (const Stripe::Part& part : piece.stripe.parts)
    call.made(part.elements, all.subspan(part.at / kernels::kGridBlock));
}

// A copy may not overlap with itself.
void DeviceRanks::shift_back(const Added& added) {
  if (added.shift == 0) return;
  const Call& call = added.call;
  for (std::size_t at = added.shifted.begin; at < added.shifted.end; at += added.shift) {
    const ElementRange some{at, std::min(at + added.shift, added.shifted.end)};
    const DeviceWork::Memory from = memory_of(results(added, some), some.size());
    std::byte* const to = call.data + at * size_of(call.type);
    if (!call.in_host) {
      gpu_.copy_within(to, from);
      continue;
    }
    gpu_.wait({to, from.size()}, DeviceWork::Use::kWrite);
    threads_.parallel_for(from.size(), kCopied, [&](std::size_t begin, std::size_t end) {
      std::memcpy(to + begin, from.data() + begin, end - begin);
    });
  }
}

void take_of_others(const Ranks& ranks, UnitId unit, ElementRange elements, Array array,
                    std::span<const ConstArray> of_ranks, Threads& threads) {
  if (of_ranks.empty()) return;
  const int owner = ranks.owner(unit, elements.begin);
  if (owner == ranks.rank()) return;
  const auto* const from = static_cast<const std::byte*>(of_ranks[static_cast<std::size_t>(owner)].data);
  auto* const to = static_cast<std::byte*>(array.data);
  threads.parallel_for(
      elements.size() * size_of(array.type), kCopied,
      [&](std::size_t begin, std::size_t end) { std::memcpy(to + begin, from + begin, end - begin); });
}

void take_of_others(const Ranks& ranks, UnitId unit, ElementRange elements, Array array,
                    std::span<const ConstArray> of_ranks, DeviceWork& gpu) {
  const int owner = ranks.owner(unit, elements.begin);
  if (owner == ranks.rank()) return;
  const void* const from = of_ranks[static_cast<std::size_t>(owner)].data;
  gpu.device().copy(gpu.ranks(), address_of(static_cast<const std::byte*>(array.data)),
                    address_of(static_cast<const std::byte*>(from)), elements.size() * size_of(array.type));
}

}  // namespace sluice::engine
