#pragma once
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "comm/call.h"
#include "comm/links.h"
#include "comm/packet.h"
#include "core/transfers.h"

namespace sluice::comm {

// How many packets go one way before the other way, and the next rank, have their turn.
inline constexpr int kPacketsAtOnce = 16;

// The transport's own time, which stands still while its process does not run.
using Time = std::chrono::nanoseconds;

// Bytes that were moved, as Transport::Counters. One thread writes them.
struct Traffic {
  std::atomic<std::uint64_t> sent{0}, received{0}, sent_besides{0}, received_besides{0}, from_hosts{0};
};

// What all peers of a transport share.
struct Wire {
  Links& links;
  Traffic& traffic;
  const Describe& describe;
  Time now{0};
};

// Bytes for the other rank: a message, or the answer to its read of that number.
struct Outgoing {
  std::uint64_t tag;
  Call call;
  std::span<const std::byte> from;
  Done done;
  bool is_answer = false;
  std::size_t moved = 0;
  Time since{0};
};
// Bytes from the other rank.
struct Incoming {
  std::uint64_t tag;
  Call call;
  std::span<std::byte> into;
  Done done;
  std::size_t moved = 0;
  Time since{0};
};

// A transport's end of its connection with one other rank: what waits, what is under way, and what is still
// to be said. Thread rule: the transport's thread, which also calls each `done`.
class Peer {
 public:
  Peer(Wire& wire, int rank, bool is_here);  // is_here: on this rank's host

  void send(Outgoing message);
  void receive(Incoming message);
  void read(Head request, Incoming answer);  // the request's tag is set here
  void say(Head head, std::string text = {});

  // Sends what there is room for, up to a number of packets: first what is to be said, then one message after
  // the other. Returns whether it sent any.
  bool push();
  // Handles a grant, data, an answer or a refusal, and returns false for other kinds. Throws Error(kState)
  // where the two ends of a message differ, Error(kCorrupt) where the packet cannot be.
  bool take(const Head& head, std::span<const std::byte> body);

  bool anything_to_say() const { return !control_.empty(); }
  bool anything_under_way() const { return !under_way_.empty() || waiting_since().has_value(); }
  // Since when the longest-waiting message or read waits for the other rank, and what it waits for, as in
  // "has not come to the sum of 'h.3'".
  std::optional<Time> waiting_since() const;
  std::string what_is_missing() const;
  // Since when this rank and the other one wait for each other in different exchanges, and this rank's one.
  std::optional<Time> apart_since() const;
  std::string own_exchange() const;
  // Forgets all messages and reads, and returns what is to be called for it.
  std::vector<Done> abandon();

  // What the transport knows of the other rank.
  bool begun = false;    // it has said hello
  bool left = false;     // in order; it can receive nothing any more
  bool garbled = false;  // what it sends makes no sense, and is not looked at any more
  Time heard{0}, spoken{0};
  std::uint64_t work = 0, told = 0;  // reports of work that came from it, and that it was told of

 private:
  struct Control {
    Head head;
    std::string text;
  };
  struct Grant {
    Call call;
    std::uint64_t bytes;
    Time since;
  };
  using Incomings = std::unordered_map<std::uint64_t, Incoming>;

  Time since(const Incoming& message) const;  // when anything was last heard of it
  void line_up(Outgoing message);
  void begin(Outgoing message, const Grant& grant);
  void granted(const Head& head);
  void arrived(Incomings& messages, const Head& head, std::span<const std::byte> body);
  void refused(const Head& head, std::span<const std::byte> body);
  bool push_control();
  bool push_data();

  Wire& wire_;
  const int rank_;
  const bool is_here_;
  const std::size_t most_data_;  // in a packet
  std::uint64_t next_read_ = 1;
  std::deque<Control> control_;
  std::unordered_map<std::uint64_t, Outgoing> ungranted_;
  std::unordered_map<std::uint64_t, Grant> grants_;  // of messages that were not begun here
  std::list<Outgoing> under_way_;                    // the first one has the next packet
  Incomings messages_, reads_;
  Time brought_{0};  // when bytes of messages or answers last came
};

}  // namespace sluice::comm
