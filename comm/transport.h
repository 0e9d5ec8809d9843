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

// Times during which a rank's own process did not run do not count.
struct Deadlines {
  // A rank that has begun and gives no sign of life for so long has failed.
  std::chrono::milliseconds silence = std::chrono::seconds(30);
  // A message of which one end has not come for so long has failed, though its rank lives. Times in which
  // some rank reports work do not count.
  std::chrono::milliseconds patience = std::chrono::minutes(10);
  // A rank that has not begun so long after this one has failed. Nothing: it is waited for as one that lives.
  std::optional<std::chrono::milliseconds> start = {};
  // Two ranks that wait for each other in different exchanges have failed after so long. With one thread of a
  // rank in exchanges they would wait forever; with more, another thread may still come to the same one.
  std::chrono::milliseconds apart = std::chrono::seconds(5);

  // The same for ranks that one launcher has started together.
  Deadlines of_ranks_started_together() const;
};

// Messages between ranks, and reads that a rank serves. Any number may be under way. Each `done` is called on
// the transport's thread. Its error is Error(kIo) where a rank has failed, or has the code that the rank gave
// to fail(); Error(kCorrupt) where what it sent cannot be; and Error(kState) where the two ends of a message
// differ, or the call on this transport comes after its failure. Thread rule: any thread.
class Transport {
 public:
  // Throws Error(kInvalidArgument) where the links' packets are too short. Describe is called on the
  // transport's thread with the tags of messages under way.
  Transport(std::unique_ptr<Links> links, const Deadlines& deadlines, Describe describe, const Hosts& hosts);
  // What is under way ends with an error. What has ended without one arrives at the others. Waits at most a
  // second, where a rank has no room for what it is told last.
  ~Transport();
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;

  int rank() const;
  int size() const;

  // A message, from memory that does not change, or into memory that is not used, until `done`. Of one tag
  // there is one message at a time from a rank to another. REQUIRES: the other rank is not this one.
  void send(int to, std::uint64_t tag, const Call& call, std::span<const std::byte> from, Done done);
  void receive(int from, std::uint64_t tag, const Call& call, std::span<std::byte> into, Done done);

  // Answers reads of other ranks; those that came before wait for it. The server is called on the transport's
  // thread, must be short, and must not throw. It calls `answer` once, at once or later and from any thread,
  // with bytes that stay unchanged until `sent` is called, or with an error, which is the read's alone.
  // Another call replaces the server; with an empty one, reads wait for the next.
  void serve(Server server);
  // Reads bytes that another rank serves: its own, or those of `owner`.
  void read(int from, int owner, std::uint64_t key, std::uint64_t version, std::uint64_t offset,
            std::span<std::byte> into, Done done);

  // Says that this rank goes on with something that takes long and has no messages, so that others who wait
  // for it stay patient. It is called again and again, and costs little.
  void report_work();
  // Ends the work of all ranks with this error, which every other rank will name as this rank's, and which
  // has this code there.
  void fail(const std::string& error, ErrorCode code = ErrorCode::kIo);
  // Why the transport has failed: which rank failed first, and what it did. Empty: it has not.
  std::string failure() const;
  std::optional<int> failed_rank() const;  // whose failure it was

  struct Counters {
    std::uint64_t sent = 0, received = 0;                  // bytes of messages and reads
    std::uint64_t sent_besides = 0, received_besides = 0;  // all other bytes
    std::uint64_t received_from_hosts = 0;  // those of `received` that ranks of other hosts sent
  };
  Counters counters() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace sluice::comm
