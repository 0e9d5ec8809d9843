#pragma once
#include <chrono>
#include <cstddef>
#include <functional>
#include <optional>
#include <span>
#include <string>

namespace sluice::comm {

// One rank's connections with all others. The packets from one rank to another arrive in order, unchanged,
// each once. All functions throw Error(kCorrupt) where what another rank left cannot be. Destroying the links
// tells the others that this rank has left in order; packets that were sent still arrive. Thread rule: one
// thread, but wake() is called from any.
class Links {
 public:
  using Clock = std::chrono::steady_clock;
  virtual ~Links() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;                  // how many ranks there are
  virtual std::size_t packet_bytes() const = 0;  // the most bytes that a packet may have

  // Sends head and body as one packet. Returns false where there is no room now. Both may be changed when it
  // returns.
  virtual bool send(int to, std::span<const std::byte> head, std::span<const std::byte> body) = 0;
  // Calls take() with the next packet of that rank, which stays valid until take() returns. Returns false
  // where there is none.
  virtual bool receive(int from, const std::function<void(std::span<const std::byte> packet)>& take) = 0;
  // Waits until a packet may have arrived, there may be room again, another rank may be gone, wake() was
  // called since the last wait, or `until` is reached.
  virtual void wait(Clock::time_point until) = 0;
  virtual void wake() = 0;
  // What is known of a rank that is gone. Nothing: it may be alive, or has not begun yet. All packets of a
  // rank that is gone can be received.
  struct Gone {
    bool in_order;    // its links were destroyed
    std::string how;  // as in "its process has ended"
  };
  virtual std::optional<Gone> gone(int rank) = 0;
};

}  // namespace sluice::comm
