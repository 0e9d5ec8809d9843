#include "engine/machine/tools.h"

#include "allocator/memory.h"
#include "engine/machine/process.h"

namespace sluice::engine {

Tools::Tools(int thread_count, const offload::IoOptions& how)
    : threads(thread_count),
      library(kernels::load_matrix_library(thread_count)),
      disk_options(how),
      io(offload::make_io_service(how)) {}

std::uint64_t Tools::base() const { return allocator::resident_bytes() + kReserve; }

}  // namespace sluice::engine
