#include <gtest/gtest-spi.h>

#include <set>
#include <utility>

#include "cuda/engine_client.h"
#include "engine/store/device_work.h"

// Mutants: an engine whose waits are left out, all those of a kind at a time, by the fake driver. Each must
// show, as other bits than the CPU's, as an error, or as a misuse that the driver notices.
namespace sluice::engine::twins {
namespace left_out_waits_test {

using allocator::Tier;
using fake_cuda::LeftOut;

// Streams in the order in which train_on_gpu() and DeviceWork make them.
enum Stream { kClient, kIn, kOut, kUpdates };
constexpr const char* kNames[] = {"the client's", "in", "out", "updates"};

class LeftOutWaitsTest : public KernelTest {
 protected:
  using Schedule = fake_cuda::Schedule;
  struct Scenario {
    Case setup;
    Outcome expected;
  };

  static Case base() {
    Case setup;
    setup.blocks = 10;  // more than there are frames and slots for
    setup.steps = 2, setup.micro_batches = 2;
    return setup;
  }
  // What together uses every way in which memory passes from one stream to another.
  static std::vector<Scenario> scenarios() {
    std::vector<Case> cases(8, base());
    cases[0].places = {Tier::kHost, Tier::kHost, Tier::kHost};
    cases[1].places = {Tier::kDevice, Tier::kDevice, Tier::kDevice};
    cases[2].places = {Tier::kDisk, Tier::kDisk, Tier::kDisk};
    cases[3].places = {Tier::kHost, Tier::kHost, Tier::kDevice};
    cases[3].edits = cases[3].keeps = true;
    cases[3].dtype = Dtype::kBf16;
    cases[3].steps = 4;
    cases[4].places = {Tier::kDevice, Tier::kHost, Tier::kHost};
    cases[4].optimizer = {"sgd", Json::object()};
    cases[5].places = {Tier::kDevice, Tier::kDevice, Tier::kDevice};
    cases[5].looks = true;
    cases[6].places = {Tier::kHost, Tier::kHost, Tier::kHost};
    cases[6].updates = Tier::kHost;
    cases[7].places = {Tier::kHost, Tier::kHost, Tier::kDevice};
    cases[7].leaves = true;
    std::vector<Scenario> result;
    for (Case& setup : cases) {
      result.push_back({setup, train_on_cpu(setup)});
      result.back().setup.device = 128 * kMiB;
    }
    return result;
  }

  // Whether the training is as the CPU's, without an error and without a misuse.
  bool is_right(const Scenario& scenario, std::uint64_t seed, const std::optional<LeftOut>& left_out) {
    device_.reset();
    fake()->begin({.schedule = seed == 0 ? Schedule::kLate : Schedule::kRandom, .seed = seed});
    if (left_out) fake()->leave_out(*left_out);
    bool is_right = false;
    {
      // What fails at the end, too, is expected here.
      testing::TestPartResultArray failures;
      const testing::ScopedFakeTestPartResultReporter reporter(
          testing::ScopedFakeTestPartResultReporter::INTERCEPT_ONLY_CURRENT_THREAD, &failures);
      try {
        device_ = open_device(0);
        is_right = train_on_gpu(scenario.setup, *device_, [](Made&) {}) == scenario.expected;
      } catch (const Error&) {
      }
      device_.reset();
      is_right &= failures.size() == 0;
    }
    times_ += fake()->left_out();
    const bool misused = !fake()->take_misuses().empty();
    const bool leaks = !fake()->alive().empty();
    fake()->begin({});
    return is_right && !misused && !leaks;
  }

  static std::string text(const LeftOut& what) {
    std::string text = what.function + " of " + kNames[what.stream];
    if (what.awaited >= 0) text += std::string(" for ") + kNames[what.awaited];
    return text;
  }

  std::uint64_t times_ = 0;  // something was left out
};

TEST_F(LeftOutWaitsTest, EachIsFound) {
  SLUICE_NEEDS_THE_FAKE();
  std::vector<LeftOut> mutants;
  for (const Stream stream : {kClient, kIn, kOut, kUpdates}) {
    for (const Stream awaited : {kClient, kIn, kOut, kUpdates}) {
      // Before anything is updated the caller has waited for the norm, which goes out last. And what the
      // client changes while it goes out goes out again, over what went out then.
      const bool is_needless = stream == kUpdates || stream == kClient ? awaited == kOut : false;
      if (awaited != stream && !is_needless) mutants.push_back({"cuStreamWaitEvent", stream, awaited});
    }
    mutants.push_back({"cuEventRecord", stream});
  }
  mutants.push_back({"cuStreamSynchronize", kUpdates});
  for (const Stream stream : {kIn, kOut})
    for (const char* function : {"cuEventSynchronize", "cuEventQuery"}) mutants.push_back({function, stream});
  const std::vector<Scenario> all = scenarios();
  std::set<std::pair<std::uint64_t, std::size_t>> needed;  // the orders in which a mutant was found
  for (std::size_t i = 0; i < all.size(); ++i) needed.emplace(0, i);
  for (const LeftOut& mutant : mutants) {
    times_ = 0;
    bool is_found = false;
    for (std::uint64_t seed = 0; seed < 3 && !is_found; ++seed)
      for (std::size_t i = 0; i < all.size() && !is_found; ++i) {
        is_found = !is_right(all[i], seed, mutant);
        if (is_found) needed.emplace(seed, i);
      }
    EXPECT_TRUE(is_found) << text(mutant) << ", left out " << times_ << " times";
  }
  for (const auto& [seed, i] : needed) EXPECT_TRUE(is_right(all[i], seed, std::nullopt)) << i << ' ' << seed;
}

// Before memory is unmapped, in the first steps and at the end.
TEST_F(LeftOutWaitsTest, EachStreamThatNobodyWaitsForIsFound) {
  SLUICE_NEEDS_THE_FAKE();
  for (int left_out = -1; left_out < 4; ++left_out) {
    device_.reset();
    fake()->begin({.schedule = Schedule::kLate});
    if (left_out >= 0) fake()->leave_out({"cuStreamSynchronize", left_out});
    device_ = open_device(0);
    allocator::Ledger ledger;
    const allocator::DeviceRegion memory(ledger, *device_, allocator::Purpose::kStaging, kHugePage);
    DeviceWork work(*device_);
    int stream_index = 0;
    for (CUstream_st* const stream : {work.in(), work.out(), work.updates(), work.client()}) {
      const Device::Event event = device_->make_event(false);
      device_->fill(stream, memory.address(), std::byte{1}, 16);
      device_->record(event.get(), stream);
      work.wait_for_all();
      EXPECT_EQ(device_->is_done(event.get()), stream_index++ != left_out);
      device_->synchronize(event.get());
    }
  }
}

}  // namespace left_out_waits_test
}  // namespace sluice::engine::twins
