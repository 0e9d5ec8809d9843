#pragma once
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "comm/call.h"
#include "comm/hosts.h"
#include "comm/links.h"
#include "core/error.h"
#include "core/transfers.h"

namespace sluice::comm {

// Timeouts. Time during which a rank's own process does not run does not count.
struct Deadlines {
  // A rank that has begun and sends no packet for this long has failed.
  std::chrono::milliseconds silence = std::chrono::seconds(30);
  // A message has failed if one of its ends does not come for this long, although its rank lives. Time in
  // which some rank reports work does not count.
  std::chrono::milliseconds patience = std::chrono::minutes(10);
  // A rank that has not begun this long after this one has failed. Empty: ranks wait for it for `patience`,
  // as for one that lives.
  std::optional<std::chrono::milliseconds> start = {};
  // Two ranks that wait for each other in different exchanges have failed after this long. It is a deadlock
  // where each has one thread in exchanges; otherwise another thread may still enter the same exchange.
  std::chrono::milliseconds apart = std::chrono::seconds(5);
  // A rank that waits for another one for this long says so in its log, at most once a minute.
  std::chrono::milliseconds told = std::chrono::seconds(10);

  // Returns these deadlines with a `start` for ranks that one launcher has started together.
  Deadlines of_ranks_started_together() const;
};

// Messages between ranks, and reads of a rank's memory that it serves. Any number may be in flight. Each
// `done` is called on the transport's thread. Its error is Error(kIo) where a rank has failed, or the code
// that the rank passed to fail(); Error(kCorrupt) where a packet was invalid; and Error(kState) where the two
// ends of a message differ, or the call came after this transport had failed. Thread rule: any thread.
class Transport {
 public:
  // `describe` is called on the transport's thread with the tags of messages in flight. Throws
  // Error(kInvalidArgument) where the links' packets are too small.
  Transport(std::unique_ptr<Links> links, const Deadlines& deadlines, Describe describe, const Hosts& hosts);
  // Ends transfers in flight with an error; messages whose `done` got null still arrive. Waits at most one
  // second for ranks that have no room for the last packets.
  ~Transport();
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;

  int rank() const;
  int size() const;

  // Sends or receives a message. Until `done` is called, the sender's memory does not change and the
  // receiver's is not used. Between two ranks there is at most one message of a tag at a time. REQUIRES: the
  // other rank is not this one.
  void send(int to, std::uint64_t tag, const Call& call, std::span<const std::byte> from, Done done);
  void receive(int from, std::uint64_t tag, const Call& call, std::span<std::byte> into, Done done);

  // Sets the server that answers other ranks' reads; earlier reads wait for it. The server is called on the
  // transport's thread, must be short, and must not throw. It calls `answer` once, at once or later, from any
  // thread, with bytes that stay unchanged until `sent` is called, or with an error, which fails only that
  // read. A second call replaces the server; with an empty one, reads wait for the next.
  void serve(Server server);
  // Reads bytes that the rank `from` serves: its own, or those of `owner`.
  void read(int from, int owner, std::uint64_t key, std::uint64_t version, std::uint64_t offset,
            std::span<std::byte> into, Done done);

  // Tells the other ranks that this one is busy with long work that sends no messages, so that their
  // `patience` does not end. Cheap; to be called repeatedly during the work.
  void report_work();
  // Ends the work of all ranks with this error. Every other rank reports it, with this code, as the failure
  // of this rank.
  void fail(const std::string& error, ErrorCode code = ErrorCode::kIo);
  // Errors that say that the rank has failed have this text in parentheses from now on.
  void describe(int rank, const std::string& text);
  // Returns why the transport has failed: which rank failed first, and how. Empty: it has not.
  std::string failure() const;

  struct Counters {
    std::uint64_t sent = 0, received = 0;  // payload bytes of messages and reads
    // All other bytes: headers, control packets, and the messages of exchanges.
    std::uint64_t sent_besides = 0, received_besides = 0;
    std::uint64_t received_from_hosts = 0;  // the part of `received` that came from other hosts
  };
  Counters counters() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace sluice::comm
