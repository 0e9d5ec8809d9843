#pragma once
#include <cstddef>
#include <cstdint>

#include "comm/mpi_links.h"

// The MPI plug-in exports one function of this name and type, with C linkage. Both sides must be built from
// the same headers; `abi` is raised with each change of them.
namespace sluice::comm {

inline constexpr std::uint32_t kMpiPluginAbi = 2;
inline constexpr const char* kMpiPluginFile = "libsluice_mpi.so";
inline constexpr const char* kMpiPluginSymbol = "sluice_mpi_plugin";

struct MpiPlugin {
  std::uint32_t abi;
  Mpi* (*begin)();  // the caller owns what it returns
};
using MpiPluginFunction = const MpiPlugin* (*)();

// The most packets that a rank may have in flight to another one, and the number of receives posted in
// advance.
inline constexpr int kMpiAhead = 16;
// Returns the bytes of a packet buffer, including the byte that tells the packet's kind.
std::size_t mpi_buffer_bytes(int ranks);
// Returns the number of send buffers that a rank has for all other ranks together.
int mpi_send_buffers(int ranks);

}  // namespace sluice::comm
