#pragma once
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "comm/links.h"
#include "core/transfers.h"

namespace sluice::comm {

// What a message belongs to. Both ends must agree on all of it.
struct Call {
  std::uint8_t kind = 0;    // what the caller of the transport does with it
  std::uint8_t type = 0;    // of its elements
  std::uint64_t count = 0;  // of all elements of the call
  bool operator==(const Call&) const = default;
};

struct Deadlines {
  // A rank that gives no sign of life for so long has failed.
  std::chrono::milliseconds silence = std::chrono::seconds(30);
  // A message of which one end has not come for so long has failed, though its rank lives.
  std::chrono::milliseconds patience = std::chrono::minutes(10);
};

// Messages between ranks, and reads that a rank serves. Any number may be under way. Each `done` is called on
// the transport's thread. Its error is Error(kIo) where a rank has failed, and Error(kState) where the two
// ends of a message differ, or the call on this transport comes after its failure. Thread rule: any thread.
class Transport {
 public:
  // describe: a call in words, for messages ("the sum of 'h.3'", with its tag).
  using Describe = std::function<std::string(std::uint64_t tag, const Call& call)>;
  Transport(std::unique_ptr<Links> links, const Deadlines& deadlines, Describe describe);
  ~Transport();  // waits for nothing: what is under way ends with an error
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;

  int rank() const;
  int size() const;

  // A message, from memory that does not change, or into memory that is not used, until `done`. Of one tag
  // there is one message at a time from a rank to another. REQUIRES: the other rank is not this one.
  void send(int to, std::uint64_t tag, const Call& call, std::span<const std::byte> from, Done done);
  void receive(int from, std::uint64_t tag, const Call& call, std::span<std::byte> into, Done done);

  // Answers reads of other ranks. The server is called on the transport's thread, must be short, and must not
  // throw. It calls `answer` once, at once or later and from any thread, with bytes that stay unchanged until
  // `sent` is called, or with an error. Called once, before another rank reads.
  struct Read {
    int reader = 0;
    std::uint64_t key = 0, version = 0, offset = 0, bytes = 0;
  };
  using Answer = std::function<void(std::span<const std::byte> bytes, std::exception_ptr error, Done sent)>;
  void serve(std::function<void(const Read& read, Answer answer)> server);
  // Reads bytes that another rank serves.
  void read(int from, std::uint64_t key, std::uint64_t version, std::uint64_t offset,
            std::span<std::byte> into, Done done);

  // Ends the work of all ranks with this error, which every other rank will name as this rank's.
  void fail(const std::string& error);
  // Why the transport has failed: which rank failed first, and what it did. Empty: it has not.
  std::string failure() const;

  struct Counters {
    std::uint64_t sent = 0, received = 0;                  // bytes of messages and reads
    std::uint64_t sent_besides = 0, received_besides = 0;  // all other bytes
  };
  Counters counters() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace sluice::comm
