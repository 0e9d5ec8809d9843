#include "comm/collective.h"

#include <algorithm>
#include <utility>

#include "core/bytes.h"
#include "core/checksum.h"

namespace sluice::comm {
namespace {

enum Stage : std::uint8_t { kBegin, kReduce, kGather };

// How many blocks for one rank are offered at a time.
constexpr std::uint64_t kBlocksOffered = 16;

std::uint64_t mix(std::uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

std::uint64_t half_checksum(const std::vector<std::size_t>& numbers) {
  return checksum(std::as_bytes(std::span(numbers))) & 0xffffffff;
}

// The borders are in the lower half of the detail, and the order of sums in the upper one, which is zero
// where nothing but the usual order is meant.
Call call_of(const Task& task) {
  std::uint64_t detail = half_checksum(task.borders);
  const SumOrder& order = task.order;
  if (!order.arrays.empty() && order != order_of_ranks(static_cast<int>(order.arrays.size())))
    detail |= (half_checksum(order.merges) | 1) << 32;
  return {static_cast<std::uint8_t>(task.kind), static_cast<std::uint8_t>(task.element), task.borders.back(),
          task.kind == CallKind::kBroadcast ? static_cast<std::uint64_t>(task.root) : detail};
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

Collective::Collective(Transport& transport, Report report, Task task)
    : transport_(transport),
      report_(std::move(report)),
      task_(std::move(task)),
      call_(call_of(task_)),
      rank_(transport.rank()),
      ranks_(transport.size()),
      most_arrays_(is_sum() ? task_.order.most_arrays() : 1),
      block_bytes_(kBlockBytes / most_arrays_ / sizeof(double) * sizeof(double)),
      sent_(static_cast<std::size_t>(ranks_)) {}

bool Collective::knows(std::uint64_t tag) const {
  const auto is = [&](Stage stage, std::uint64_t index) {
    return tag_of(task_.id, task_.use, stage, index) == tag;
  };
  if (is(kBegin, 0) || is(kGather, 0)) return true;
  std::uint64_t most = 0;
  for (int rank = 0; rank < ranks_ && is_sum(); ++rank) most = std::max(most, blocks(rank));
  for (std::uint64_t index = 0; index < message(most, 0); ++index)
    if (is(kReduce, index)) return true;
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

Done Collective::reporting(Event::Kind kind, int peer, Slot* slot) {
  ++under_way_;
  return [this, kind, peer, slot](std::exception_ptr error) {
    report_({kind, this, peer, slot, std::move(error)});
  };
}

void Collective::send(int to, std::uint8_t stage, std::uint64_t index, std::span<const std::byte> from,
                      Done done) {
  transport_.send(to, tag_of(task_.id, task_.use, stage, index), call_, from, std::move(done));
}
void Collective::receive(int from, std::uint8_t stage, std::uint64_t index, std::span<std::byte> into,
                         Done done) {
  transport_.receive(from, tag_of(task_.id, task_.use, stage, index), call_, into, std::move(done));
}

void Collective::begin(Adder& adder) {
  for (int other = 0; other < ranks_; ++other) {
    if (other == rank_) continue;
    send(other, kBegin, 0, {}, reporting(Event::kOther));
    receive(other, kBegin, 0, {}, reporting(Event::kBegun, other));
  }
  if (task_.kind == CallKind::kBroadcast) return broadcast();
  for (std::uint64_t i = 0; is_sum() && ranks_ == 1 && i < blocks(0); ++i) add_up(i, nullptr, adder);
  if (is_sum()) return;
  receive_parts();
  send_own_part();
}

void Collective::broadcast() {
  const std::span<std::byte> bytes(task_.arrays[0], task_.borders.back());
  if (rank_ != task_.root) return receive(task_.root, kGather, 0, bytes, reporting(Event::kOther));
  for (int other = 0; other < ranks_; ++other)
    if (other != rank_) send(other, kGather, 0, bytes, reporting(Event::kOther));
}

void Collective::send_own_part() {
  for (int other = 0; other < ranks_; ++other)
    if (other != rank_ && !part(rank_).empty())
      send(other, kGather, 0, part(rank_), reporting(Event::kOther));
}
void Collective::receive_parts() {
  for (int other = 0; other < ranks_; ++other)
    if (other != rank_ && !part(other).empty())
      receive(other, kGather, 0, part(other), reporting(Event::kOther));
}

// A rank that waits for a third one is not late. So messages that it can begin only when all have begun are
// not waited for earlier.
void Collective::all_have_begun() {
  if (!is_sum()) return;
  for (int other = 0; other < ranks_; ++other)
    for (std::uint64_t i = 0; other != rank_ && i < kBlocksOffered; ++i) send_next_block(other);
  // What a rank gets of another one's part here, it gets after that rank has all that this one had there. So
  // what is to be sent from that place has left it.
  if (task_.kind == CallKind::kAllReduce) receive_parts();
}

void Collective::send_next_block(int to) {
  std::uint64_t& next = sent_[static_cast<std::size_t>(to)];
  const std::uint64_t index = next / task_.arrays.size();
  const std::size_t array = next % task_.arrays.size();
  if (index == blocks(to)) return;
  send(to, kReduce, message(index, array), block(to, index, array), reporting(Event::kBlockSent, to));
  ++next;
}

bool Collective::wants_slot() const {
  return is_sum() && error_ == nullptr && begun_ == ranks_ - 1 && next_block_ < blocks(rank_) && ranks_ > 1;
}

void Collective::use_slot(Slot& slot) {
  slot.block = next_block_++;
  slot.awaited = task_.order.merges.size() - task_.arrays.size();
  const std::size_t bytes = block(rank_, slot.block).size();
  std::byte* memory = slot.memory;
  for (int other = 0; other < ranks_; ++other) {
    const std::size_t arrays = other == rank_ ? 0 : task_.order.arrays[static_cast<std::size_t>(other)];
    for (std::size_t array = 0; array < arrays; ++array, memory += block_bytes_)
      receive(other, kReduce, message(slot.block, array), {memory, bytes},
              reporting(Event::kBlockCame, other, &slot));
  }
}

bool Collective::end(Event event, Adder& adder) {
  --under_way_;
  if (event.error != nullptr) abort(std::move(event.error));
  const bool slot_is_full = event.kind == Event::kBlockCame && --event.slot->awaited == 0;
  if (error_ != nullptr) return slot_is_full;
  if (event.kind == Event::kBegun && ++begun_ == ranks_ - 1) all_have_begun();
  if (event.kind == Event::kBlockSent) send_next_block(event.peer);
  if (slot_is_full) add_up(event.slot->block, event.slot->memory, adder);
  return slot_is_full;
}

// `others` has what the other ranks gave of that block.
void Collective::add_up(std::uint64_t index, const std::byte* others, Adder& adder) {
  const std::span<std::byte> own = block(rank_, index);
  std::vector<const std::byte*> arrays;
  for (int rank = 0; rank < ranks_; ++rank)
    for (std::size_t array = 0; array < task_.order.arrays[static_cast<std::size_t>(rank)]; ++array) {
      arrays.push_back(rank == rank_ ? block(rank_, index, array).data() : others);
      if (rank != rank_) others += block_bytes_;
    }
  adder.add(arrays, task_.order.merges, own.size() / size_of(task_.element), task_.element, own.data());
  if (++added_ == blocks(rank_) && task_.kind == CallKind::kAllReduce) send_own_part();
}

void Collective::abort(std::exception_ptr error) {
  if (error_ == nullptr) error_ = std::move(error);
}

bool Collective::has_ended() const {
  if (under_way_ > 0) return false;
  return error_ != nullptr || ranks_ == 1 || !is_sum() || added_ == blocks(rank_);
}

}  // namespace sluice::comm
