#include "comm/ring.h"

#include <cstring>

#include "core/bytes.h"
#include "core/error.h"

namespace sluice::comm {
namespace {

// Each packet follows a mark, and begins a unit after it, so that copies are aligned. A mark with length 0
// fills the end of the ring where a packet would not be contiguous.
constexpr std::size_t kUnit = 64;
struct Mark {
  std::uint64_t position;  // the mark's own position, so that stale bytes are detected
  std::uint64_t length;
};
constexpr std::uint64_t kFiller = ~std::uint64_t{0};

std::size_t record_bytes(std::size_t length) { return round_up(sizeof(Mark) + length, kUnit); }

void copy(std::byte* to, std::span<const std::byte> from) {
  if (!from.empty()) std::memcpy(to, from.data(), from.size());
}

[[noreturn]] void refuse(const char* what, std::uint64_t found) {
  fail(ErrorCode::kCorrupt, "the memory that two ranks share holds {} {}, which cannot be", what, found);
}

}  // namespace

std::size_t Ring::bytes(std::size_t capacity) { return sizeof(Counters) + capacity; }

Ring::Ring(std::byte* memory, std::size_t capacity)
    : counters_(*reinterpret_cast<Counters*>(memory)),
      data_(memory + sizeof(Counters)),
      capacity_(capacity),
      position_(0) {}

bool Ring::has_room(std::uint64_t bytes) const {
  const std::uint64_t used = position_ - counters_.read.load();
  if (used > capacity_) refuse("a reader's position that is off by", used);
  return used + bytes <= capacity_;
}

bool Ring::write(std::span<const std::byte> head, std::span<const std::byte> body) {
  const std::size_t length = head.size() + body.size(), record = record_bytes(length);
  ensure(length <= most_packet_bytes(), "a packet of {} bytes is too long for its ring", length);
  const std::size_t at = position_ % capacity_, rest = capacity_ - at;
  const std::size_t filler = record > rest ? rest : 0;
  if (!has_room(filler + record)) {
    // The reader checks this flag after it has freed room, and the writer checks for room after it has set
    // the flag. So at least one of them sees the other's write.
    counters_.writer_waits.store(1);
    if (!has_room(filler + record)) return false;
  }
  if (filler > 0) {
    const Mark mark{position_, kFiller};
    std::memcpy(data_ + at, &mark, sizeof(mark));
    position_ += filler;
  }
  std::byte* const to = data_ + position_ % capacity_;
  const Mark mark{position_, length};
  std::memcpy(to, &mark, sizeof(mark));
  copy(to + sizeof(mark), head);
  copy(to + sizeof(mark) + head.size(), body);
  position_ += record;
  counters_.written.store(position_, std::memory_order_release);
  return true;
}

bool Ring::read(const std::function<void(std::span<const std::byte> packet)>& take) {
  std::uint64_t unread = counters_.written.load(std::memory_order_acquire) - position_;
  if (unread == 0) return false;
  if (unread > capacity_) refuse("a writer's position that is off by", unread);
  for (;;) {
    const std::size_t at = position_ % capacity_, rest = capacity_ - at;
    Mark mark;
    std::memcpy(&mark, data_ + at, sizeof(mark));
    if (mark.position != position_) refuse("a packet that begins at", mark.position);
    if (mark.length == kFiller && rest < unread) {
      position_ += rest;
      unread -= rest;
      continue;
    }
    if (mark.length > most_packet_bytes()) refuse("a packet whose length is", mark.length);
    const std::size_t record = record_bytes(mark.length);
    if (record > unread || record > rest) refuse("a packet whose length is", mark.length);
    take({data_ + at + sizeof(mark), mark.length});
    position_ += record;
    counters_.read.store(position_);
    return true;
  }
}

bool Ring::writer_waits() {
  return counters_.writer_waits.load() != 0 && counters_.writer_waits.exchange(0) != 0;
}

}  // namespace sluice::comm
