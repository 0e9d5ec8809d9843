#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "allocator/extent_map.h"
#include "core/error.h"

namespace sluice::allocator {
namespace {

constexpr std::string_view kFrames = "frames of parameters";

std::size_t pool_bytes(std::size_t extent_bytes, std::size_t extents) {
  if (extent_bytes == 0 || extent_bytes % kSmallestExtent != 0 || extent_bytes > kLargestExtent)
    fail(ErrorCode::kInvalidArgument,
         "an extent of {} bytes is not possible; it is a multiple of {} up to {}", extent_bytes,
         format_size(kSmallestExtent), format_size(kLargestExtent));
  if (extents > kLargestRange / extent_bytes)
    fail(ErrorCode::kBudget, "{} extents of {} are more than a process can address", extents,
         format_size(extent_bytes));
  return extent_bytes * extents;
}

Reservation reserve_frames(std::size_t bytes) {
  const std::size_t range = round_up(bytes, kHugePage);
  return bytes == 0 ? Reservation() : Reservation(range, range, RangeKind::kBuffer, "free frames");
}

}  // namespace

// A free extent is parked at its own address in `parking` and always returns there, so that neighbours become
// one mapping again.
struct FramePool::State {
  Ledger& ledger;
  std::size_t extent_bytes;
  Charge charge;
  Reservation parking;
  ExtentMap map;
  std::vector<ExtentRun> without_memory;  // marked as used in the map, so that they are not placed
  std::size_t given_back = 0;             // the number of extents without memory
  pid_t owner = ::getpid();

  State(Ledger& account, std::size_t extent, std::size_t extents, std::size_t capacity)
      : ledger(account),
        extent_bytes(extent),
        charge(account, Tier::kHost, Purpose::kParameter, pool_bytes(extent, extents)),
        parking(reserve_frames(pool_bytes(extent, capacity))),
        map(capacity),
        given_back(capacity - extents) {
    const std::vector<ExtentRun> first = map.take(extents);
    without_memory = map.take(given_back);
    for (const ExtentRun run : first) {
      take_memory(parked_at(run), bytes_of(run), kFrames);
      map.give_back(run);
    }
  }

  std::byte* parked_at(ExtentRun run) const { return parking.data() + run.first * extent_bytes; }
  std::size_t bytes_of(ExtentRun run) const { return run.count * extent_bytes; }
  void place_run(Home::State& home, ExtentRun run);
  void place_runs(Home::State& home, const std::vector<ExtentRun>& runs);
  void take_back(Home::State& home, std::size_t keep);
  void require_placeable(const Home::State& home, std::size_t bytes) const;
};

FramePool::FramePool(Ledger& ledger, std::size_t extent_bytes, std::size_t extents, std::size_t capacity)
    : state_(std::make_unique<State>(ledger, extent_bytes, extents, std::max(extents, capacity))) {}

FramePool::~FramePool() {
  ensure(free_extents() == extents(), "a frame pool ended while homes hold {} of its {} extents",
         extents() - free_extents(), extents());
}

std::size_t FramePool::extent_bytes() const { return state_->extent_bytes; }
std::size_t FramePool::extents() const { return state_->map.size() - state_->given_back; }
std::size_t FramePool::free_extents() const { return state_->map.free(); }
std::size_t FramePool::extents_for(std::size_t bytes) const {
  return bytes / state_->extent_bytes + (bytes % state_->extent_bytes != 0 ? 1 : 0);
}

void FramePool::State::place_run(Home::State& home, ExtentRun run) {
  move_pages(parked_at(run), home.range.data() + home.placed, bytes_of(run), extent_bytes);
  home.runs.push_back(run);
  home.placed += bytes_of(run);
  ledger.move(Tier::kHost, Purpose::kParameter, home.purpose, bytes_of(run));
}

void FramePool::State::place_runs(Home::State& home, const std::vector<ExtentRun>& runs) {
  try {
    for (const ExtentRun run : runs) place_run(home, run);
  } catch (...) {
    for (std::size_t i = home.runs.size(); i < runs.size(); ++i) map.give_back(runs[i]);
    take_back(home, 0);
    throw;
  }
}

// Takes away extents from the home's end until `keep` bytes are left. REQUIRES: keep is a multiple of
// extent_bytes.
void FramePool::State::take_back(Home::State& home, std::size_t keep) {
  while (home.placed > keep) {
    ExtentRun& last = home.runs.back();
    const std::size_t count = std::min(last.count, (home.placed - keep) / extent_bytes);
    const ExtentRun leaving = {last.first + last.count - count, count};
    std::byte* left = home.range.data() + home.placed - bytes_of(leaving);
    move_pages(left, parked_at(leaving), bytes_of(leaving), extent_bytes);
    map.give_back(leaving);
    home.placed -= bytes_of(leaving);
    last.count -= count;
    if (last.count == 0) home.runs.pop_back();
    ledger.move(Tier::kHost, home.purpose, Purpose::kParameter, bytes_of(leaving));
    make_absent(left, bytes_of(leaving));
  }
  if (keep == 0) home.pool = nullptr;
}

void FramePool::State::require_placeable(const Home::State& home, std::size_t bytes) const {
  if (home.pool != nullptr)
    fail(ErrorCode::kState, "the home '{}' has {} of memory under it already; take it away first", home.name,
         format_size(home.placed));
  if (bytes > home.size)
    fail(ErrorCode::kInvalidArgument, "{} bytes do not fit the home '{}', which has {}", bytes, home.name,
         home.size);
  if (owner != ::getpid())
    fail(ErrorCode::kState,
         "frames for '{}' were asked for in a forked child; only the process that made them has them",
         home.name);
}

bool FramePool::place(Home& home, std::size_t bytes, Purpose purpose) {
  if (home.state_ == nullptr)
    fail(ErrorCode::kState, "frames cannot be placed under a home that has no range");
  Home::State& target = *home.state_;
  state_->require_placeable(target, bytes);
  const std::size_t wanted = extents_for(bytes);
  if (wanted > free_extents()) return false;
  if (wanted == 0) return true;
  target.pool = this;
  target.purpose = purpose;
  state_->place_runs(target, state_->map.take(wanted));
  return true;
}

void FramePool::shrink(Home& home, std::size_t bytes) {
  if (home.state_ == nullptr || home.state_->pool == nullptr) return;
  Home::State& target = *home.state_;
  if (target.pool != this)
    fail(ErrorCode::kState, "the home '{}' has memory of another pool under it", target.name);
  if (bytes < target.placed) state_->take_back(target, extents_for(bytes) * state_->extent_bytes);
}

void FramePool::protect(Home& home, Access access) {
  if (home.state_ == nullptr || home.state_->placed == 0) return;
  const int protection = access == Access::kNone   ? PROT_NONE
                         : access == Access::kRead ? PROT_READ
                                                   : PROT_READ | PROT_WRITE;
  if (::mprotect(home.state_->range.data(), home.state_->placed, protection) != 0)
    fail(ErrorCode::kBudget,
         "cannot protect '{}': {}; this process may have too many mappings: raise /proc/sys/vm/max_map_count",
         home.name(), errno_text(errno));
}

void FramePool::move(Home& from, Home& to) {
  if (from.state_ == nullptr || from.state_->pool == nullptr) return;
  if (to.state_ == nullptr || from.state_->pool != this)
    fail(ErrorCode::kState,
         "cannot move the frames of '{}': the target has no range, or another pool has them", from.name());
  Home::State &source = *from.state_, &target = *to.state_;
  state_->require_placeable(target, source.placed);
  protect(from, Access::kNone);  // otherwise addresses that pages have just left would read as zeros
  std::size_t at = 0;
  for (const ExtentRun run : source.runs) {
    const std::size_t bytes = state_->bytes_of(run);
    move_pages(source.range.data() + at, target.range.data() + at, bytes, state_->extent_bytes);
    make_absent(source.range.data() + at, bytes);
    at += bytes;
  }
  target.pool = std::exchange(source.pool, nullptr);
  target.purpose = source.purpose;
  target.runs = std::exchange(source.runs, {});
  target.placed = std::exchange(source.placed, 0);
  protect(to, Access::kWrite);
}

FormerHome FramePool::leave(Home& home) {
  if (home.state_ == nullptr || home.state_->pool != this)
    fail(ErrorCode::kState, "cannot leave the home '{}': it has no memory of this pool", home.name());
  Home::State& leaving = *home.state_;
  const std::size_t bytes = leaving.placed;
  const std::size_t range = round_up(bytes, kHugePage);
  const Reservation copy(range, range, RangeKind::kBuffer, leaving.name);
  take_ordinary_memory(copy.data(), bytes, leaving.name);
  std::memcpy(copy.data(), leaving.range.data(), bytes);
  protect(home, Access::kWrite);  // free frames are always writable
  state_->take_back(leaving, 0);
  move_pages(copy.data(), leaving.range.data(), bytes, bytes);
  leaving.range.unregister();
  return FormerHome(std::make_unique<Reservation>(std::move(leaving.range)));
}

void FramePool::give_back(std::size_t extents_left) {
  State& s = *state_;
  const std::size_t leaving = std::min(s.map.free(), extents() - std::min(extents(), extents_left));
  if (leaving == 0) return;
  for (const ExtentRun run : s.map.take(leaving)) {
    drop_memory(s.parked_at(run), s.bytes_of(run));
    s.without_memory.push_back(run);
  }
  s.given_back += leaving;
  s.charge.shrink(s.charge.bytes() - leaving * s.extent_bytes);
}

void FramePool::take_more(std::size_t extents_wanted) {
  State& s = *state_;
  while (extents() < extents_wanted) {
    ensure(!s.without_memory.empty(), "a frame pool with room for {} extents was asked for {}", s.map.size(),
           extents_wanted);
    ExtentRun& last = s.without_memory.back();
    const std::size_t count = std::min(last.count, extents_wanted - extents());
    const ExtentRun taken = {last.first + last.count - count, count};
    s.charge.grow(s.charge.bytes() + s.bytes_of(taken));
    try {
      take_memory(s.parked_at(taken), s.bytes_of(taken), kFrames);
    } catch (...) {
      s.charge.shrink(s.charge.bytes() - s.bytes_of(taken));
      throw;
    }
    s.map.give_back(taken);
    s.given_back -= count;
    last.count -= count;
    if (last.count == 0) s.without_memory.pop_back();
  }
}

}  // namespace sluice::allocator
