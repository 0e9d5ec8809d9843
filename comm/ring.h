#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

namespace sluice::comm {

// Packets from one writer to one reader, threads or processes, through memory that both map. Packets are
// whole: one that does not fit is not begun. Nothing that the memory holds is trusted: what cannot be is
// Error(kCorrupt). Each end has a Ring of its own. Thread rule: one thread writes, one thread reads.
class Ring {
 public:
  // The bytes that a ring with room for `capacity` bytes of packets takes.
  static std::size_t bytes(std::size_t capacity);
  // REQUIRES: memory has bytes(capacity) bytes, aligned to 64, and was zero when the first of both ends was
  // made. The capacity is a multiple of 64, and at least 1,024.
  Ring(std::byte* memory, std::size_t capacity);

  std::size_t most_packet_bytes() const { return capacity_ / 4; }
  // Returns false where there is no room now. REQUIRES: the packet has at most most_packet_bytes().
  bool write(std::span<const std::byte> head, std::span<const std::byte> body);
  // Calls take() with the next packet; its bytes are one after another. Returns false where there is none.
  bool read(const std::function<void(std::span<const std::byte> packet)>& take);
  // Returns whether the writer has found no room since the last question. The reader asks after it has read:
  // then the writer waits to hear that there may be room.
  bool writer_waits();

 private:
  struct Counters {  // all bytes that were ever written and read
    alignas(64) std::atomic<std::uint64_t> written;
    alignas(64) std::atomic<std::uint64_t> read;
    alignas(64) std::atomic<std::uint32_t> writer_waits;
  };
  static_assert(std::atomic<std::uint64_t>::is_always_lock_free);
  bool has_room(std::uint64_t bytes) const;

  Counters& counters_;
  std::byte* const data_;
  const std::size_t capacity_;
  std::uint64_t position_;  // what this end has written or read, as nobody else can change it
};

}  // namespace sluice::comm
