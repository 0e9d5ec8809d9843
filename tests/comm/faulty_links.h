#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>

#include "comm/links.h"

// Links with faults that links may have: whoever uses links must work over these, too.
namespace sluice::comm {

struct LinkFaults {
  std::uint64_t seed = 0;
  double refused = 0;                   // probability that a send finds no room
  double held_back = 0;                 // probability that a packet arrives a while after it was sent
  unsigned most_microseconds = 0;       // how long a packet is held back at most
  std::size_t packet_bytes = SIZE_MAX;  // the most bytes of a packet
  double needless_return = 0;           // probability that a wait returns at once
  // After so many packets to that rank the connection with it is cut, of which this end alone is told.
  int cut_rank = -1;
  std::uint64_t cut_after = 0;
};
// Makes links that forward to `inner`. Packets stay in order.
std::unique_ptr<Links> make_faulty_links(std::unique_ptr<Links> inner, const LinkFaults& faults);

}  // namespace sluice::comm
