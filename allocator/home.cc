#include "allocator/home.h"

#include <memory>
#include <utility>

#include "core/error.h"

namespace sluice::allocator {
namespace {

std::size_t home_size(const std::string& name, std::size_t bytes) {
  if (bytes == 0 || bytes > kLargestRange)
    fail(ErrorCode::kInvalidArgument, "the home '{}' cannot have {} bytes; give it 1 to {}", name, bytes,
         kLargestRange);
  return round_up(bytes, kHugePage);
}

}  // namespace

Home::Home(std::string name, std::size_t bytes) {
  const std::size_t size = home_size(name, bytes);
  Reservation range(size + kLargestExtent, size, RangeKind::kHome, name);
  state_ = std::make_unique<State>(
      State{.name = std::move(name), .size = size, .range = std::move(range), .runs = {}});
}

std::vector<Home> Home::adjoining(const std::vector<Part>& parts) {
  std::vector<Reservation::Part> ranges;
  for (const Part& part : parts) ranges.push_back({home_size(part.name, part.bytes), part.name});
  std::vector<Reservation> reserved = Reservation::adjoining(ranges, kLargestExtent, RangeKind::kHome);
  std::vector<Home> homes(parts.size());
  for (std::size_t i = 0; i < parts.size(); ++i)
    homes[i].state_ = std::make_unique<State>(
        State{.name = parts[i].name, .size = ranges[i].used, .range = std::move(reserved[i]), .runs = {}});
  return homes;
}

Home::Home() = default;

Home::~Home() {
  if (state_ != nullptr && state_->pool != nullptr) state_->pool->shrink(*this, 0);
}

Home::Home(Home&& other) noexcept = default;

Home& Home::operator=(Home&& other) noexcept {
  Home taken(std::move(other));
  std::swap(state_, taken.state_);
  return *this;
}

std::byte* Home::data() const { return state_ == nullptr ? nullptr : state_->range.data(); }
std::size_t Home::size() const { return state_ == nullptr ? 0 : state_->size; }
std::size_t Home::placed() const { return state_ == nullptr ? 0 : state_->placed; }

const std::string& Home::name() const {
  static const std::string none;
  return state_ == nullptr ? none : state_->name;
}

FormerHome::FormerHome() = default;

FormerHome::FormerHome(Home home) {
  if (home.state_ == nullptr) return;
  ensure(home.state_->placed == 0, "the home '{}' cannot become a former home: memory is under it",
         home.name());
  retire_range(home.data());
  range_ = std::make_unique<Reservation>(std::move(home.state_->range));
}

FormerHome::FormerHome(std::unique_ptr<Reservation> range) : range_(std::move(range)) {}
FormerHome::~FormerHome() = default;
FormerHome::FormerHome(FormerHome&& other) noexcept = default;
FormerHome& FormerHome::operator=(FormerHome&& other) noexcept = default;

std::byte* FormerHome::data() const { return range_ == nullptr ? nullptr : range_->data(); }

}  // namespace sluice::allocator
