#pragma once
#include <cstdint>
#include <memory>

#include "core/threads.h"
#include "kernels/matrix.h"
#include "offload/file.h"

namespace sluice::engine {

// A run's threads and libraries for computing and I/O; made before anything large is allocated.
struct Tools {
  Tools(int thread_count, const offload::IoOptions& how);
  Threads threads;
  std::unique_ptr<kernels::MatrixLibrary> library;
  offload::IoOptions disk_options;  // the options of io
  std::unique_ptr<offload::IoService> io;
  // The memory that the process holds once all of these are in use, with the reserve.
  std::uint64_t base() const;
};

}  // namespace sluice::engine
