#pragma once
#include "allocator/memory.h"
#include "core/bytes.h"
#include "testing.h"
#include "tests/thrown.h"

namespace sluice::allocator {

inline std::uint64_t held(const Ledger& ledger, Purpose purpose) {
  return ledger.snapshot()
      .lines[static_cast<std::size_t>(Tier::kHost)][static_cast<std::size_t>(purpose)]
      .current;
}
inline Ledger::Line host_total(const Ledger& ledger) {
  return ledger.snapshot().total[static_cast<std::size_t>(Tier::kHost)];
}

// Writes one word at the start of every 4 KiB page.
inline void stamp(std::byte* data, std::size_t bytes, std::uint64_t value) {
  for (std::size_t i = 0; i < bytes; i += 4096) std::memcpy(data + i, &value, sizeof value);
}
inline bool has_stamp(const std::byte* data, std::size_t bytes, std::uint64_t value) {
  for (std::size_t i = 0; i < bytes; i += 4096)
    if (std::memcmp(data + i, &value, sizeof value) != 0) return false;
  return true;
}

}  // namespace sluice::allocator
