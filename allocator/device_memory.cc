#include "allocator/device_memory.h"

#include <fmt/core.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "core/bytes.h"
#include "core/error.h"
#include "core/log.h"

namespace sluice::allocator {
namespace {

constexpr std::size_t kNone = SIZE_MAX;

// Runs a cleanup and ignores errors: they mean that the device has had a fault, which an earlier call has
// reported.
template <class End>
void quietly(End end) {
  try {
    end();
  } catch (const Error& error) {
    log().debug("{}", error.what());
  }
}

class Extent {
 public:
  Extent(Device& device, std::size_t bytes, bool shared = false)
      : device_(&device), id_(shared ? device.create_shared_extent(bytes) : device.create_extent(bytes)) {}
  Extent(Device& device, const Descriptor& exported)
      : device_(&device), id_(device.import_extent(exported)) {}
  ~Extent() {
    if (device_ != nullptr) quietly([&] { device_->release_extent(id_); });
  }
  Extent(Extent&& other) noexcept : device_(std::exchange(other.device_, nullptr)), id_(other.id_) {}
  Extent& operator=(Extent&&) = delete;
  Device::Extent id() const { return id_; }

 private:
  Device* device_;
  Device::Extent id_;
};

class Addresses {
 public:
  Addresses(Device& device, std::size_t bytes)
      : device_(&device), bytes_(bytes), address_(device.reserve_addresses(bytes)) {}
  ~Addresses() {
    if (!is_left_) quietly([&] { device_->free_addresses(address_, bytes_); });
  }
  Addresses(const Addresses&) = delete;
  Addresses& operator=(const Addresses&) = delete;
  DeviceAddress get() const { return address_; }
  std::size_t bytes() const { return bytes_; }
  // Runs an unmapping at the end of life. If it fails, the addresses are never freed, since something is
  // still mapped there. is_told: whether the user was warned of such a failure already.
  template <class Unmap>
  void unmap(bool& is_told, Unmap unmap) {
    try {
      unmap();
    } catch (const Error& error) {
      is_left_ = true;
      const std::string text = fmt::format(
          "memory of the GPU could not be unmapped when it was given up, and stays taken until the process "
          "ends: {}",
          error.what());
      if (std::exchange(is_told, true))
        log().debug("{}", text);
      else
        log().warn("{}", text);
    }
  }

 private:
  Device* device_;
  std::size_t bytes_;
  DeviceAddress address_;
  bool is_left_ = false;
};

// An extent mapped at addresses of its own.
struct Mapped {
  Device& device;
  Extent extent;
  Addresses addresses;

  Mapped(Device& of, Extent memory, std::size_t bytes)
      : device(of), extent(std::move(memory)), addresses(of, bytes) {
    device.map(addresses.get(), bytes, extent.id());
  }
  ~Mapped() {
    bool is_told = false;
    addresses.unmap(is_told, [&] { device.unmap(addresses.get(), addresses.bytes()); });
  }
  Mapped(const Mapped&) = delete;
  Mapped& operator=(const Mapped&) = delete;
};

// Events of streams that have used some memory. Its next user waits for them.
using Uses = std::shared_ptr<const std::vector<Device::SharedEvent>>;

void wait_for(Device& device, CUstream_st* stream, const Uses& uses) {
  if (uses == nullptr) return;
  for (const Device::SharedEvent& event : *uses) device.wait(stream, event.get());
}
void synchronize(Device& device, const Uses& uses) {
  if (uses == nullptr) return;
  for (const Device::SharedEvent& event : *uses) device.synchronize(event.get());
}

}  // namespace

struct DeviceRegion::State {
  Charge charge;
  Mapped memory;

  State(Ledger& ledger, Device& device, Purpose purpose, std::size_t bytes, bool shared)
      : charge(ledger, Tier::kDevice, purpose, bytes), memory(device, Extent(device, bytes, shared), bytes) {}
};

void DeviceRegion::End::operator()(State* state) const { delete state; }

DeviceRegion::DeviceRegion(Ledger& ledger, Device& device, Purpose purpose, std::size_t bytes, bool shared) {
  if (bytes > 0)
    state_.reset(new State(ledger, device, purpose, round_up(bytes, device.info().extent_bytes), shared));
}
DeviceAddress DeviceRegion::address() const { return state_ == nullptr ? 0 : state_->memory.addresses.get(); }
std::size_t DeviceRegion::size() const { return state_ == nullptr ? 0 : state_->memory.addresses.bytes(); }
Descriptor DeviceRegion::exported() const {
  if (state_ == nullptr) fail(ErrorCode::kIo, "there is no memory of a GPU that others could use");
  return state_->memory.device.export_extent(state_->memory.extent.id());
}

struct OthersDeviceRegion::State {
  Mapped memory;
};

void OthersDeviceRegion::End::operator()(State* state) const { delete state; }

OthersDeviceRegion::OthersDeviceRegion(Device& device, const Descriptor& exported, std::size_t bytes)
    : state_(new State{{device, Extent(device, exported), round_up(bytes, device.info().extent_bytes)}}) {}
DeviceAddress OthersDeviceRegion::address() const {
  return state_ == nullptr ? 0 : state_->memory.addresses.get();
}

struct DeviceHome::State {
  std::string name;
  std::size_t size;
  DeviceFramePool::State& pool;
  Addresses addresses;
  // By place in the home: the extent that is mapped there, or kNone; and how often each extent was wanted
  // there while another home used it.
  std::vector<std::size_t> mapped;
  std::vector<std::size_t> assigned;  // by place: the assigned extent; empty without assignments
  std::vector<std::map<std::size_t, unsigned>> missed;
  std::size_t placed = 0;  // in extents
  Purpose purpose = Purpose::kParameter;
  CUstream_st* user = nullptr;  // the stream that has waited for earlier users of the memory; null: no memory
  Uses last;                    // of work queued with these addresses before the memory was taken away

  State(DeviceFramePool::State& frames, std::string text, std::size_t bytes);
  ~State();
  const std::vector<std::size_t>& wanted() const { return assigned.empty() ? mapped : assigned; }
  State(const State&) = delete;
  State& operator=(const State&) = delete;
};

struct DeviceFramePool::State {
  Ledger& ledger;
  Device& device;
  std::size_t extent_bytes;
  Charge charge;
  struct Frame {
    Extent extent;
    const DeviceHome::State* user;  // null: the extent is free
    std::uint64_t freed;            // a counter, by which the extent that was freed first is found
    std::size_t mappings;           // the number of places at which it is mapped
    Uses last;
  };
  std::vector<Frame> frames;
  std::size_t free = 0;
  std::uint64_t taken_away = 0, maps = 0;
  std::function<void()> before_unmapping;
  bool is_told_of_unmapping = false;  // after a fault of the GPU no home can be unmapped

  State(Ledger& account, Device& gpu, std::size_t bytes, std::size_t extents)
      : ledger(account),
        device(gpu),
        extent_bytes(bytes),
        charge(account, Tier::kDevice, Purpose::kParameter, bytes * extents) {
    frames.reserve(extents);
    while (frames.size() < extents) frames.push_back({Extent(gpu, bytes), nullptr, 0, 0, nullptr});
    free = extents;
  }
  DeviceAddress address(const DeviceHome::State& home, std::size_t place) const {
    return home.addresses.get() + place * extent_bytes;
  }
  std::vector<std::size_t> choose(DeviceHome::State& home, std::size_t count);
  void map(DeviceHome::State& home, const std::vector<std::size_t>& chosen);
  bool wait_until_unused(const DeviceHome::State& home);
  void unmap(DeviceHome::State& home, std::size_t place);
  Uses record(const DeviceHome::State& home);
  void free_frames(DeviceHome::State& home, const Uses& uses);
};

DeviceHome::State::State(DeviceFramePool::State& frames, std::string text, std::size_t bytes)
    : name(std::move(text)),
      size(bytes),
      pool(frames),
      addresses(frames.device, round_up(bytes, frames.extent_bytes)),
      mapped(addresses.bytes() / frames.extent_bytes, kNone),
      missed(mapped.size()) {}

DeviceHome::State::~State() {
  Uses uses;
  if (placed > 0) quietly([&] { uses = pool.record(*this); });
  if (placed > 0) pool.free_frames(*this, uses);
  bool unused = false;
  addresses.unmap(pool.is_told_of_unmapping, [&] { unused = pool.wait_until_unused(*this); });
  for (std::size_t place = 0; place < mapped.size() && unused; ++place)
    addresses.unmap(pool.is_told_of_unmapping, [&] { pool.unmap(*this, place); });
}

DeviceHome::DeviceHome() = default;
DeviceHome::DeviceHome(DeviceFramePool& pool, std::string name, std::size_t bytes) {
  if (bytes == 0) fail(ErrorCode::kInvalidArgument, "the home '{}' was asked for with no bytes", name);
  state_ = std::make_unique<State>(*pool.state_, std::move(name), bytes);
}
DeviceHome::~DeviceHome() = default;
DeviceHome::DeviceHome(DeviceHome&& other) noexcept = default;
DeviceHome& DeviceHome::operator=(DeviceHome&& other) noexcept = default;
DeviceAddress DeviceHome::address() const { return state_->addresses.get(); }
std::size_t DeviceHome::size() const { return state_->size; }
std::size_t DeviceHome::placed() const { return state_->placed * state_->pool.extent_bytes; }

DeviceFramePool::DeviceFramePool(Ledger& ledger, Device& device, std::size_t extent_bytes,
                                 std::size_t extents) {
  const std::size_t piece = device.info().extent_bytes;
  if (extent_bytes == 0 || extents > device.info().memory / extent_bytes)
    fail(ErrorCode::kBudget, "{} frames of {} were asked for on {}, which has {}", extents,
         format_size(extent_bytes), device.info().name, format_size(device.info().memory));
  state_ = std::make_unique<State>(ledger, device, round_up(extent_bytes, piece), extents);
}
DeviceFramePool::~DeviceFramePool() {
  ensure(free_extents() == extents(), "a frame pool ended while homes hold {} of its {} extents",
         extents() - free_extents(), extents());
}
std::size_t DeviceFramePool::extents() const { return state_->frames.size(); }
std::size_t DeviceFramePool::free_extents() const { return state_->free; }
std::size_t DeviceFramePool::extents_for(std::size_t bytes) const {
  return bytes / state_->extent_bytes + (bytes % state_->extent_bytes != 0 ? 1 : 0);
}
std::uint64_t DeviceFramePool::maps() const { return state_->maps; }
std::vector<DeviceAddress> DeviceFramePool::in_the_way(const DeviceHome& home) const {
  std::set<DeviceAddress> users;
  for (const std::size_t frame : home.state_->wanted())
    if (frame != kNone && state_->frames[frame].user != nullptr)
      users.insert(state_->frames[frame].user->addresses.get());
  return {users.begin(), users.end()};
}
void DeviceFramePool::assign(DeviceHome& home, std::vector<std::size_t> numbers) {
  const std::vector<std::size_t>& mapped = home.state_->mapped;
  for (std::size_t place = 0; place < numbers.size(); ++place) {
    const auto there = std::ranges::find(numbers, mapped[place]);
    if (there != numbers.end()) std::swap(*there, numbers[place]);
  }
  home.state_->assigned = std::move(numbers);
}
void DeviceFramePool::before_unmapping(std::function<void()> wait) {
  state_->before_unmapping = std::move(wait);
}

// Chooses frames for the first places of a home. A place gets its assigned frame, or without assignments the
// one mapped there. If another home has that, it gets a free one, and keeps it: first the one that is mapped
// there although another is assigned, then the one wanted in vain least often, then the one mapped at the
// fewest places, then the one that was freed first, for which the stream has least to wait.
std::vector<std::size_t> DeviceFramePool::State::choose(DeviceHome::State& home, std::size_t count) {
  std::vector<std::size_t> chosen(count, kNone), others;
  std::vector<char> is_taken(frames.size());
  for (std::size_t place = 0; place < count; ++place) {
    const std::size_t frame = home.wanted()[place];
    if (frame == kNone) continue;
    if (frames[frame].user != nullptr || is_taken[frame] != 0) {
      ++home.missed[place][frame];
      continue;
    }
    chosen[place] = frame;
    is_taken[frame] = 1;
  }
  for (std::size_t frame = 0; frame < frames.size(); ++frame)
    if (frames[frame].user == nullptr && is_taken[frame] == 0) others.push_back(frame);
  for (std::size_t place = 0; place < count; ++place) {
    if (chosen[place] != kNone) continue;
    const auto rank = [&](std::size_t frame) {
      const auto missed = home.missed[place].find(frame);
      return std::tuple(home.mapped[place] != frame, missed == home.missed[place].end() ? 0U : missed->second,
                        frames[frame].mappings, frames[frame].freed);
    };
    const auto best = std::ranges::min_element(others, {}, rank);
    chosen[place] = *best;
    others.erase(best);
  }
  if (!home.assigned.empty()) home.assigned = chosen;
  return chosen;
}

void DeviceFramePool::State::map(DeviceHome::State& home, const std::vector<std::size_t>& chosen) {
  std::vector<std::size_t> places;
  std::vector<Device::Mapping> mappings;
  for (std::size_t place = 0; place < chosen.size(); ++place) {
    if (home.mapped[place] == chosen[place]) continue;
    places.push_back(place);
    mappings.push_back({address(home, place), frames[chosen[place]].extent.id()});
  }
  if (places.empty()) return;
  if (std::ranges::any_of(places, [&](std::size_t place) { return home.mapped[place] != kNone; }))
    wait_until_unused(home);
  for (const std::size_t place : places) unmap(home, place);
  device.map(extent_bytes, mappings);
  for (const std::size_t place : places) {
    home.mapped[place] = chosen[place];
    ++frames[chosen[place]].mappings;
  }
  maps += places.size();
}

// Waits for all work that uses the home's addresses. Returns false, without a wait, if nothing is mapped
// there.
bool DeviceFramePool::State::wait_until_unused(const DeviceHome::State& home) {
  if (std::ranges::all_of(home.mapped, [](std::size_t frame) { return frame == kNone; })) return false;
  synchronize(device, home.last);
  if (before_unmapping) before_unmapping();
  return true;
}

void DeviceFramePool::State::unmap(DeviceHome::State& home, std::size_t place) {
  if (home.mapped[place] == kNone) return;
  device.unmap(address(home, place), extent_bytes);
  --frames[home.mapped[place]].mappings;
  home.mapped[place] = kNone;
}

bool DeviceFramePool::place(DeviceHome& home, std::size_t bytes, Purpose purpose, CUstream_st* user) {
  if (home.state_ == nullptr || &home.state_->pool != state_.get())
    fail(ErrorCode::kState, "frames cannot be placed under a home that is not of their pool");
  DeviceHome::State& target = *home.state_;
  if (target.placed > 0)
    fail(ErrorCode::kState, "the home '{}' has memory under it already; take it away first", target.name);
  if (bytes > target.size)
    fail(ErrorCode::kInvalidArgument, "{} bytes do not fit the home '{}', which has {}", bytes, target.name,
         target.size);
  const std::size_t count = extents_for(bytes);
  if (count > state_->free) return false;
  const std::vector<std::size_t> chosen = state_->choose(target, count);
  state_->map(target, chosen);
  std::set<Uses> before;
  for (const std::size_t frame : chosen) before.insert(state_->frames[frame].last);
  for (const Uses& uses : before) wait_for(state_->device, user, uses);
  for (const std::size_t frame : chosen) state_->frames[frame].user = &target;
  state_->free -= count;
  target.placed = count;
  target.user = user;
  target.purpose = purpose;
  state_->ledger.move(Tier::kDevice, Purpose::kParameter, purpose, count * state_->extent_bytes);
  return true;
}

// Records an event on the stream that placed the memory.
Uses DeviceFramePool::State::record(const DeviceHome::State& home) {
  std::vector<Device::SharedEvent> events;
  events.emplace_back(device.make_event(false));
  device.record(events.back().get(), home.user);
  return std::make_shared<const std::vector<Device::SharedEvent>>(std::move(events));
}

void DeviceFramePool::State::free_frames(DeviceHome::State& home, const Uses& uses) {
  for (std::size_t place = 0; place < home.placed; ++place) {
    Frame& frame = frames[home.mapped[place]];
    frame.user = nullptr;
    frame.freed = ++taken_away;
    frame.last = uses;
  }
  home.last = uses;
  free += home.placed;
  ledger.move(Tier::kDevice, home.purpose, Purpose::kParameter, home.placed * extent_bytes);
  home.placed = 0;
}

void DeviceFramePool::take_away(DeviceHome& home, std::vector<Device::SharedEvent> last) {
  if (home.state_ == nullptr || home.state_->placed == 0) return;
  state_->free_frames(*home.state_,
                      std::make_shared<const std::vector<Device::SharedEvent>>(std::move(last)));
}

}  // namespace sluice::allocator
