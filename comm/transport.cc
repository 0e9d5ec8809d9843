#include "comm/transport.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "comm/inbox.h"
#include "comm/packet.h"
#include "comm/peer.h"
#include "core/error.h"
#include "core/log.h"

namespace sluice::comm {
namespace {

using std::chrono::milliseconds;

// How long a leaving rank waits at most for another one that has no room for its last packets.
constexpr std::chrono::seconds kFarewell{1};
constexpr std::chrono::seconds kLeastStart{20};  // a busy machine takes a while to start a process
constexpr milliseconds kMostBetweenLooks{200};
constexpr std::chrono::minutes kBetweenTold{1};

std::exception_ptr error_of(ErrorCode code, const std::string& text) {
  return std::make_exception_ptr(Error(code, text));
}
void call_with(const Done& done, std::exception_ptr error) {
  if (done) done(std::move(error));
}

Answer answer_of(const std::shared_ptr<Inbox>& inbox, const Read& read, std::uint64_t number) {
  return [=](std::span<const std::byte> bytes, const std::exception_ptr& error, const Done& sent) {
    Order order{.kind = Order::kAnswer, .peer = read.reader, .tag = number, .from = bytes, .done = sent};
    if (error != nullptr || bytes.size() != read.bytes) {
      order.kind = Order::kRefusal;
      order.text = fmt::format("the server gave {} bytes for a read of {}", bytes.size(), read.bytes);
    }
    try {
      if (error != nullptr) std::rethrow_exception(error);
    } catch (const Error& thrown) {
      order.code = thrown.code();
      order.text = thrown.what();
    } catch (const std::exception& thrown) {
      order.text = thrown.what();
    } catch (...) {
      order.text = "an unknown error";
    }
    if (!inbox->post(std::move(order)))  // post() has left the order unchanged
      call_with(order.done,              // NOLINT(bugprone-use-after-move)
                error_of(ErrorCode::kState, "the transport has ended"));
  };
}

}  // namespace

Deadlines Deadlines::of_ranks_started_together() const {
  Deadlines all = *this;
  all.start = std::max<std::chrono::milliseconds>(silence, kLeastStart);
  return all;
}

struct Transport::State {
  State(std::unique_ptr<Links> the_links, const Deadlines& the_deadlines, Describe the_describe,
        const Hosts& hosts);
  ~State();

  void run();
  void take_orders();
  void obey(Order& order);
  std::exception_ptr error_of_end() const;
  bool pull(int rank);
  void take(int rank, std::span<const std::byte> packet);
  void take_hello(Peer& peer, const Head& head);
  void take_failure(const Head& head, std::span<const std::byte> body);
  void answer(const Read& read, std::uint64_t number);
  bool pass();
  void see_who_is_gone(int rank);
  void check_left(int rank);
  void look();
  void find_late();
  void tell_of_late(int rank, Time since);
  void fail(int rank, ErrorCode code, std::string text);
  void end_all(const std::function<std::exception_ptr()>& error);
  void say_farewell();
  template <class Step>
  auto guarded(int rank, Step&& step);

  const std::unique_ptr<Links> links;
  const Deadlines deadlines;
  const Describe describe;
  const std::shared_ptr<Inbox> inbox;
  Traffic traffic;
  std::atomic<std::uint64_t> work{0};  // how often this rank has reported work

  // Only for the transport's thread.
  Wire wire;
  Time last_work{0};                         // when the last report of another rank came
  std::vector<std::unique_ptr<Peer>> peers;  // by rank; null for this one
  std::vector<std::function<void(std::span<const std::byte>)>> takers;
  std::vector<Order> orders;
  Server server;
  std::vector<std::pair<Read, std::uint64_t>> unserved;  // reads that came before there was a server
  bool failed = false;
  std::string told;  // of a late rank, at that time
  Time told_at{0};
  milliseconds between_looks;
  Links::Clock::time_point last_look;

  std::thread thread;  // started last
};

Transport::State::State(std::unique_ptr<Links> the_links, const Deadlines& the_deadlines,
                        Describe the_describe, const Hosts& hosts)
    : links(std::move(the_links)),
      deadlines(the_deadlines),
      describe(std::move(the_describe)),
      inbox(std::make_shared<Inbox>(*links)),
      wire{*links, traffic, describe},
      between_looks(std::clamp(std::min({deadlines.silence, deadlines.patience, deadlines.apart}) / 8,
                               milliseconds(1), kMostBetweenLooks)),
      last_look(Links::Clock::now()) {
  if (links->packet_bytes() < kLeastPacket)
    sluice::fail(ErrorCode::kInvalidArgument,
                 "the links have packets of {} bytes; a transport takes {} or more", links->packet_bytes(),
                 kLeastPacket);
  for (int rank = 0; rank < links->size(); ++rank) {
    peers.push_back(rank == links->rank()
                        ? nullptr
                        : std::make_unique<Peer>(wire, rank, hosts.on_one(rank, links->rank())));
    takers.push_back([this, rank](std::span<const std::byte> packet) { take(rank, packet); });
  }
  thread = std::thread([this] { run(); });
}

Transport::State::~State() {
  inbox->stop();
  thread.join();
}

// Runs a step that concerns another rank. An exception counts as that rank's failure.
template <class Step>
auto Transport::State::guarded(int rank, Step&& step) {
  using Result = decltype(step());
  try {
    return step();
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kCorrupt) {
      peers[static_cast<std::size_t>(rank)]->garbled = true;
      fail(rank, error.code(), fmt::format("{} sent what cannot be: {}", inbox->name_of(rank), error.what()));
    } else {
      fail(rank, error.code(), error.what());
    }
  } catch (const std::exception& error) {
    fail(links->rank(), ErrorCode::kInternal,
         fmt::format("{} has failed: {}", inbox->name_of(links->rank()), error.what()));
  }
  return Result();
}

void Transport::State::run() {
  while (!inbox->stopping()) {
    take_orders();
    if (pass()) continue;
    links->wait(std::max(last_look + between_looks, Links::Clock::now()));
  }
  take_orders();  // one of them may be a failure
  end_all([this] { return error_of_end(); });
  say_farewell();
  inbox->close();
  take_orders();  // those that came in between
}

// Moves packets in both directions. Returns whether any moved.
bool Transport::State::pass() {
  if (Links::Clock::now() >= last_look + between_looks) look();
  bool moved = false;
  for (int rank = 0; rank < links->size(); ++rank) {
    if (rank == links->rank()) continue;
    Peer& peer = *peers[static_cast<std::size_t>(rank)];
    const bool pulled = pull(rank);
    const bool pushed = guarded(rank, [&] { return peer.push(); });
    if (!pulled && !pushed) guarded(rank, [&] { see_who_is_gone(rank); });
    moved |= pulled || pushed;
  }
  return moved;
}

bool Transport::State::pull(int rank) {
  const Peer& peer = *peers[static_cast<std::size_t>(rank)];
  int packets = 0;
  while (packets < kPacketsAtOnce && !peer.garbled &&
         guarded(rank, [&] { return links->receive(rank, takers[static_cast<std::size_t>(rank)]); }))
    ++packets;
  return packets > 0;
}

void Transport::State::take(int rank, std::span<const std::byte> packet) {
  Peer& peer = *peers[static_cast<std::size_t>(rank)];
  Head head;
  if (packet.size() < sizeof(head))
    sluice::fail(ErrorCode::kCorrupt, "a packet of {} bytes has no head", packet.size());
  std::memcpy(&head, packet.data(), sizeof(head));
  const auto body = packet.subspan(sizeof(head));
  peer.heard = wire.now;
  if (!peer.begun) take_hello(peer, head);
  if (failed) return;
  if (peer.take(head, body)) return;
  switch (head.kind) {
    case PacketKind::kHello:
      return;
    case PacketKind::kAlive:
      if (!body.empty()) peer.its_exchange = {reinterpret_cast<const char*>(body.data()), body.size()};
      if (std::exchange(peer.work, head.tag) != head.tag) last_work = wire.now;
      return;
    case PacketKind::kRead:
      return answer({rank, head.rank, head.words[0], head.words[1], head.words[2], head.bytes}, head.tag);
    case PacketKind::kFailure:
      return take_failure(head, body);
    case PacketKind::kGoodbye:
      peer.left = true;
      return check_left(rank);
    default:
      sluice::fail(ErrorCode::kCorrupt, "a packet is of kind {}", static_cast<int>(head.kind));
  }
}

void Transport::State::take_hello(Peer& peer, const Head& head) {
  if (head.kind != PacketKind::kHello || head.tag != kHelloMagic)
    sluice::fail(ErrorCode::kCorrupt, "its first packet is no greeting");
  if (head.bytes != kPacketVersion)
    sluice::fail(
        ErrorCode::kCorrupt,
        "its packets are of version {}, and this rank's of version {}: all ranks must run the same program",
        head.bytes, kPacketVersion);
  peer.begun = true;
}

void Transport::State::take_failure(const Head& head, std::span<const std::byte> body) {
  if (head.code > static_cast<std::uint8_t>(ErrorCode::kInternal))
    sluice::fail(ErrorCode::kCorrupt, "a failure has the code {}", head.code);
  fail(head.rank, static_cast<ErrorCode>(head.code),
       {reinterpret_cast<const char*>(body.data()), body.size()});
}

void Transport::State::answer(const Read& read, std::uint64_t number) {
  if (server)
    server(read, answer_of(inbox, read, number));
  else
    unserved.emplace_back(read, number);
}

std::exception_ptr Transport::State::error_of_end() const {
  if (const auto failure = inbox->failure()) return error_of(failure->code, failure->text);
  return error_of(ErrorCode::kState, fmt::format("rank {} has ended its part in this", links->rank()));
}

void Transport::State::take_orders() {
  inbox->take(orders);
  for (Order& order : orders) obey(order);
  orders.clear();
}

void Transport::State::obey(Order& order) {
  if (order.kind == Order::kServe) {
    server = std::move(order.server);
    for (const auto& [read, number] : std::exchange(unserved, {})) answer(read, number);
    return;
  }
  if (order.kind == Order::kFail) return fail(links->rank(), order.code, std::move(order.text));
  if (failed || inbox->stopping()) return call_with(order.done, error_of_end());
  Peer& peer = *peers[static_cast<std::size_t>(order.peer)];
  guarded(order.peer, [&] {
    switch (order.kind) {
      case Order::kSend:
        return peer.send({order.tag, order.call, order.from, std::move(order.done)});
      case Order::kAnswer:
        return peer.send({order.tag, {}, order.from, std::move(order.done), true});
      case Order::kReceive:
        return peer.receive({order.tag, order.call, order.into, std::move(order.done)});
      case Order::kRead:
        return peer.read(order.request, {0, {}, order.into, std::move(order.done)});
      default:
        break;
    }
    peer.say({.kind = PacketKind::kRefusal, .code = static_cast<std::uint8_t>(order.code), .tag = order.tag},
             std::move(order.text));
    call_with(order.done, nullptr);
  });
  if (peer.left) check_left(order.peer);
}

void Transport::State::see_who_is_gone(int rank) {
  Peer& peer = *peers[static_cast<std::size_t>(rank)];
  if (failed || peer.left) return;
  const std::optional<Links::Gone> gone = links->gone(rank);
  if (!gone) return;
  while (pull(rank)) {  // all that it has sent
  }
  if (failed || peer.left) return;
  if (!gone->in_order)
    return fail(rank, ErrorCode::kIo, fmt::format("{} is gone: {}", inbox->name_of(rank), gone->how));
  peer.left = true;
  check_left(rank);
}

void Transport::State::check_left(int rank) {
  const Peer& peer = *peers[static_cast<std::size_t>(rank)];
  if (failed || !peer.anything_under_way()) return;
  fail(rank, ErrorCode::kIo,
       fmt::format("{} has left, and {}", inbox->name_of(rank), peer.what_is_missing()));
}

// Advances the clock, sends heartbeats, and finds ranks that are late.
void Transport::State::look() {
  const auto now = Links::Clock::now();
  // The clock advances by little for time in which this process did not run: others may have sent heartbeats
  // that it could not receive.
  wire.now += std::min<Time>(now - last_look, 2 * between_looks);
  last_look = now;
  if (failed) return;
  const std::uint64_t reports = work.load(std::memory_order_relaxed);
  for (const auto& peer : peers) {
    if (peer == nullptr || peer->anything_to_say()) continue;
    const bool is_silent = wire.now - peer->spoken >= deadlines.silence / 4;
    if (std::exchange(peer->told, reports) != reports || is_silent)
      peer->say({.kind = PacketKind::kAlive, .tag = reports});
  }
  find_late();
}

void Transport::State::find_late() {
  std::optional<int> late;  // the one that this rank waits for longest
  Time since = wire.now;
  for (int rank = 0; rank < links->size(); ++rank) {
    Peer* const peer = peers[static_cast<std::size_t>(rank)].get();
    if (peer == nullptr || peer->left) continue;
    if (peer->begun && wire.now - peer->heard > deadlines.silence)
      return fail(rank, ErrorCode::kIo,
                  fmt::format("{} has given no sign of life for {:.3g} s", inbox->name_of(rank),
                              std::chrono::duration<double>(deadlines.silence).count()));
    if (!peer->begun && deadlines.start && wire.now > *deadlines.start)
      return fail(rank, ErrorCode::kIo,
                  fmt::format("{} has given no sign of life since the start, for {:.3g} s",
                              inbox->name_of(rank), std::chrono::duration<double>(*deadlines.start).count()));
    const auto apart = peer->apart();
    const std::string own = apart ? apart->own : std::string();
    if (std::exchange(peer->own_exchange, own) != own && apart)
      peer->say({.kind = PacketKind::kAlive, .tag = work.load(std::memory_order_relaxed)}, own);
    if (apart && wire.now - apart->since > deadlines.apart)
      return fail(
          rank, ErrorCode::kState,
          fmt::format(
              "{} is in {}, and {} in {}, so that each waits for the other: all ranks make the same "
              "calls in the same order, as to step, to use gradients, to save a checkpoint, or to close",
              inbox->name_of(links->rank()), own, inbox->name_of(rank),
              peer->its_exchange.empty() ? "another exchange" : peer->its_exchange));
    const std::optional<Time> waiting = peer->waiting_since();
    if (!waiting || std::max(*waiting, last_work) >= since) continue;
    since = std::max(*waiting, last_work);
    late = rank;
  }
  if (late && wire.now - since > deadlines.patience)
    fail(*late, ErrorCode::kIo,
         fmt::format("{} {} for {:.3g} s", inbox->name_of(*late),
                     peers[static_cast<std::size_t>(*late)]->what_is_missing(),
                     std::chrono::duration<double>(deadlines.patience).count()));
  else if (late && wire.now - since > deadlines.told)
    tell_of_late(*late, since);
}

// Otherwise a script in which one rank makes a call of all ranks would say nothing until patience ends.
void Transport::State::tell_of_late(int rank, Time since) {
  std::string text =
      fmt::format("{} {}", inbox->name_of(rank), peers[static_cast<std::size_t>(rank)]->what_is_missing());
  if (text == told || (!told.empty() && wire.now - told_at < kBetweenTold)) return;
  const auto seconds = [](auto time) { return std::chrono::duration<double>(time).count(); };
  log().info("{} for {:.3g} s; this one waits for it, {:.3g} s at most", text, seconds(wire.now - since),
             seconds(deadlines.patience));
  told = std::move(text);
  told_at = wire.now;
}

// Ends all transfers, and tells all ranks. They tell each other, too, since this rank may end before it has
// told all.
void Transport::State::fail(int rank, ErrorCode code, std::string text) {
  if (failed) return;
  const Failure first = inbox->fail({rank, code, std::move(text)});
  failed = true;
  links->work_has_failed();
  end_all([&] { return error_of(first.code, first.text); });
  for (const auto& peer : peers)
    if (peer != nullptr)
      peer->say(
          {.kind = PacketKind::kFailure, .code = static_cast<std::uint8_t>(first.code), .rank = first.rank},
          first.text);
}

void Transport::State::end_all(const std::function<std::exception_ptr()>& error) {
  std::vector<Done> all;
  for (const auto& peer : peers)
    if (peer != nullptr)
      for (Done& done : peer->abandon()) all.push_back(std::move(done));
  unserved.clear();
  // Each callback gets an exception of its own, since exceptions may be inspected on several threads.
  for (const Done& done : all) call_with(done, error());
}

// Says goodbye, and waits until all packets have been sent, as long as other ranks may wait for room here.
void Transport::State::say_farewell() {
  failed = true;  // later requests are refused
  for (const auto& peer : peers)
    if (peer != nullptr) peer->say({.kind = PacketKind::kGoodbye});
  const auto until = Links::Clock::now() + kFarewell;
  for (;;) {
    bool waits = false;
    for (int rank = 0; rank < links->size(); ++rank) {
      Peer* const peer = peers[static_cast<std::size_t>(rank)].get();
      if (peer == nullptr || peer->left || peer->garbled) continue;
      pull(rank);
      guarded(rank, [&] { return peer->push(); });
      waits |= peer->anything_to_say() && !guarded(rank, [&] { return links->gone(rank).has_value(); });
    }
    const auto now = Links::Clock::now();
    if (!waits || now >= until) return;
    links->wait(std::min(until, now + milliseconds(10)));
  }
}

Transport::Transport(std::unique_ptr<Links> links, const Deadlines& deadlines, Describe describe,
                     const Hosts& hosts)
    : state_(std::make_unique<State>(std::move(links), deadlines, std::move(describe), hosts)) {}
Transport::~Transport() = default;

int Transport::rank() const { return state_->links->rank(); }
int Transport::size() const { return state_->links->size(); }

void Transport::send(int to, std::uint64_t tag, const Call& call, std::span<const std::byte> from,
                     Done done) {
  state_->inbox->post(
      {.kind = Order::kSend, .peer = to, .tag = tag, .call = call, .from = from, .done = std::move(done)});
}

void Transport::receive(int from, std::uint64_t tag, const Call& call, std::span<std::byte> into, Done done) {
  state_->inbox->post({.kind = Order::kReceive,
                       .peer = from,
                       .tag = tag,
                       .call = call,
                       .into = into,
                       .done = std::move(done)});
}

void Transport::serve(Server server) {
  state_->inbox->post({.kind = Order::kServe, .server = std::move(server)});
}

void Transport::read(int from, int owner, std::uint64_t key, std::uint64_t version, std::uint64_t offset,
                     std::span<std::byte> into, Done done) {
  const Head request{
      .kind = PacketKind::kRead, .rank = owner, .bytes = into.size(), .words = {key, version, offset}};
  state_->inbox->post(
      {.kind = Order::kRead, .peer = from, .into = into, .request = request, .done = std::move(done)});
}

void Transport::report_work() { state_->work.fetch_add(1, std::memory_order_relaxed); }

void Transport::fail(const std::string& error, ErrorCode code) {
  const int own = rank();
  const std::string text = fmt::format("{} has failed: {}", state_->inbox->name_of(own), error);
  state_->inbox->fail({own, code, text});
  state_->inbox->post({.kind = Order::kFail, .code = code, .text = text});
}

void Transport::describe(int rank, const std::string& text) { state_->inbox->describe(rank, text); }

std::string Transport::failure() const {
  const auto failure = state_->inbox->failure();
  return failure ? failure->text : std::string();
}

Transport::Counters Transport::counters() const {
  const Traffic& traffic = state_->traffic;
  return {traffic.sent, traffic.received, traffic.sent_besides, traffic.received_besides, traffic.from_hosts};
}

}  // namespace sluice::comm
