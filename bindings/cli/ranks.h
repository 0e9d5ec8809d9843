#pragma once
#include <cstddef>
#include <cstdint>

#include "comm/communicator.h"

namespace sluice::cli {

// The ranks of a run, of which this process is one. Thread rule: one thread.
class Ranks {
 public:
  virtual ~Ranks() = default;
  virtual comm::Communicator& communicator() = 0;
  virtual std::uint64_t bytes() const = 0;         // what this rank holds for it
  virtual std::uint64_t bytes_in_use() const = 0;  // those of them that are in use from the beginning
  // How many ranks are on this machine, and how much of the cores that this one may use is its own.
  virtual int ranks_here() const = 0;
  virtual double share_of_cpus() const = 0;
};

// The size of the ring from a rank to another one of its machine.
inline constexpr std::size_t kRing = std::size_t{1} << 20;

}  // namespace sluice::cli
