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
  kExchange,  // a thread of each rank waits for it
  kMessage,
};

// What a message belongs to. Both ends must agree on all of it.
struct Call {
  std::uint8_t kind = 0;     // as CallKind
  std::uint8_t type = 0;     // of its elements
  std::uint64_t count = 0;   // of all elements of the call
  std::uint64_t detail = 0;  // what else must agree: a root, or checksums of borders and order
  bool operator==(const Call&) const = default;
};

// Returns a call in words, for messages: "the sum of 'h.3' (f32, 100 elements)".
using Describe = std::function<std::string(std::uint64_t tag, const Call& call)>;

// What one rank reads of another one's memory. The keys are for those who read and serve.
struct Read {
  int reader = 0, owner = 0;  // the owner is another rank than the one that is asked, where that one relays
  std::uint64_t key = 0, version = 0, offset = 0, bytes = 0;
};
// Takes the bytes, or an error in their place. `sent` is called when the bytes are used no more.
using Answer = std::function<void(std::span<const std::byte> bytes, std::exception_ptr error, Done sent)>;
using Server = std::function<void(const Read& read, Answer answer)>;

}  // namespace sluice::comm
