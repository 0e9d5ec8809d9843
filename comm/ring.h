#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

namespace sluice::comm {

// A ring buffer of packets from one writer to one reader, threads or processes, in memory that both map. A
// packet is written whole or not at all. No content of the memory is trusted: invalid content throws
// Error(kCorrupt). Each end has a Ring of its own. Thread rule: one thread writes, one thread reads.
class Ring {
 public:
  // Returns the bytes of memory that a ring with `capacity` bytes for packets takes.
  static std::size_t bytes(std::size_t capacity);
  // REQUIRES: memory has bytes(capacity) bytes, aligned to 64, which were zero before the first end was made.
  // The capacity is a multiple of 64, and at least 1,024.
  Ring(std::byte* memory, std::size_t capacity);

  std::size_t most_packet_bytes() const { return capacity_ / 4; }
  // Returns false where there is no room now. REQUIRES: head and body together have at most
  // most_packet_bytes().
  bool write(std::span<const std::byte> head, std::span<const std::byte> body);
  // Calls take() with the next packet, whose bytes are contiguous. Returns false where there is none.
  bool read(const std::function<void(std::span<const std::byte> packet)>& take);
  // Returns whether the writer has found no room since the last call. The reader calls it after reading, and
  // if so wakes the writer.
  bool writer_waits();

 private:
  struct Counters {  // total bytes ever written and read
    alignas(64) std::atomic<std::uint64_t> written;
    alignas(64) std::atomic<std::uint64_t> read;
    alignas(64) std::atomic<std::uint32_t> writer_waits;
  };
  static_assert(std::atomic<std::uint64_t>::is_always_lock_free);
  bool has_room(std::uint64_t bytes) const;

  Counters& counters_;
  std::byte* const data_;
  const std::size_t capacity_;
  std::uint64_t position_;  // a private copy of this end's counter, which the other process cannot change
};

}  // namespace sluice::comm
