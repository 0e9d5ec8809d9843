#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace sluice::comm {

// The wire format between two transports. Integers have the machine's byte order; the hello packet of a
// machine with another order has an unknown magic number.
enum class PacketKind : std::uint8_t {
  kHello,    // first packet of each rank: tag = kHelloMagic, bytes = kPacketVersion
  kGrant,    // the receiver has memory for message `tag` of `bytes` bytes; also names the call
  kData,     // bytes of message `tag`, from offset `bytes` on
  kRead,     // read request number `tag` of `bytes` bytes; rank = owner; words = key, version, offset
  kAnswer,   // bytes that answer read `tag`, from offset `bytes` on
  kRefusal,  // an error in reply to read `tag`: its code and text
  kFailure,  // the first failure of the run: the failed rank, code and text
  kAlive,    // heartbeat: tag = how often the rank has reported work; text: the exchange in which it waits,
             // where this rank waits for it in another one
  kGoodbye,  // last packet of a rank that leaves in order
};

inline constexpr std::uint64_t kHelloMagic = 0x6f6c6c656863756c;  // "luchello"
inline constexpr std::uint64_t kPacketVersion = 3;

struct Head {
  PacketKind kind = PacketKind::kAlive;
  std::uint8_t call_kind = 0;
  std::uint8_t call_type = 0;
  std::uint8_t code = 0;  // of an error (ErrorCode)
  std::int32_t rank = 0;
  std::uint64_t tag = 0;
  std::uint64_t bytes = 0;
  std::array<std::uint64_t, 3> words{};  // of a grant: the call's count and detail

  std::span<const std::byte> as_bytes() const { return std::as_bytes(std::span(this, 1)); }
};
static_assert(sizeof(Head) == 48);

// The smallest packet size, in bytes, with which a transport works.
inline constexpr std::size_t kLeastPacket = 2 * sizeof(Head);

}  // namespace sluice::comm
