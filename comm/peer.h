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

// The most packets in one direction before the other direction, or the next rank, has its turn.
inline constexpr int kPacketsAtOnce = 16;

// The transport's clock, which stands still while this process does not run.
using Time = std::chrono::nanoseconds;

// Byte counters, see Transport::Counters. Only the transport's thread writes them.
struct Traffic {
  std::atomic<std::uint64_t> sent{0}, received{0}, sent_besides{0}, received_besides{0}, from_hosts{0};
};

// State that all peers of a transport share.
struct Wire {
  Links& links;
  Traffic& traffic;
  const Describe& describe;
  Time now{0};
};

// Bytes to the other rank: a message, or the answer to its read number `tag`.
struct Outgoing {
  std::uint64_t tag;
  Call call;
  std::span<const std::byte> from;
  Done done;
  bool is_answer = false;
  std::size_t moved = 0;
  Time since{0};
};
// Bytes expected from the other rank.
struct Incoming {
  std::uint64_t tag;
  Call call;
  std::span<std::byte> into;
  Done done;
  std::size_t moved = 0;
  Time since{0};
};

// A transport's connection with one other rank: messages that wait, messages in flight, and control packets
// to send. Thread rule: the transport's thread, which also calls each `done`.
class Peer {
 public:
  Peer(Wire& wire, int rank, bool is_here);  // is_here: on this rank's host

  void send(Outgoing message);
  void receive(Incoming message);
  void read(Head request, Incoming answer);  // sets the request's tag
  void say(Head head, std::string text = {});

  // Sends packets while there is room, up to a limit: first control packets, then messages one after another.
  // Returns whether it sent any.
  bool push();
  // Handles a grant, data, an answer or a refusal; returns false for other kinds. Throws Error(kState) where
  // the two ends of a message differ, and Error(kCorrupt) where the packet is invalid.
  bool take(const Head& head, std::span<const std::byte> body);

  bool anything_to_say() const { return !control_.empty(); }
  bool anything_under_way() const { return !under_way_.empty() || waiting_since().has_value(); }
  // Returns since when the longest-waiting message or read waits for the other rank, and what it waits for,
  // as in "has not come to the sum of 'h.3'".
  std::optional<Time> waiting_since() const;
  std::string what_is_missing() const;
  // This rank's exchange, in words, where this rank and the other one have waited for each other in different
  // exchanges since that time.
  struct Apart {
    Time since;
    std::string own;
  };
  std::optional<Apart> apart() const;
  // Forgets all messages and reads, and returns their callbacks for the caller to call.
  std::vector<Done> abandon();

  // The transport's knowledge of the other rank.
  bool begun = false;    // its hello has arrived
  bool left = false;     // in order; it can receive nothing any more
  bool garbled = false;  // it sent an invalid packet, so its packets are ignored
  Time heard{0}, spoken{0};
  std::uint64_t work = 0, told = 0;        // its reports of work that arrived here; those that it was told of
  std::string own_exchange, its_exchange;  // where the two ranks wait for each other, in words

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

  Time since(const Incoming& message) const;  // of the last progress of the message or an earlier one
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
  const std::size_t most_data_;  // payload bytes in a packet
  std::uint64_t next_read_ = 1;
  std::deque<Control> control_;
  std::unordered_map<std::uint64_t, Outgoing> ungranted_;
  std::unordered_map<std::uint64_t, Grant> grants_;  // for messages that have not been sent here yet
  std::list<Outgoing> under_way_;                    // the front message gets the next packet
  Incomings messages_, reads_;
  Time brought_{0};  // when payload bytes last arrived
};

}  // namespace sluice::comm
