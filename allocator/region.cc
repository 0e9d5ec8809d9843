#include <algorithm>
#include <utility>

#include "allocator/address_space.h"
#include "allocator/memory.h"
#include "core/bytes.h"
#include "core/error.h"

namespace sluice::allocator {

Region::Region(Ledger& ledger, Purpose purpose, std::size_t bytes, std::size_t capacity) : purpose_(purpose) {
  const std::size_t most = std::max(bytes, capacity);
  if (most == 0) return;
  if (most > kLargestRange)
    fail(ErrorCode::kBudget, "{} bytes for {} are more than a process can address", most, name_of(purpose));
  const std::size_t size = round_up(bytes, kHugePage), reserved = round_up(most, kHugePage);
  charge_ = Charge(ledger, Tier::kHost, purpose, size);
  Reservation range(reserved, reserved, RangeKind::kBuffer, name_of(purpose));
  if (size > 0) take_memory(range.data(), size, name_of(purpose));
  data_ = range.release();
  size_ = size;
  capacity_ = reserved;
}

Region::~Region() { give_back_range(data_, capacity_); }

void Region::resize(std::size_t bytes) {
  const std::size_t size = round_up(bytes, kHugePage);
  ensure(size <= capacity_, "a region of {} with room for {} bytes was asked for {}", name_of(purpose_),
         capacity_, bytes);
  if (size < size_) {
    make_absent(data_ + size, size_ - size);
    charge_.shrink(size);
  } else if (size > size_) {
    charge_.grow(size);
    try {
      take_memory(data_ + size_, size - size_, name_of(purpose_));
    } catch (...) {
      charge_.shrink(size_);
      throw;
    }
  }
  size_ = size;
}

Region::Region(Region&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      capacity_(std::exchange(other.capacity_, 0)),
      purpose_(other.purpose_),
      charge_(std::move(other.charge_)) {}

Region& Region::operator=(Region&& other) noexcept {
  Region taken(std::move(other));
  std::swap(data_, taken.data_);
  std::swap(size_, taken.size_);
  std::swap(capacity_, taken.capacity_);
  std::swap(purpose_, taken.purpose_);
  std::swap(charge_, taken.charge_);
  return *this;
}

}  // namespace sluice::allocator
