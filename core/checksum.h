#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace sluice {

// Returns the 64-bit XXH3 hash.
std::uint64_t checksum(std::span<const std::byte> bytes);

// Computes checksum() incrementally.
class Checksum {
 public:
  Checksum();
  ~Checksum();
  Checksum(Checksum&&) noexcept;
  Checksum& operator=(Checksum&&) noexcept;
  void add(std::span<const std::byte> bytes);
  std::uint64_t value() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace sluice
