#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "core/threads.h"

// Measures the machine's limits, by loops that only move bytes, or only multiply and add. Benchmarks compare
// the speed of other loops with these.
namespace sluice::kernels {

// An array that a loop streams through once. kUpdate reads each byte and writes it back unchanged; kWrite
// overwrites the array with zeros.
struct MemoryStream {
  enum class Touch { kRead, kWrite, kUpdate };
  std::byte* data = nullptr;
  std::size_t bytes = 0;
  Touch touch = Touch::kRead;
  std::size_t moved() const { return touch == Touch::kUpdate ? 2 * bytes : bytes; }
};

// kPlain stores through the caches. kPastCaches uses non-temporal stores, so that lines that are only written
// are not read first.
enum class Stores { kPlain, kPastCaches };

// The bytes of one stream that are moved before the next stream's turn. kPages: 4 KiB, which mostly suits
// memory better. kLines: 256 bytes of the stream with the widest elements, and as many elements of the
// others, like a loop that needs an element of each stream at once.
enum class Turns { kPages, kLines };

// Streams through all arrays once, side by side: each is cut into kStreamBlocks blocks, and a thread takes
// the blocks of one number in all of them. Returns the exclusive or of the 32-bit words of the kRead streams,
// so that no load is optimized away. REQUIRES: data is aligned to 64 bytes; bytes are multiples of 64 *
// kStreamBlocks.
inline constexpr std::size_t kStreamBlocks = 1024;
std::uint32_t go_through(Threads& threads, std::span<const MemoryStream> streams, Stores stores,
                         Turns turns = Turns::kPages);

// Runs `rounds` rounds of f32 fused multiply-adds in registers on every thread (a round takes about a
// nanosecond). Returns the number of floating-point operations, two for each lane.
double multiply_add(Threads& threads, std::size_t rounds);

}  // namespace sluice::kernels
