#include <utility>

#include "allocator/address_space.h"
#include "allocator/memory.h"
#include "core/bytes.h"
#include "core/error.h"

namespace sluice::allocator {

Region::Region(Ledger& ledger, Purpose purpose, std::size_t bytes) {
  if (bytes == 0) return;
  if (bytes > kLargestRange)
    fail(ErrorCode::kBudget, "{} bytes for {} are more than a process can address", bytes, name_of(purpose));
  const std::size_t size = round_up(bytes, kHugePage);
  charge_ = Charge(ledger, Tier::kHost, purpose, size);
  Reservation range(size, bytes, RangeKind::kBuffer, name_of(purpose));
  take_memory(range.data(), size, name_of(purpose));
  data_ = range.release();
  size_ = size;
}

Region::~Region() { give_back_range(data_, size_); }

Region::Region(Region&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      charge_(std::move(other.charge_)) {}

Region& Region::operator=(Region&& other) noexcept {
  Region taken(std::move(other));
  std::swap(data_, taken.data_);
  std::swap(size_, taken.size_);
  std::swap(charge_, taken.charge_);
  return *this;
}

}  // namespace sluice::allocator
