#pragma once
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "comm/links.h"

namespace sluice::comm {

// What the environment says of the launcher that has started this process as one of several.
struct MpiLauncher {
  std::string name;  // as in "mpirun"
  int rank = 0;
  int ranks = 0;  // 0: it does not say
};
// Returns nothing where no launcher of MPI has started this process. Throws Error(kInvalidArgument) where
// the variables are not numbers, or where srun has started several processes and offers them no MPI.
std::optional<MpiLauncher> find_mpi_launcher();

// The part of this process in a job of MPI. There is one in a process, and none after it. Thread rule: the
// thread that made it makes and destroys links, and destroys it, before the end of main().
class Mpi {
 public:
  // Ends MPI where all links were left in order by all ranks. Otherwise it does not, since MPI would wait for
  // ever for a rank that is gone, and logs why; the launcher then reports this process, too.
  virtual ~Mpi() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  struct Settings {
    // Returns whether this process was asked to end: a launcher asks all when one rank has died. MPI does not
    // say which. So this rank then asks the others whether they live, and one that gives no sign of it for
    // `silence` is gone.
    std::function<bool()> asked_to_end = [] { return false; };
    std::chrono::milliseconds silence{700};
  };
  // The links of this rank, which the Mpi outlives. Collective: waits until all ranks have called it.
  // Destroying them waits until the others leave, too: 10 s where one gives no sign of life, and 30 s at
  // most. Throws Error(kIo) where MPI fails.
  virtual std::unique_ptr<Links> make_links(const Settings& settings) = 0;
};

// Loads the plug-in (libsluice_mpi.so, which is looked for as the matrix library's is) and begins MPI. Throws
// Error(kNotFound) where there is none, with the name of the package that brings it, Error(kState) where MPI
// was begun before, and Error(kIo) where MPI fails. Where MPI cannot begin at all, it may end the process,
// and says why.
std::unique_ptr<Mpi> load_mpi();

// The bytes of buffers that the links of each of so many ranks have.
std::size_t mpi_links_bytes(int ranks);

}  // namespace sluice::comm
