#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "core/threads.h"

// What the machine can do: loops that move bytes or multiply and add, and nothing else. Arithmetic is held
// against them.
namespace sluice::kernels {

// An array that a loop goes through once. kUpdate: each byte is read and written back as it was; kWrite: it
// is overwritten with zeros.
struct MemoryStream {
  enum class Touch { kRead, kWrite, kUpdate };
  std::byte* data = nullptr;
  std::size_t bytes = 0;
  Touch touch = Touch::kRead;
  std::size_t moved() const { return touch == Touch::kUpdate ? 2 * bytes : bytes; }
};

// kPlain: what is written goes through the caches; kPastCaches: around them, so that lines that are only
// written are not read first.
enum class Stores { kPlain, kPastCaches };

// How much of one stream comes before the next one's turn. kPages: 4 KiB, which is mostly better for memory.
// kLines: 256 bytes of the widest and as many elements of the others, as a loop has to that needs a value of
// each stream at once.
enum class Turns { kPages, kLines };

// Goes through all streams once, side by side: each thread takes pieces that lie at the same share of every
// stream. Returns the exclusive or of what kRead streams hold, by words of 32 bits (so that their loads are
// not left out). REQUIRES: data on 64 bytes; bytes multiples of 64 * kStreamPieces.
inline constexpr std::size_t kStreamPieces = 1024;
std::uint32_t go_through(Threads& threads, std::span<const MemoryStream> streams, Stores stores,
                         Turns turns = Turns::kPages);

// Fused multiply-adds of f32 in registers on every thread, as many as `rounds` says (about a nanosecond each
// and thread); returns how many floating-point operations that were, two a lane.
double multiply_add(Threads& threads, std::size_t rounds);

}  // namespace sluice::kernels
