#pragma once
#include <cstdint>
#include <memory>

#include "core/threads.h"
#include "kernels/matrix.h"
#include "offload/file.h"

namespace sluice::engine {

// The tools of a run, made before anything large is taken.
struct Tools {
  Tools(int thread_count, const offload::IoOptions& how);
  Threads threads;
  std::unique_ptr<kernels::MatrixLibrary> library;
  offload::IoOptions disk_options;  // of io
  std::unique_ptr<offload::IoService> io;
  // What the process holds once all of them are warm, with the reserve.
  std::uint64_t base() const;
};

}  // namespace sluice::engine
