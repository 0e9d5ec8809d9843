#include "comm/collective.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "core/bytes.h"
#include "core/checksum.h"

namespace sluice::comm {
namespace {

enum Stage : std::uint8_t { kBegin, kReduce, kGather, kMessages, kAsk };  // kMessages: the communicator's

// The most blocks that are offered to one rank at a time.
constexpr std::uint64_t kBlocksOffered = 16;

std::uint64_t mix(std::uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

template <class Number>
std::uint64_t half_checksum(const std::vector<Number>& numbers) {
  return checksum(std::as_bytes(std::span(numbers))) & 0xffffffff;
}

// The lower half of `detail` has a checksum of the borders, the upper half one of the order of sums, or zero
// for the default order.
Call call_of(const Task& task, const Group& group) {
  std::uint64_t detail = half_checksum(task.borders);
  const SumOrder& order = task.order;
  if (!order.from.empty() && order != order_of_ranks(order.ranks()))
    detail |= ((half_checksum(order.merges) ^ half_checksum(order.from)) | 1) << 32;
  return {static_cast<std::uint8_t>(task.kind), static_cast<std::uint8_t>(task.element), task.borders.back(),
          task.kind == CallKind::kBroadcast ? static_cast<std::uint64_t>(group.member(task.root)) : detail};
}

const char* words_of(std::uint8_t kind) {
  switch (static_cast<CallKind>(kind)) {
    case CallKind::kReduceScatter:
      return "the scattered sum of";
    case CallKind::kAllGather:
      return "the gather of";
    case CallKind::kAllReduce:
      return "the sum of";
    case CallKind::kBroadcast:
      return "the broadcast of";
    case CallKind::kExchange:
      return "the exchange of";
    case CallKind::kMessage:
      return "the message";
  }
  return "an unknown call for";
}

}  // namespace

std::uint64_t tag_of(std::uint64_t id, std::uint64_t use, std::uint8_t stage, std::uint64_t index) {
  return mix(mix(mix(id) + use) + (std::uint64_t{stage} << 56) + index);
}

std::string in_words(const std::string& name, const Call& call) {
  std::string words = fmt::format("{} '{}' ", words_of(call.kind), name);
  if (call.kind == static_cast<std::uint8_t>(CallKind::kMessage) ||
      call.kind == static_cast<std::uint8_t>(CallKind::kExchange))
    return words + fmt::format("({} bytes)", call.count);
  if (call.kind == static_cast<std::uint8_t>(CallKind::kBroadcast))
    return words + fmt::format("({} bytes from rank {})", call.count, call.detail);
  words += fmt::format("({}, {} elements", name_of(static_cast<Element>(call.type)), call.count);
  if (call.kind != static_cast<std::uint8_t>(CallKind::kAllReduce))
    words += fmt::format(", borders {:08x}", call.detail & 0xffffffff);
  const std::uint64_t order = call.detail >> 32;
  return words + (order == 0 ? ")" : fmt::format(", added in the order {:08x})", order));
}

Collective::Collective(Transport& transport, std::shared_ptr<const Group> group, Report report, Task task)
    : transport_(transport),
      group_(std::move(group)),
      report_(std::move(report)),
      task_(std::move(task)),
      call_(call_of(task_, *group_)),
      hosts_(group_->hosts()),
      rank_(group_->rank()),
      ranks_(group_->size()),
      gathers_by_host_(!hosts_.all_on_one() && task_.kind != CallKind::kExchange),
      // Hosts add only f32, since shorter types must be rounded once, after the whole sum.
      route_(is_sum() ? std::optional<SumRoute>(std::in_place, task_.order, hosts_,
                                                task_.element == element_of(Dtype::kF32), rank_)
                      : std::nullopt),
      block_bytes_(kBlockBytes / (is_sum() ? task_.order.most_arrays() : 1) / sizeof(double) *
                   sizeof(double)),
      sent_(static_cast<std::size_t>(ranks_)) {
  for (int owner = 0; owner < ranks_ && is_sum(); ++owner)
    if (route_->relays_for(owner)) to_relay_ += blocks(owner);
}

bool Collective::knows(std::uint64_t tag) const {
  const auto is = [&](Stage stage, std::uint64_t index) {
    return tag_of(task_.id, task_.use, stage, index) == tag;
  };
  if (is(kBegin, 0)) return true;
  for (int owner = 0; owner < ranks_; ++owner) {
    if (is(kGather, static_cast<std::uint64_t>(owner))) return true;
    const std::uint64_t end = is_sum() ? message(owner, blocks(owner), 0) : 0;
    for (std::uint64_t index = message(owner, 0, 0); index < end; ++index)
      if (is(kReduce, index) || is(kAsk, index)) return true;
  }
  return false;
}

std::span<std::byte> Collective::part(int rank, std::size_t array) const {
  const std::size_t size = size_of(task_.element), begin = task_.borders[static_cast<std::size_t>(rank)];
  const std::size_t end = task_.borders[static_cast<std::size_t>(rank) + 1];
  return {task_.arrays[array] + begin * size, (end - begin) * size};
}
std::span<std::byte> Collective::block(int rank, std::uint64_t index, std::size_t array) const {
  const auto all = part(rank, array);
  const std::size_t begin = index * block_bytes_;
  return all.subspan(begin, std::min(block_bytes_, all.size() - begin));
}
std::uint64_t Collective::blocks(int rank) const { return divide_up(part(rank).size(), block_bytes_); }

std::span<std::byte> Collective::whole(int rank) const {
  if (task_.kind != CallKind::kBroadcast) return part(rank);
  return {task_.arrays[0], rank == task_.root ? task_.borders.back() : 0};
}
std::uint64_t Collective::message(int owner, std::uint64_t block, std::size_t array) const {
  return (static_cast<std::uint64_t>(owner) << 40) + block * task_.order.merges.size() + array;
}

Done Collective::reporting(Event event) {
  ++under_way_;
  event.collective = this;
  return [this, event](std::exception_ptr error) {
    Event ended = event;
    ended.error = std::move(error);
    report_(std::move(ended));
  };
}

void Collective::send(int to, std::uint8_t stage, std::uint64_t index, std::span<const std::byte> from,
                      Done done) {
  transport_.send(group_->member(to), tag_of(task_.id, task_.use, stage, index), call_, from,
                  std::move(done));
}
void Collective::receive(int from, std::uint8_t stage, std::uint64_t index, std::span<std::byte> into,
                         Done done) {
  transport_.receive(group_->member(from), tag_of(task_.id, task_.use, stage, index), call_, into,
                     std::move(done));
}

void Collective::begin(Adder& adder) {
  for (int other = 0; other < ranks_; ++other) {
    if (other == rank_) continue;
    send(other, kBegin, 0, {}, reporting({.kind = Event::kOther}));
    receive(other, kBegin, 0, {}, reporting({.kind = Event::kBegun}));
  }
  if (!is_sum() && !gathers_by_host_) gather();
  if (is_sum() && ranks_ == 1) add_what_is_here(adder);
}

// Messages that depend on all ranks' having begun are not posted earlier: otherwise a rank that waits for a
// third one would seem late itself.
void Collective::all_have_begun(Adder& adder) {
  if (!is_sum()) {
    if (gathers_by_host_) gather();
    return;
  }
  for (int owner = 0; owner < ranks_; ++owner)
    for (std::uint64_t i = 0; owner != rank_ && i < kBlocksOffered; ++i)
      route_->relays_for(owner) ? await_next_ask(owner) : send_next_block(owner);
  // A part that arrives here overwrites this rank's summand of it. That is safe: the owner sends its part
  // only after it has received all of this rank's summands.
  if (task_.kind == CallKind::kAllReduce) receive_parts();
  add_what_is_here(adder);
}

// Blocks of the own part to which other ranks contribute nothing take no slot.
void Collective::add_what_is_here(Adder& adder) {
  for (std::uint64_t index = 0; index < blocks(rank_); ++index)
    if (is_here(index))
      add_up({.memory = nullptr, .use = SlotUse::kOwn, .owner = rank_, .block = index}, adder);
  pass_what_is_here();
}
void Collective::pass_what_is_here() {
  while (next_block_ < blocks(rank_) && is_here(next_block_)) ++next_block_;
}

void Collective::gather() {
  receive_parts();
  send_own_part();
}

int Collective::source(int owner) const {
  if (!gathers_by_host_ || hosts_.on_one(owner, rank_)) return owner;
  const int relay = hosts_.relay(rank_, owner);
  return relay == rank_ ? owner : relay;
}

void Collective::send_own_part() {
  if (whole(rank_).empty()) return;
  for (int other = 0; other < ranks_; ++other) {
    const bool comes_from_here =
        !gathers_by_host_ || hosts_.on_one(other, rank_) || hosts_.relay(other, rank_) == other;
    if (other != rank_ && comes_from_here)
      send(other, kGather, static_cast<std::uint64_t>(rank_), whole(rank_), reporting({}));
  }
}

// Forwards a part that has come from another host to the other ranks of this one.
void Collective::pass_on(int owner) {
  if (!gathers_by_host_ || source(owner) != owner || hosts_.on_one(owner, rank_)) return;
  for (const int other : hosts_.with(rank_))
    if (other != rank_) send(other, kGather, static_cast<std::uint64_t>(owner), whole(owner), reporting({}));
}

void Collective::receive_parts() {
  for (int owner = 0; owner < ranks_; ++owner)
    if (owner != rank_ && !whole(owner).empty())
      receive(source(owner), kGather, static_cast<std::uint64_t>(owner), whole(owner),
              reporting({.kind = Event::kPartCame, .owner = owner}));
}

void Collective::send_next_block(int owner) {
  std::uint64_t& next = sent_[static_cast<std::size_t>(owner)];
  while (next < blocks(owner) * task_.arrays.size()) {
    const std::uint64_t index = next / task_.arrays.size();
    const std::size_t array = next++ % task_.arrays.size();
    const std::span<std::byte> bytes = given_block(owner, index, array);
    if (bytes.empty()) continue;
    send(route_->to(owner), kReduce, message(owner, index, array), bytes,
         reporting({.kind = Event::kBlockSent, .owner = owner}));
    return;
  }
}

Run Collective::elements(int owner, std::uint64_t index) const {
  const std::size_t size = size_of(task_.element),
                    begin = task_.borders[static_cast<std::size_t>(owner)] + index * block_bytes_ / size;
  return {begin, begin + block(owner, index).size() / size};
}

// The runs of a block of the own part that a rank or a relay contributes.
std::vector<Run> Collective::runs_of(int from, std::uint64_t index) const {
  const Run all = elements(rank_, index);
  if (task_.given == nullptr || route_->relays_to_own(from)) return {{0, all.size()}};
  return task_.given->within(from, all);
}
std::size_t Collective::own_block_bytes(int from, std::uint64_t index) const {
  const Run all = elements(rank_, index);
  const bool is_whole = task_.given == nullptr || route_->relays_to_own(from);
  return (is_whole ? all.size() : task_.given->count(from, all)) * size_of(task_.element);
}

bool Collective::is_here(std::uint64_t index) const {
  return std::ranges::all_of(route_->own_inputs(), [&](const SumRoute::Input& input) {
    return input.from == rank_ || own_block_bytes(input.from, index) == 0;
  });
}

// The bytes that this rank sends for a block.
std::span<std::byte> Collective::given_block(int owner, std::uint64_t index, std::size_t array) const {
  const std::span<std::byte> all = block(owner, index, array);
  if (task_.given == nullptr) return all;
  if (route_->to(owner) != owner) {
    set_not_given(owner, index, array);
    return all;
  }
  const Run run = elements(owner, index);
  move_together(task_.given->within(rank_, run), size_of(task_.element), all.data());
  return all.first(task_.given->count(rank_, run) * size_of(task_.element));
}

// REQUIRES: the elements are f32, as in everything that is relayed.
void Collective::set_not_given(int owner, std::uint64_t index, std::size_t array) const {
  auto* const values = reinterpret_cast<float*>(block(owner, index, array).data());
  const Run all = elements(owner, index);
  std::size_t at = 0;
  for (const Run& run : task_.given->within(rank_, all)) {
    std::fill(values + at, values + run.begin, -0.0f);
    at = run.end;
  }
  std::fill(values + at, values + all.size(), -0.0f);
}

void Collective::await_next_ask(int owner) {
  std::uint64_t& next = sent_[static_cast<std::size_t>(owner)];
  if (next == blocks(owner)) return;
  receive(owner, kAsk, message(owner, next, 0), {},
          reporting({.kind = Event::kBlockAsked, .owner = owner, .block = next}));
  ++next;
}

bool Collective::wants_slot(SlotUse use) const {
  if (!is_sum() || error_ != nullptr) return false;
  if (use == SlotUse::kHost) return !asked_.empty();
  return begun_ == ranks_ - 1 && next_block_ < blocks(rank_) && ranks_ > 1;
}

std::span<const SumRoute::Input> Collective::inputs_of(const Slot& slot) const {
  return slot.use == SlotUse::kOwn ? route_->own_inputs() : route_->host_inputs();
}

// Returns the address of each input of the slot's block: this rank's own arrays in place, the other ranks' in
// the slot.
std::vector<std::byte*> Collective::arrays_of(const Slot& slot) const {
  std::vector<std::byte*> arrays;
  std::byte* memory = slot.memory;
  for (const SumRoute::Input& input : inputs_of(slot)) {
    arrays.push_back(input.from == rank_ ? block(slot.owner, slot.block, input.number).data() : memory);
    if (input.from != rank_ && memory != nullptr) memory += block_bytes_;
  }
  return arrays;
}

void Collective::use_slot(Slot& slot) {
  slot.owner = rank_;
  if (slot.use == SlotUse::kOwn) {
    slot.block = next_block_++;
    pass_what_is_here();
    for (const int relay : route_->relays())
      send(relay, kAsk, message(rank_, slot.block, 0), {}, reporting({}));
  } else {
    std::tie(slot.owner, slot.block) = asked_.front();
    asked_.pop_front();
  }
  slot.awaited = 0;
  const auto inputs = inputs_of(slot);
  const std::vector<std::byte*> arrays = arrays_of(slot);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].from == rank_) continue;
    const std::size_t bytes = slot.use == SlotUse::kOwn ? own_block_bytes(inputs[i].from, slot.block)
                                                        : block(slot.owner, slot.block).size();
    if (bytes == 0) continue;
    ++slot.awaited;
    receive(inputs[i].from, kReduce, message(slot.owner, slot.block, inputs[i].number), {arrays[i], bytes},
            reporting({.kind = Event::kBlockCame, .owner = slot.owner, .slot = &slot}));
  }
}

bool Collective::end(Event event, Adder& adder) {
  --under_way_;
  if (event.error != nullptr) abort(std::move(event.error));
  const bool slot_has_ended = event.slot != nullptr && --event.slot->awaited == 0;
  if (error_ != nullptr) return slot_has_ended;
  switch (event.kind) {
    case Event::kBegun:
      if (++begun_ == ranks_ - 1) all_have_begun(adder);
      break;
    case Event::kBlockSent:
      send_next_block(event.owner);
      break;
    case Event::kBlockAsked:
      asked_.emplace_back(event.owner, event.block);
      await_next_ask(event.owner);
      break;
    case Event::kPartCame:
      pass_on(event.owner);
      break;
    case Event::kBlockCame:
      return slot_has_ended && slot_is_full(*event.slot, adder);
    case Event::kSumSent:
      if (slot_has_ended) --to_relay_;
      break;
    case Event::kOther:
      break;
  }
  return slot_has_ended;
}

// Handles a slot into which all inputs have come. Returns whether the slot is free again.
bool Collective::slot_is_full(Slot& slot, Adder& adder) {
  if (slot.use == SlotUse::kHost) {
    send_sums(slot, adder);
    return false;
  }
  add_up(slot, adder);
  return true;
}

// A partial sum overwrites its first array if that is in the slot; this rank's own arrays must stay, so then
// it goes behind all arrays. There is room, since a slot also has space for the ranks of other hosts.
void Collective::send_sums(Slot& slot, Adder& adder) {
  const auto inputs = route_->host_inputs();
  for (std::size_t array = 0; task_.given != nullptr && array < task_.arrays.size(); ++array)
    set_not_given(slot.owner, slot.block, array);
  const std::vector<std::byte*> arrays = arrays_of(slot);
  const std::vector<const std::byte*> from(arrays.begin(), arrays.end());
  const std::size_t bytes = block(slot.owner, slot.block).size();
  std::byte* behind = slot.memory + (inputs.size() - task_.arrays.size()) * block_bytes_;
  const auto nodes = route_->nodes();
  slot.awaited = nodes.size();
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    const auto [first, last, merges] = nodes[i];
    std::byte* sum = arrays[first];
    if (last - first > 1) {
      if (inputs[first].from == rank_) sum = std::exchange(behind, behind + block_bytes_);
      adder.add(std::span(from).subspan(first, last - first),
                route_->host_merges().subspan(first, last - first), bytes / size_of(task_.element),
                task_.element, sum);
    }
    send(slot.owner, kReduce, message(slot.owner, slot.block, i), {sum, bytes},
         reporting({.kind = Event::kSumSent, .owner = slot.owner, .slot = &slot}));
  }
}

// Adds a block of the own part, of which all inputs have come.
void Collective::add_up(const Slot& slot, Adder& adder) {
  const std::size_t size = size_of(task_.element);
  const std::vector<std::byte*> arrays = arrays_of(slot);
  std::vector<RunsOfArray> all;
  for (std::size_t i = 0; i < arrays.size(); ++i) {
    const int from = route_->own_inputs()[i].from;
    all.push_back({arrays[i], runs_of(from, slot.block), from == rank_});
  }
  std::byte* const own = block(rank_, slot.block).data();
  for_each_run(all, size, [&](Run run, std::span<const std::byte* const> have) {
    adder.add(have, route_->own_merges(), run.size(), task_.element, own + run.begin * size);
  });
  if (++added_ == blocks(rank_) && task_.kind == CallKind::kAllReduce) send_own_part();
}

void Collective::abort(std::exception_ptr error) {
  if (error_ == nullptr) error_ = std::move(error);
}

bool Collective::has_ended() const {
  if (under_way_ > 0) return false;
  return error_ != nullptr || ranks_ == 1 || !is_sum() || (added_ == blocks(rank_) && to_relay_ == 0);
}

}  // namespace sluice::comm
