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
  const std::size_t reserved = round_up(most, kHugePage);
  size_ = round_up(bytes, kHugePage);
  Charge charge(ledger, Tier::kHost, purpose, size_);
  Reservation range(reserved, reserved, RangeKind::kBuffer, name_of(purpose));
  if (size_ > 0) take_memory(range.data(), size_, name_of(purpose));
  range_ = std::unique_ptr<std::byte, GiveBack>(range.release(), {reserved, std::move(charge)});
}

void Region::GiveBack::operator()(std::byte* data) const { give_back_range(data, capacity); }

void Region::resize(std::size_t bytes) {
  const std::size_t size = round_up(bytes, kHugePage);
  auto& [capacity, charge] = range_.get_deleter();
  ensure(size <= capacity, "a region of {} with room for {} bytes was asked for {}", name_of(purpose_),
         capacity, bytes);
  if (size < size_) {
    make_absent(data() + size, size_ - size);
    charge.shrink(size);
  } else if (size > size_) {
    charge.grow(size);
    try {
      take_memory(data() + size_, size - size_, name_of(purpose_));
    } catch (...) {
      charge.shrink(size_);
      throw;
    }
  }
  size_ = size;
}

}  // namespace sluice::allocator
