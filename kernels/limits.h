#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "core/threads.h"

// Measures what the machine can do, by loops that only move bytes, or only multiply and add. The speed of the
// other loops is compared with theirs.
namespace sluice::kernels {

// An array that a loop goes through once. kUpdate reads each byte and writes it back unchanged; kWrite
// overwrites the array with zeros.
struct MemoryStream {
  enum class Touch { kRead, kWrite, kUpdate };
  std::byte* data = nullptr;
  std::size_t bytes = 0;
  Touch touch = Touch::kRead;
  std::size_t moved() const { return touch == Touch::kUpdate ? 2 * bytes : bytes; }
};

// kPlain writes through the caches. kPastCaches writes around them, so that lines that are only written are
// not read first.
enum class Stores { kPlain, kPastCaches };

// How many bytes of one stream are moved before the next stream's turn. kPages: 4 KiB, which is mostly better
// for memory. kLines: 256 bytes of the stream with the widest elements, and as many elements of the others,
// as a loop must do that needs a value of each stream at once.
enum class Turns { kPages, kLines };

// Goes through all streams once, side by side: each is cut into kStreamBlocks blocks, and a thread takes the
// block of one number in every stream. Returns the exclusive or of the 32-bit words of the kRead streams, so
// that no load is left out. REQUIRES: data is aligned to 64 bytes; bytes are multiples of 64 * kStreamBlocks.
inline constexpr std::size_t kStreamBlocks = 1024;
std::uint32_t go_through(Threads& threads, std::span<const MemoryStream> streams, Stores stores,
                         Turns turns = Turns::kPages);

// Runs `rounds` rounds of fused multiply-adds of f32 in registers on every thread (a round takes about a
// nanosecond). Returns how many floating-point operations that were, counting two for each lane.
double multiply_add(Threads& threads, std::size_t rounds);

}  // namespace sluice::kernels
