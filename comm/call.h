#pragma once
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <span>
#include <string>

#include "core/transfers.h"

namespace sluice::comm {

enum class CallKind : std::uint8_t {
  kReduceScatter = 1,
  kAllGather,
  kAllReduce,
  kBroadcast,
  kExchange,  // blocks a thread of each rank
  kMessage,
};

// Identifies the call that a message belongs to. Sender and receiver must give equal values in every field.
struct Call {
  std::uint8_t kind = 0;     // a CallKind
  std::uint8_t type = 0;     // the type of the elements
  std::uint64_t count = 0;   // the number of elements in the whole call
  std::uint64_t detail = 0;  // anything else to agree on: a root, or a checksum of boundaries and order
  bool operator==(const Call&) const = default;
};

// Returns a call in words for error messages: "the sum of 'h.3' (f32, 100 elements)".
using Describe = std::function<std::string(std::uint64_t tag, const Call& call)>;

// A one-sided read of another rank's memory. Reader and server agree on what `key` and `version` mean; the
// transport only carries them.
struct Read {
  // `owner` is the rank whose bytes are wanted. It differs from the rank that is asked where that rank
  // relays.
  int reader = 0, owner = 0;
  std::uint64_t key = 0, version = 0, offset = 0, bytes = 0;
};
// Receives the bytes or an error in their place. The transport calls `sent` when it no longer uses the bytes.
using Answer = std::function<void(std::span<const std::byte> bytes, std::exception_ptr error, Done sent)>;
using Server = std::function<void(const Read& read, Answer answer)>;

}  // namespace sluice::comm
