#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace sluice::comm {

// What the packets between two transports mean. Integers are as the machine has them; another machine's first
// packet has a magic number that this one does not know.
enum class PacketKind : std::uint8_t {
  kHello,    // the first one of each rank: tag = kHelloMagic, bytes = kPacketVersion
  kGrant,    // the receiver has memory for message `tag`: its `bytes`, its call
  kData,     // bytes of message `tag`, from offset `bytes` on
  kRead,     // the reader's read number `tag`: its `bytes`; rank = whose; words = key, version, offset
  kAnswer,   // bytes that answer read `tag`, from offset `bytes` on
  kRefusal,  // an error in place of an answer to read `tag`: its code and text
  kFailure,  // the first failure of all: the rank that failed, code and text
  kAlive,    // a sign of life: tag = how often the rank has reported work
  kGoodbye,  // the last one of a rank that leaves in order
};

inline constexpr std::uint64_t kHelloMagic = 0x6f6c6c656863756c;  // "luchello"
inline constexpr std::uint64_t kPacketVersion = 2;

struct Head {
  PacketKind kind = PacketKind::kAlive;
  std::uint8_t call_kind = 0;
  std::uint8_t call_type = 0;
  std::uint8_t code = 0;  // of an error
  std::int32_t rank = 0;
  std::uint64_t tag = 0;
  std::uint64_t bytes = 0;
  std::array<std::uint64_t, 3> words{};  // of a grant: the call's count and detail

  std::span<const std::byte> as_bytes() const { return std::as_bytes(std::span(this, 1)); }
};
static_assert(sizeof(Head) == 48);

// The shortest packets over which a transport works.
inline constexpr std::size_t kLeastPacket = 2 * sizeof(Head);

}  // namespace sluice::comm
