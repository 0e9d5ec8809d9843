#include "comm/peer.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/bytes.h"
#include "core/error.h"

namespace sluice::comm {
namespace {

// Small enough that a packet is still in the caches when its reader copies it, and that short messages do not
// wait long behind it.
constexpr std::size_t kMostData = 64 * kKiB;

void count(std::atomic<std::uint64_t>& counter, std::size_t bytes) {
  counter.store(counter.load(std::memory_order_relaxed) + bytes, std::memory_order_relaxed);
}

bool is_of_exchange(const Call& call) { return call.kind == static_cast<std::uint8_t>(CallKind::kExchange); }

void refuse_second(std::uint64_t tag, const Done& done) {
  done(std::make_exception_ptr(
      Error(ErrorCode::kState, fmt::format("a message with the tag {:x} is under way already", tag))));
}

}  // namespace

Peer::Peer(Wire& wire, int rank, bool is_here)
    : wire_(wire),
      rank_(rank),
      is_here_(is_here),
      most_data_(std::min(kMostData, wire.links.packet_bytes() - sizeof(Head))) {
  say({.kind = PacketKind::kHello, .tag = kHelloMagic, .bytes = kPacketVersion});
}

void Peer::say(Head head, std::string text) {
  const bool is_of_another = head.kind == PacketKind::kFailure || head.kind == PacketKind::kRead;
  if (!is_of_another) head.rank = wire_.links.rank();
  text.resize(std::min(text.size(), wire_.links.packet_bytes() - sizeof(Head)));
  control_.push_back({head, std::move(text)});
}

void Peer::send(Outgoing message) {
  message.since = wire_.now;
  if (message.is_answer) {
    line_up(std::move(message));
  } else if (const auto grant = grants_.extract(message.tag); !grant.empty()) {
    begin(std::move(message), grant.mapped());
  } else if (ungranted_.contains(message.tag)) {
    refuse_second(message.tag, message.done);
  } else {
    ungranted_.emplace(message.tag, std::move(message));
  }
}

void Peer::receive(Incoming message) {
  message.since = wire_.now;
  if (messages_.contains(message.tag)) return refuse_second(message.tag, message.done);
  say({.kind = PacketKind::kGrant,
       .call_kind = message.call.kind,
       .call_type = message.call.type,
       .tag = message.tag,
       .bytes = message.into.size(),
       .words = {message.call.count, message.call.detail}});
  messages_.emplace(message.tag, std::move(message));
}

void Peer::read(Head request, Incoming answer) {
  answer.since = wire_.now;
  answer.tag = request.tag = next_read_++;
  say(request);
  reads_.emplace(answer.tag, std::move(answer));
}

void Peer::granted(const Head& head) {
  const Grant grant{{head.call_kind, head.call_type, head.words[0], head.words[1]}, head.bytes, wire_.now};
  if (auto waiting = ungranted_.extract(head.tag); !waiting.empty())
    begin(std::move(waiting.mapped()), grant);
  else if (!grants_.emplace(head.tag, grant).second)
    fail(ErrorCode::kCorrupt, "it asks twice for the message with the tag {:x}", head.tag);
}

// Messages of one packet go before longer ones. Longer ones are sent one after another, in the order in which
// they began: the earliest is needed first, and if they took turns, all of them would arrive only when the
// last one does.
void Peer::line_up(Outgoing message) {
  const auto is_short = [this](const Outgoing& other) { return other.from.size() <= most_data_; };
  const auto place =
      is_short(message) ? std::find_if_not(under_way_.begin(), under_way_.end(), is_short) : under_way_.end();
  under_way_.insert(place, std::move(message));
}

void Peer::begin(Outgoing message, const Grant& grant) {
  const std::uint64_t tag = message.tag, bytes = message.from.size();
  const Call call = message.call;
  line_up(std::move(message));
  if (call == grant.call && bytes == grant.bytes) return;
  const int own = wire_.links.rank();
  std::string text = fmt::format("rank {} began {}, and rank {} began {}", own, wire_.describe(tag, call),
                                 rank_, wire_.describe(tag, grant.call));
  if (bytes != grant.bytes)
    text +=
        fmt::format(": rank {} has {} bytes for rank {}, which expects {}", own, bytes, rank_, grant.bytes);
  throw Error(ErrorCode::kState, text + "; the calls of all ranks must be the same");
}

void Peer::arrived(Incomings& messages, const Head& head, std::span<const std::byte> body) {
  const auto found = messages.find(head.tag);
  if (found == messages.end())
    fail(ErrorCode::kCorrupt, "bytes of tag {:x} come, for which nothing was asked", head.tag);
  Incoming& message = found->second;
  const std::size_t missing = message.into.size() - message.moved;
  if (head.bytes != message.moved || body.size() > missing || (body.empty() && missing > 0))
    fail(ErrorCode::kCorrupt, "{} bytes come from offset {}, where {} bytes from offset {} are due",
         body.size(), head.bytes, missing, message.moved);
  if (!body.empty()) std::memcpy(message.into.data() + message.moved, body.data(), body.size());
  message.moved += body.size();
  brought_ = wire_.now;
  const bool is_besides = is_of_exchange(message.call);
  count(is_besides ? wire_.traffic.received_besides : wire_.traffic.received, body.size());
  if (!is_here_ && !is_besides) count(wire_.traffic.from_hosts, body.size());
  count(wire_.traffic.received_besides, sizeof(Head));
  if (message.moved < message.into.size()) return;
  const Done done = std::move(message.done);
  messages.erase(found);
  done(nullptr);
}

void Peer::refused(const Head& head, std::span<const std::byte> body) {
  auto read = reads_.extract(head.tag);
  if (read.empty() || head.code > static_cast<std::uint8_t>(ErrorCode::kInternal))
    fail(ErrorCode::kCorrupt, "an error answers read {}, which was not asked", head.tag);
  const std::string text(reinterpret_cast<const char*>(body.data()), body.size());
  read.mapped().done(std::make_exception_ptr(Error(static_cast<ErrorCode>(head.code), text)));
}

bool Peer::take(const Head& head, std::span<const std::byte> body) {
  switch (head.kind) {
    case PacketKind::kData:
      arrived(messages_, head, body);
      return true;
    case PacketKind::kAnswer:
      arrived(reads_, head, body);
      return true;
    default:
      count(wire_.traffic.received_besides, sizeof(Head) + body.size());
  }
  if (head.kind == PacketKind::kGrant) return granted(head), true;
  if (head.kind == PacketKind::kRefusal) return refused(head, body), true;
  return false;
}

bool Peer::push() {
  int packets = 0;
  while (packets < kPacketsAtOnce && !left && (control_.empty() ? push_data() : push_control())) ++packets;
  if (packets > 0) spoken = wire_.now;
  return packets > 0;
}

bool Peer::push_control() {
  const Control& next = control_.front();
  if (!wire_.links.send(rank_, next.head.as_bytes(), std::as_bytes(std::span(next.text)))) return false;
  count(wire_.traffic.sent_besides, sizeof(Head) + next.text.size());
  control_.pop_front();
  return true;
}

bool Peer::push_data() {
  if (under_way_.empty()) return false;
  Outgoing& next = under_way_.front();
  const auto body = next.from.subspan(next.moved, std::min(most_data_, next.from.size() - next.moved));
  const Head head{.kind = next.is_answer ? PacketKind::kAnswer : PacketKind::kData,
                  .rank = wire_.links.rank(),
                  .tag = next.tag,
                  .bytes = next.moved};
  if (!wire_.links.send(rank_, head.as_bytes(), body)) return false;
  count(is_of_exchange(next.call) ? wire_.traffic.sent_besides : wire_.traffic.sent, body.size());
  count(wire_.traffic.sent_besides, sizeof(Head));
  next.moved += body.size();
  if (next.moved < next.from.size()) return true;
  const Done done = std::move(next.done);
  under_way_.pop_front();
  done(nullptr);
  return true;
}

// The other rank may be sending earlier messages, which counts as progress.
Time Peer::since(const Incoming& message) const { return std::max(message.since, brought_); }

std::optional<Time> Peer::waiting_since() const {
  std::optional<Time> longest;
  const auto add = [&](Time time) { longest = longest ? std::min(*longest, time) : time; };
  for (const auto& [tag, message] : ungranted_) add(message.since);
  for (const auto& [tag, message] : messages_) add(since(message));
  for (const auto& [tag, message] : reads_) add(since(message));
  return longest;
}

std::string Peer::what_is_missing() const {
  const std::optional<Time> longest = waiting_since();
  for (const auto& [tag, message] : ungranted_)
    if (message.since == longest) return "has not come to " + wire_.describe(tag, message.call);
  for (const auto& [tag, message] : messages_)
    if (since(message) == longest) return "has not come to " + wire_.describe(tag, message.call);
  for (const auto& [tag, message] : reads_)
    if (since(message) == longest)
      return fmt::format("has not answered a read of {} bytes", message.into.size());
  return fmt::format("has not taken {} messages", under_way_.size());
}

std::optional<Peer::Apart> Peer::apart() const {
  const auto first_exchange = [](const auto& messages) {
    auto first = messages.end();
    for (auto at = messages.begin(); at != messages.end(); ++at)
      if (is_of_exchange(at->second.call) &&
          (first == messages.end() || at->second.since < first->second.since))
        first = at;
    return first;
  };
  // The other rank has asked for a message of its exchange, and for none of this rank's.
  const auto theirs = first_exchange(grants_);
  const auto own = first_exchange(ungranted_);
  if (theirs == grants_.end() || own == ungranted_.end()) return std::nullopt;
  return Apart{std::max(theirs->second.since, own->second.since),
               wire_.describe(own->first, own->second.call)};
}

std::vector<Done> Peer::abandon() {
  std::vector<Done> all;
  for (Outgoing& message : under_way_) all.push_back(std::move(message.done));
  for (auto& [tag, message] : ungranted_) all.push_back(std::move(message.done));
  for (Incomings* messages : {&messages_, &reads_})
    for (auto& [tag, message] : *messages) all.push_back(std::move(message.done));
  under_way_.clear();
  ungranted_.clear();
  grants_.clear();
  messages_.clear();
  reads_.clear();
  return all;
}

}  // namespace sluice::comm
