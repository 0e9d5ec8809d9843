#include "allocator/device_memory.h"
#include "core/bytes.h"
#include "cuda/gpu.h"

// Homes that share frames, of which each stream uses those that it has waited for.
namespace sluice::allocator::shared_frames_test {

// Passes over units, forward and backward, whose contents are copied in ahead on one stream and read on
// another one, as an engine does it. Units leave in the order in which they are needed latest.
class Passes {
 public:
  Passes(Device& device, const std::vector<std::size_t>& extents_of_units, std::size_t frames,
         bool names_users = true)
      : device_(device), names_users_(names_users), pool_(ledger_, device, 2 * kMiB, frames) {
    for (const std::size_t extents : extents_of_units) {
      const std::size_t bytes = extents * 2 * kMiB - 4096;
      homes_.emplace_back(pool_, "unit", bytes);
      contents_.push_back(std::make_unique<HostMemory>(device, kStamp));
      std::fill_n(contents_.back()->data(), kStamp, static_cast<std::byte>(homes_.size()));
    }
  }
  ~Passes() {
    device_.synchronize(in_.get());
    device_.synchronize(compute_.get());
    for (std::size_t unit = 0; unit < homes_.size(); ++unit) leave(unit);
  }
  Passes(const Passes&) = delete;
  Passes& operator=(const Passes&) = delete;

  void step() {
    const int count = static_cast<int>(homes_.size());
    for (int unit = 0; unit < count; ++unit) access(static_cast<std::size_t>(unit), unit, 1);
    for (int unit = count - 1; unit >= 0; --unit) access(static_cast<std::size_t>(unit), unit, -1);
  }
  // How many of the reads so far found other contents than the unit's.
  int wrong() {
    device_.synchronize(compute_.get());
    int wrong = 0;
    for (const auto& [unit, read] : reads_) wrong += read->values() == contents_[unit]->values() ? 0 : 1;
    reads_.clear();
    return wrong;
  }
  std::uint64_t maps() const { return pool_.maps(); }

 private:
  static constexpr std::size_t kStamp = 64;

  void access(std::size_t unit, int at, int direction) {
    while (homes_[unit].placed() == 0 &&
           !pool_.place(homes_[unit], homes_[unit].size(), Purpose::kParameter, in_.get()))
      leave(furthest(at, direction));
    const DeviceAddress end = homes_[unit].address() + homes_[unit].size() - kStamp;
    if (is_current_.insert(unit).second) {
      device_.copy_in(in_.get(), homes_[unit].address(), contents_[unit]->data(), kStamp);
      device_.copy_in(in_.get(), end, contents_[unit]->data(), kStamp);
      device_.record(arrived_.get(), in_.get());
      device_.wait(compute_.get(), arrived_.get());
    }
    for (const DeviceAddress from : {homes_[unit].address(), end}) {
      reads_.emplace_back(unit, std::make_unique<HostMemory>(device_, kStamp));
      device_.copy_out(compute_.get(), reads_.back().second->data(), from, kStamp);
    }
  }
  // Of the units that are there, the one whose next use is latest.
  std::size_t furthest(int at, int direction) {
    std::optional<std::size_t> found;
    int latest = -1;
    const int count = static_cast<int>(homes_.size());
    for (int unit = 0; unit < count; ++unit) {
      if (homes_[static_cast<std::size_t>(unit)].placed() == 0) continue;
      const int ahead = (unit - at) * direction;
      const int turn = direction > 0 ? count - 1 - at : at;
      const int next = ahead > 0 ? ahead : 2 * turn + 1 - ahead;
      if (next > latest) latest = next, found = static_cast<std::size_t>(unit);
    }
    return found.value();
  }
  void leave(std::size_t unit) {
    const std::array users{in_.get(), compute_.get()};
    is_current_.erase(unit);
    const auto named = std::span(users).first(names_users_ ? users.size() : 0);
    pool_.take_away(homes_[unit], reached(device_, named));
  }

  Device& device_;
  bool names_users_;
  Ledger ledger_;
  DeviceFramePool pool_;
  Device::Stream in_ = device_.make_stream(true), compute_ = device_.make_stream(false);
  Device::Event arrived_ = device_.make_event(false);
  std::vector<DeviceHome> homes_;
  std::vector<std::unique_ptr<HostMemory>> contents_;
  std::vector<std::pair<std::size_t, std::unique_ptr<HostMemory>>> reads_;
  std::set<std::size_t> is_current_;
};

using SharedFramesTest = GpuTest;

TEST_F(SharedFramesTest, UnitsThatShareFramesKeepTheirContentsInEverySchedule) {
  const auto passes = [] {
    const auto device = open_device(0);
    Passes several(*device, {1, 2, 1, 3, 2, 1}, 4);
    for (int step = 0; step < 3; ++step) several.step();
    EXPECT_EQ(several.wrong(), 0);
  };
  if (fake() == nullptr) return passes();
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    fake()->begin({.schedule = seed == 0   ? Schedule::kEarly
                               : seed == 1 ? Schedule::kLate
                                           : Schedule::kRandom,
                   .seed = seed});
    passes();
    ASSERT_EQ(fake()->take_misuses(), std::vector<std::string>{}) << seed;
    ASSERT_EQ(fake()->alive(), std::vector<std::string>{}) << seed;
  }
}

// The test before must be able to fail: where those who used frames are not named, some schedule shows it.
TEST_F(SharedFramesTest, FramesThatPassOnWithoutAWaitShow) {
  SLUICE_NEEDS_THE_FAKE();
  int wrong = 0, misuses = 0;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    fake()->begin({.schedule = Schedule::kRandom, .seed = seed});
    const auto device = open_device(0);
    Passes several(*device, {1, 1, 1, 1, 1, 1}, 3, false);
    for (int step = 0; step < 3; ++step) several.step();
    wrong += several.wrong();
    misuses += static_cast<int>(fake()->take_misuses().size());
  }
  EXPECT_GT(wrong + misuses, 0);
}

TEST_F(SharedFramesTest, ASteadyOrderMapsNothingAfterTwoSteps) {
  const auto device = open_device(0);
  for (const std::vector<std::size_t>& units :
       {std::vector<std::size_t>(12, 1), std::vector<std::size_t>(9, 2),
        std::vector<std::size_t>{3, 1, 1, 1, 1, 1, 3},
        std::vector<std::size_t>{1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4}}) {
    Passes several(*device, units, 8);
    several.step();
    several.step();
    const std::uint64_t maps = several.maps();
    for (int step = 0; step < 4; ++step) several.step();
    EXPECT_EQ(several.maps(), maps) << units.size();
    EXPECT_EQ(several.wrong(), 0);
  }
}

}  // namespace sluice::allocator::shared_frames_test
