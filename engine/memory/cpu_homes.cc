#include <algorithm>
#include <utility>

#include "engine/memory/homes.h"

namespace sluice::engine {

std::vector<Homes::Packed> Homes::packed(std::array<std::size_t, allocator::kPurposes>& bytes) const {
  std::vector<Packed> all;
  bytes = {};
  for (HoldingId holding = 0; holding < count(); ++holding) {
    if (!in_region(holding) || !in_shared_pages(holding)) continue;
    const auto purpose = static_cast<std::size_t>(spec(holding).purpose);
    all.push_back({holding, purpose, bytes[purpose]});
    bytes[purpose] += packed_bytes(spec(holding).bytes);
  }
  return all;
}

namespace {

using allocator::FramePool;
using allocator::Home;
using allocator::Region;

class CpuHomes final : public Homes {
 public:
  explicit CpuHomes(allocator::Ledger& ledger) : Homes(kCpuTier), ledger_(ledger) {}

  void start(std::size_t extent_bytes, std::size_t extents) override {
    places_.resize(count());
    std::size_t taken = extents, small = 0;
    std::size_t most = 0;  // extents that a later plan may need
    for (HoldingId id = 0; id < count(); ++id) {
      const std::size_t bytes = spec(id).bytes;
      if (in_shared_pages(id)) {
        if (spec(id).exposed) small += packed_exposed_bytes(bytes) / allocator::kSmallestExtent;
        continue;
      }
      most += divide_up(bytes, extent_bytes);
      if (resident(id) && spec(id).exposed) taken += divide_up(bytes, extent_bytes);
    }
    if (taken > 0) pool_ = std::make_unique<FramePool>(ledger_, extent_bytes, taken, most);
    if (small > 0) small_pool_ = std::make_unique<FramePool>(ledger_, allocator::kSmallestExtent, small);
    make_homes();
    take_packed();
    for (HoldingId id = 0; id < count(); ++id) {
      if (in_region(id) && !in_shared_pages(id))
        places_[id].region = Region(ledger_, spec(id).purpose, spec(id).bytes);
      else if (resident(id) && spec(id).exposed)
        ensure(place(id), "no frames for '{}'", spec(id).name);
    }
  }

  std::byte* data(HoldingId id) const override {
    if (in_region(id)) return region_of(id);
    return is_hidden(id) ? places_[id].hidden.data() : places_[id].home.data();
  }
  std::byte* address(HoldingId id) const override {
    return in_region(id) ? region_of(id) : places_[id].home.data();
  }

  std::size_t extents() const override { return pool_ == nullptr ? 0 : pool_->extents(); }
  std::size_t free_extents() const override { return pool_ == nullptr ? 0 : pool_->free_extents(); }
  std::size_t extents_for(HoldingId id) const override { return pool_->extents_for(spec(id).bytes); }
  bool place(HoldingId id) override {
    Home& home = spec(id).exposed ? places_[id].hidden : places_[id].home;
    return pool_of(id).place(home, spec(id).bytes, spec(id).purpose);
  }
  void take_away(HoldingId id) override {
    if (pool_ == nullptr) return;
    pool_->shrink(places_[id].home, 0);
    pool_->shrink(places_[id].hidden, 0);
  }

  void view(HoldingId id, bool writable) override {
    ++(writable ? places_[id].writers : places_[id].readers);
  }
  void conceal(HoldingId id, bool writable) override {
    --(writable ? places_[id].writers : places_[id].readers);
  }
  bool must_move(HoldingId id, bool writable) const override { return is_hidden(id) || writable; }
  bool is_shown(HoldingId id) const override { return spec(id).exposed && places_[id].home.placed() > 0; }
  void arrange(HoldingId id) override {
    if (!spec(id).exposed) return;
    Place& place = places_[id];
    FramePool& pool = pool_of(id);
    if (place.readers + place.writers == 0) {
      if (!is_hidden(id)) pool.move(place.home, place.hidden);
      return;
    }
    if (is_hidden(id)) pool.move(place.hidden, place.home);
    pool.protect(place.home, place.writers > 0 ? FramePool::Access::kWrite : FramePool::Access::kRead);
  }
  void serve_touches(allocator::TouchServer& server) const override {
    for (HoldingId id = 0; id < count(); ++id)
      if (spec(id).exposed) server.serve(places_[id].home);
  }

  void set_tier(HoldingId id, allocator::Tier tier) override {
    spec_of(id).tier = tier;
    if (spec(id).exposed) return;
    Place& place = places_[id];
    if (resident(id)) {
      place.home = {};
      place.region = Region(ledger_, spec(id).purpose, spec(id).bytes);
    } else {
      place.region = {};
      place.home = Home(spec(id).name, spec(id).bytes);
    }
  }
  void take_more(std::size_t extents) override {
    if (pool_ != nullptr) pool_->take_more(extents);
  }
  void give_back(std::size_t extents) override {
    if (pool_ != nullptr) pool_->give_back(extents);
  }

  void drop_unexposed() override {
    for (HoldingId id = 0; id < count(); ++id) {
      if (spec(id).exposed) continue;
      places_[id].region = {};
      take_away(id);
    }
    packed_.clear();
  }

  allocator::FormerHome leave(HoldingId id, bool with_contents) override {
    Place& place = places_[id];
    allocator::FormerHome former;
    if (with_contents) {
      former = pool_of(id).leave(place.home);
    } else {
      for (Home* const home : {&place.home, &place.hidden})
        if (home->placed() > 0) pool_of(id).shrink(*home, 0);
      former = allocator::FormerHome(std::move(place.home));
    }
    place = {};
    spec_of(id).exposed = false;
    if (pool_ != nullptr) pool_->give_back(frames_for_any());
    if (small_pool_ != nullptr) small_pool_->give_back(small_pool_->extents() - small_pool_->free_extents());
    return former;
  }

  // Memory grows by the copy of one unit, and by what all units take beyond the frames that are given back.
  Leaving leaving() const override {
    Leaving result;
    std::size_t all = 0, most = 0, needed = pool_ == nullptr ? 0 : frames_for_any();
    for (const Region& region : packed_) result.given_back += region.size();
    for (HoldingId id = 0; id < count(); ++id) {
      if (!spec(id).exposed) {
        result.given_back += places_[id].region.size();
        continue;
      }
      if (in_shared_pages(id)) {
        result.growth = std::max(result.growth, packed_exposed_bytes(spec(id).bytes));
        continue;
      }
      const std::size_t extents = extents_for(id);
      all += extents;
      most = std::max(most, extents);
      if (resident(id)) needed -= extents;
    }
    if (pool_ == nullptr) return result;
    const std::size_t beyond = all + needed - std::min(all + needed, pool_->extents());
    result.growth = std::max(result.growth, (most + beyond) * pool_->extent_bytes());
    return result;
  }

 private:
  struct Place {
    Region region;                // of a resident, unexposed holding
    std::byte* packed = nullptr;  // of a packed one instead: a part of packed_
    Home home;                    // its address range, where it has no region
    Home hidden;                  // holds the memory of an exposed holding while nobody views it
    int readers = 0, writers = 0;
  };
  std::byte* region_of(HoldingId id) const {
    return places_[id].packed != nullptr ? places_[id].packed : places_[id].region.data();
  }
  bool is_hidden(HoldingId id) const { return places_[id].hidden.placed() > 0; }
  FramePool& pool_of(HoldingId id) const { return in_shared_pages(id) ? *small_pool_ : *pool_; }

  void make_homes() {
    std::vector<HoldingId> group;  // holdings with adjoining homes
    const auto make_group = [&] {
      std::vector<Home::Part> parts;
      for (const HoldingId id : group) parts.push_back({spec(id).name, spec(id).bytes});
      if (group.empty()) return;
      std::vector<Home> homes = Home::adjoining(parts);
      for (std::size_t i = 0; i < group.size(); ++i) places_[group[i]].home = std::move(homes[i]);
      group.clear();
    };
    for (HoldingId id = 0; id < count(); ++id) {
      if (in_region(id)) continue;
      if (!spec(id).adjoins) make_group();
      group.push_back(id);
      if (spec(id).exposed) places_[id].hidden = Home(spec(id).name, spec(id).bytes);
    }
    make_group();
  }

  void take_packed() {
    std::array<std::size_t, allocator::kPurposes> bytes;
    const std::vector<Packed> all = packed(bytes);
    for (std::size_t purpose = 0; purpose < bytes.size(); ++purpose)
      packed_.emplace_back(ledger_, static_cast<allocator::Purpose>(purpose), bytes[purpose]);
    for (const Packed& one : all) places_[one.holding].packed = packed_[one.purpose].data() + one.offset;
  }

  // The frames that the exposed holdings need, if those that are not resident become present one at a time.
  std::size_t frames_for_any() const {
    std::size_t of_residents = 0, largest = 0;
    for (HoldingId id = 0; id < count(); ++id) {
      if (!spec(id).exposed || in_shared_pages(id)) continue;
      if (resident(id))
        of_residents += extents_for(id);
      else
        largest = std::max(largest, extents_for(id));
    }
    return of_residents + largest;
  }

  allocator::Ledger& ledger_;
  // small_pool_ has small frames, for packed exposed holdings. Both outlive the homes.
  std::unique_ptr<FramePool> pool_, small_pool_;
  std::vector<Region> packed_;  // memory of packed unexposed holdings, by purpose
  std::vector<Place> places_;   // by holding
};

}  // namespace

std::unique_ptr<Homes> make_cpu_homes(allocator::Ledger& ledger) {
  return std::make_unique<CpuHomes>(ledger);
}

}  // namespace sluice::engine
