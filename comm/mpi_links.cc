#include "comm/mpi_links.h"

#include <dlfcn.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "comm/mpi/plugin.h"
#include "core/bytes.h"
#include "core/error.h"
#include "core/plugin.h"

namespace sluice::comm {
namespace {

constexpr std::size_t kMostMpiPacket = 60 * kKiB, kLeastMpiPacket = 8 * kKiB;
constexpr std::size_t kReceiveBytes = 8 * kMiB;  // for all posted receives, as long as packets may shrink
constexpr std::size_t kLine = 64;                // a cache line, by which buffers are separated

std::optional<int> number_in(const char* variable) {
  const char* const text = std::getenv(variable);
  if (text == nullptr || *text == '\0') return std::nullopt;
  int number = 0;
  const char* const end = text + std::strlen(text);
  const auto read = std::from_chars(text, end, number);
  if (read.ec != std::errc() || read.ptr != end || number < 0)
    fail(ErrorCode::kInvalidArgument,
         "the variable {} is '{}', where a launcher of ranks gives a number; unset it", variable, text);
  return number;
}

}  // namespace

std::optional<MpiLauncher> find_mpi_launcher() {
  const bool slurm = std::getenv("SLURM_PROCID") != nullptr;
  if (const auto rank = number_in("OMPI_COMM_WORLD_RANK"))
    return MpiLauncher{"mpirun", *rank, number_in("OMPI_COMM_WORLD_SIZE").value_or(0)};
  const int tasks = slurm ? number_in("SLURM_STEP_NUM_TASKS").value_or(0) : 0;
  for (const auto& [own, all] : {std::pair{"PMI_RANK", "PMI_SIZE"}, {"PMIX_RANK", "PMIX_SIZE"}})
    if (const auto rank = number_in(own))
      return MpiLauncher{slurm ? "srun" : "mpiexec", *rank, number_in(all).value_or(tasks)};
  if (tasks > 1)
    fail(ErrorCode::kInvalidArgument,
         "srun has started {} processes, and offers them no MPI through which they could train together; "
         "give it "
         "--mpi=pmix (srun --mpi=list shows what it has), or --ranks 1 here if each is to train alone",
         tasks);
  return std::nullopt;
}

std::unique_ptr<Mpi> load_mpi() {
  const void* const found =
      open_plugin(kMpiPluginFile, kMpiPluginSymbol, kMpiPluginAbi, RTLD_NOW | RTLD_LOCAL, "MPI",
                  "install Open MPI 4 (Debian, Ubuntu: openmpi-bin; libopenmpi-dev where Sluice is built)");
  return std::unique_ptr<Mpi>(static_cast<const MpiPlugin*>(found)->begin());
}

std::size_t mpi_buffer_bytes(int ranks) {
  const auto others = static_cast<std::size_t>(std::max(1, ranks - 1));
  const std::size_t share = kReceiveBytes / kMpiAhead / others / kKiB * kKiB;
  return std::clamp(share, kLeastMpiPacket, kMostMpiPacket) + kLine;
}

int mpi_send_buffers(int ranks) { return ranks < 2 ? 0 : 2 * kMpiAhead; }

std::size_t mpi_links_bytes(int ranks) {
  const auto others = static_cast<std::size_t>(std::max(0, ranks - 1));
  return mpi_buffer_bytes(ranks) * (others * kMpiAhead + static_cast<std::size_t>(mpi_send_buffers(ranks)));
}

}  // namespace sluice::comm
