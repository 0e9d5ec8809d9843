#pragma once
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "comm/links.h"

namespace sluice::comm {

// The launcher that has started this process as one of several, as the environment variables tell.
struct MpiLauncher {
  std::string name;  // as in "mpirun"
  int rank = 0;
  int ranks = 0;  // 0: unknown
};
// Returns nothing where no MPI launcher has started this process. Throws Error(kInvalidArgument) where the
// variables are not numbers, or where srun has started several processes without MPI.
std::optional<MpiLauncher> find_mpi_launcher();

// This process's membership in an MPI job. A process has at most one in its lifetime, since MPI cannot be
// initialized twice. Thread rule: the thread that made it makes and destroys the links, and destroys it
// before main() ends.
class Mpi {
 public:
  // Finalizes MPI where all ranks have left their links in order. Otherwise it does not, since MPI would wait
  // for ever for a rank that is gone; it logs the reason, and the launcher reports this process, too.
  virtual ~Mpi() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  struct Settings {
    // Returns whether this process was asked to end. A launcher asks all processes when one rank has died,
    // without saying which. This rank then asks the others whether they live; a rank that does not answer
    // within `silence` is gone.
    std::function<bool()> asked_to_end = [] { return false; };
    std::chrono::milliseconds silence{700};
  };
  // Makes the links of this rank; the Mpi outlives them. Collective: waits until all ranks have called it.
  // Destroying the links waits until the others leave, too: 30 s at most, and where one gives no sign of life
  // 10 s, or 2 s once work_has_failed(). Throws Error(kIo) where MPI fails.
  virtual std::unique_ptr<Links> make_links(const Settings& settings) = 0;
};

// Loads the plug-in (libsluice_mpi.so, searched for like the matrix library's) and initializes MPI. Throws
// Error(kNotFound) where the plug-in is missing, with the name of the package that has it, Error(kState)
// where MPI was initialized before, and Error(kIo) where MPI fails. MPI may end the process where it cannot
// be initialized at all; it prints the reason.
std::unique_ptr<Mpi> load_mpi();

// Returns the bytes of buffers that the links of one rank allocate.
std::size_t mpi_links_bytes(int ranks);

}  // namespace sluice::comm
