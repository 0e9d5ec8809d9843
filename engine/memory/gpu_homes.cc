#include <map>
#include <span>
#include <utility>

#include "allocator/device_memory.h"
#include "engine/memory/frame_assignment.h"
#include "engine/memory/homes.h"

// Frames of a GPU. Remapping a home to other frames stalls the whole GPU. So each holding has frames of its
// own, which it shares with holdings that are used far from it, and is fetched by evicting what is in them.
// That may cost more fetches than if it could take any frames.
namespace sluice::engine {
namespace {

using allocator::DeviceFramePool;
using allocator::DeviceHome;
using allocator::DeviceRegion;

// The first few schedules get frames assigned at once: the guessed one, and those of two steps. A later one
// gets them when it comes twice in a row, so that schedules which keep changing do not remap homes in each
// step.
constexpr int kAtOnce = 3;

class GpuMemory final : public CheckedBacking {
 public:
  using CheckedBacking::store;
  GpuMemory(DeviceWork& gpu, std::byte* data) : gpu_(gpu), data_(data) {}
  void fetch(std::uint64_t offset, std::span<std::byte> into, Done done) override {
    end_queued(done, [&] { gpu_.copy_out(into.data(), {data_ + offset, into.size()}); });
  }
  void store(std::uint64_t offset, std::span<const std::byte> from, Done done) override {
    end_queued(done, [&] { gpu_.copy_in(data_ + offset, from); });
  }

 private:
  DeviceWork& gpu_;
  std::byte* const data_;
};

DeviceWork::Use use_of(bool writable) { return writable ? DeviceWork::Use::kWrite : DeviceWork::Use::kRead; }

std::byte* pointer(DeviceAddress address) { return reinterpret_cast<std::byte*>(address); }

class GpuHomes final : public Homes {
 public:
  GpuHomes(allocator::Ledger& ledger, DeviceWork& gpu)
      : Homes(allocator::Tier::kDevice), ledger_(ledger), gpu_(gpu) {}
  ~GpuHomes() override { gpu_.finish(); }
  GpuHomes(const GpuHomes&) = delete;
  GpuHomes& operator=(const GpuHomes&) = delete;

  void start(std::size_t extent_bytes, std::size_t extents) override {
    places_.resize(count());
    if (extents > 0) {
      pool_ = std::make_unique<DeviceFramePool>(ledger_, gpu_.device(), extent_bytes, extents);
      pool_->before_unmapping([this] { gpu_.wait_for_all(); });
    }
    take_packed();
    for (HoldingId id = 0; id < count(); ++id) {
      Place& place = places_[id];
      ensure(!spec(id).exposed && !spec(id).adjoins, "'{}' is exposed, or adjoins another one, on a GPU",
             spec(id).name);
      if (!resident(id)) {
        place.home = DeviceHome(*pool_, spec(id).name, spec(id).bytes);
        by_address_[place.home.address()] = id;
      } else if (!spec(id).packed) {
        place.region = DeviceRegion(ledger_, gpu_.device(), spec(id).purpose, spec(id).bytes);
      }
      gpu_.add(memory(id), spec(id).bytes);
    }
  }

  std::byte* data(HoldingId id) const override {
    const Place& place = places_[id];
    if (place.packed != nullptr) return place.packed;
    return pointer(resident(id) ? place.region.address() : place.home.address());
  }
  std::byte* address(HoldingId id) const override { return data(id); }

  std::size_t extents() const override { return pool_ == nullptr ? 0 : pool_->extents(); }
  std::size_t free_extents() const override { return pool_ == nullptr ? 0 : pool_->free_extents(); }
  std::size_t extents_for(HoldingId id) const override { return pool_->extents_for(spec(id).bytes); }
  // The frames may be used on the stream that copies units in, and on others after that.
  bool place(HoldingId id) override {
    if (!pool_->place(places_[id].home, spec(id).bytes, spec(id).purpose, gpu_.in())) return false;
    gpu_.end(gpu_.in(), memory(id), DeviceWork::Use::kWrite);
    return true;
  }
  void take_away(HoldingId id) override { pool_->take_away(places_[id].home, gpu_.give_up(memory(id))); }

  void set_schedule(const Schedule& accesses, const Schedule& held) override {
    const bool comes_again = accesses == last_.accesses && held == last_.held;
    if (!comes_again) last_ = {accesses, held};
    if (pool_ == nullptr || accesses.empty() || last_ == assigned_for_) return;
    if (assignments_ >= kAtOnce && !comes_again) return;
    ++assignments_;
    assigned_for_ = last_;
    std::vector<std::size_t> needed(count());
    for (HoldingId id = 0; id < count(); ++id)
      if (!resident(id)) needed[id] = extents_for(id);
    std::vector<std::vector<std::size_t>> assigned = assign_frames(accesses, held, needed, extents());
    for (HoldingId id = 0; id < count(); ++id)
      if (!assigned[id].empty()) pool_->assign(places_[id].home, std::move(assigned[id]));
  }
  bool assigns() const override { return true; }
  std::vector<HoldingId> in_the_way(HoldingId id) const override {
    std::vector<HoldingId> all;
    for (const DeviceAddress address : pool_->in_the_way(places_[id].home))
      all.push_back(by_address_.at(address));
    return all;
  }

  // A GPU's holding is always accessible; begin() and end() order the client's work.
  void view(HoldingId id, bool writable) override {
    if (writable) ++places_[id].writers;
    gpu_.begin(gpu_.client(), memory(id), use_of(writable));
  }
  void conceal(HoldingId id, bool writable) override {
    if (writable) --places_[id].writers;
    gpu_.end(gpu_.client(), memory(id), use_of(writable));
  }
  void share_what_is_written(HoldingId id) override {
    if (places_[id].writers > 0) gpu_.end(gpu_.client(), memory(id), DeviceWork::Use::kWrite);
  }
  // Its memory stays at one address for good.
  Backing& as_backing(HoldingId id) override {
    std::unique_ptr<Backing>& backing = places_[id].as_backing;
    if (!backing) backing = std::make_unique<GpuMemory>(gpu_, data(id));
    return *backing;
  }

  void set_tier(HoldingId id, allocator::Tier /*tier*/) override { refuse_on_gpu(id); }
  void take_more(std::size_t /*extents*/) override { refuse_on_gpu(0); }
  void give_back(std::size_t /*extents*/) override { refuse_on_gpu(0); }
  void drop_unexposed() override { refuse_on_gpu(0); }
  allocator::FormerHome leave(HoldingId id, bool /*with_contents*/) override { refuse_on_gpu(id); }
  Leaving leaving() const override { return {}; }

 private:
  struct Place {
    DeviceRegion region;          // memory of a resident holding
    std::byte* packed = nullptr;  // of a packed one instead: a part of packed_
    DeviceHome home;              // its address range, where it is not resident
    int writers = 0;
    std::unique_ptr<Backing> as_backing;  // null until requested
  };
  struct Order {
    Schedule accesses, held;
    bool operator==(const Order&) const = default;
  };

  [[noreturn]] void refuse_on_gpu(HoldingId id) const {
    fail(ErrorCode::kInternal, "'{}' is to move or to leave, and is on a GPU", spec(id).name);
  }
  DeviceWork::Memory memory(HoldingId id) const { return {data(id), spec(id).bytes}; }

  void take_packed() {
    std::array<std::size_t, allocator::kPurposes> bytes;
    const std::vector<Packed> all = packed(bytes);
    for (std::size_t purpose = 0; purpose < bytes.size(); ++purpose)
      packed_.emplace_back(ledger_, gpu_.device(), static_cast<allocator::Purpose>(purpose), bytes[purpose]);
    for (const Packed& one : all)
      places_[one.holding].packed = pointer(packed_[one.purpose].address()) + one.offset;
  }

  allocator::Ledger& ledger_;
  DeviceWork& gpu_;
  std::unique_ptr<DeviceFramePool> pool_;  // outlives the homes
  std::vector<DeviceRegion> packed_;       // memory of packed holdings, by purpose
  std::vector<Place> places_;              // by holding
  std::map<DeviceAddress, HoldingId> by_address_;
  Order last_, assigned_for_;  // the last schedule, and the last one with assigned frames
  int assignments_ = 0;        // how many schedules got frames
};

}  // namespace

std::unique_ptr<Homes> make_gpu_homes(allocator::Ledger& ledger, DeviceWork& gpu) {
  return std::make_unique<GpuHomes>(ledger, gpu);
}

}  // namespace sluice::engine
