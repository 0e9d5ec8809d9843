#include "engine/ranks/call_id.h"

#include <span>

#include "core/checksum.h"

namespace sluice::engine {

std::uint64_t call_id(CallKind kind, std::string_view name) {
  constexpr std::uint64_t kIndex = (std::uint64_t{1} << 56) - 1;
  return call_id(kind, checksum(std::as_bytes(std::span(name))) & kIndex);
}

}  // namespace sluice::engine
