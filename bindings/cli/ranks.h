#pragma once
#include <cstddef>
#include <cstdint>

#include "comm/communicator.h"

namespace sluice::cli {

// The ranks of a run, one of which is this process. Thread rule: one thread.
class Ranks {
 public:
  virtual ~Ranks() = default;
  virtual comm::Communicator& communicator() = 0;
  virtual std::uint64_t bytes() const = 0;         // memory that this rank holds for it
  virtual std::uint64_t bytes_in_use() const = 0;  // the part of it that is in use from the beginning
  // The number of ranks on this machine, and this rank's share of the cores that it may use.
  virtual int ranks_here() const = 0;
  virtual double share_of_cpus() const = 0;
};

// The bytes of the ring between two ranks of a machine.
inline constexpr std::size_t kRing = std::size_t{1} << 20;

}  // namespace sluice::cli
