#pragma once
#include <cstddef>
#include <cstdint>

#include "comm/mpi_links.h"

// MPI's plug-in exports one function of this name and type, with C linkage. As with the matrix library, both
// sides must be built from the same headers: `abi` counts the changes of these.
namespace sluice::comm {

inline constexpr std::uint32_t kMpiPluginAbi = 1;
inline constexpr const char* kMpiPluginFile = "libsluice_mpi.so";
inline constexpr const char* kMpiPluginSymbol = "sluice_mpi_plugin";

struct MpiPlugin {
  std::uint32_t abi;
  Mpi* (*begin)();  // the caller owns what it returns
};
using MpiPluginFunction = const MpiPlugin* (*)();

// How many packets of a rank may be under way to another one: so many receives are posted ahead.
inline constexpr int kMpiAhead = 16;
// The bytes of a packet with its last byte, which says what kind it is.
std::size_t mpi_buffer_bytes(int ranks);
// How many buffers for sending a rank has, for all others together.
int mpi_send_buffers(int ranks);

}  // namespace sluice::comm
