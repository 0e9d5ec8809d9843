#pragma once
#include <chrono>
#include <cstddef>
#include <functional>
#include <optional>
#include <span>
#include <string>

namespace sluice::comm {

// One rank's connections to all other ranks. Packets from one rank to another arrive in order, unchanged,
// exactly once. All functions throw Error(kCorrupt) where another rank's data are invalid. Destroying the
// links tells the other ranks that this one has left in order; packets that it sent before still arrive.
// Thread rule: one thread, but any thread may call wake().
class Links {
 public:
  using Clock = std::chrono::steady_clock;
  virtual ~Links() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;                  // the number of ranks
  virtual std::size_t packet_bytes() const = 0;  // the largest packet, in bytes

  // Sends head and body as one packet. Returns false where there is no room now. The caller may reuse both
  // buffers at once.
  virtual bool send(int to, std::span<const std::byte> head, std::span<const std::byte> body) = 0;
  // Calls take() with the next packet of that rank, which stays valid until take() returns. Returns false
  // where there is none.
  virtual bool receive(int from, const std::function<void(std::span<const std::byte> packet)>& take) = 0;
  // Returns when a packet may have arrived, there may be room again, another rank may be gone, wake() was
  // called since the last wait, or `until` is reached.
  virtual void wait(Clock::time_point until) = 0;
  virtual void wake() = 0;
  // Returns how a rank has gone; empty: it may be alive, or has not begun yet. All packets that a gone rank
  // has sent can still be received.
  struct Gone {
    bool in_order;    // its links were destroyed
    std::string how;  // as in "its process has ended"
  };
  virtual std::optional<Gone> gone(int rank) = 0;
  // Tells that the work of these ranks has failed: destroying the links then waits less for a silent rank.
  virtual void work_has_failed() {}
};

}  // namespace sluice::comm
