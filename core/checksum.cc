#include "core/checksum.h"

#ifdef __x86_64__
#include <xxh_x86dispatch.h>  // computes XXH3 with the widest vectors of this CPU
#else
#include <xxhash.h>
#endif

namespace sluice {

std::uint64_t checksum(std::span<const std::byte> bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

struct Checksum::State {
  XXH3_state_t* xxh = XXH3_createState();
  State() { XXH3_64bits_reset(xxh); }
  ~State() { XXH3_freeState(xxh); }
  State(const State&) = delete;
  State& operator=(const State&) = delete;
};

Checksum::Checksum() : state_(std::make_unique<State>()) {}
Checksum::~Checksum() = default;
Checksum::Checksum(Checksum&&) noexcept = default;
Checksum& Checksum::operator=(Checksum&&) noexcept = default;
void Checksum::add(std::span<const std::byte> bytes) {
  XXH3_64bits_update(state_->xxh, bytes.data(), bytes.size());
}
std::uint64_t Checksum::value() const { return XXH3_64bits_digest(state_->xxh); }

}  // namespace sluice
