#pragma once
#include <ctime>

#include "cuda/engine_client.h"
#include "testing.h"

namespace sluice::engine::twins {

inline constexpr auto kDevice = allocator::Tier::kDevice;
inline constexpr auto kHost = allocator::Tier::kHost;
inline constexpr auto kDisk = allocator::Tier::kDisk;

class DeviceEngineTest : public KernelTest {
 protected:
  void expect_twin(const Case& setup, const Outcome& expected) {
    const Outcome found = train_on_gpu(setup, *device_, [&](Made& made) { check_memory(made); });
    EXPECT_EQ(found.norms, expected.norms);
    EXPECT_TRUE(found.seen == expected.seen) << "the client saw other parameters";
    EXPECT_TRUE(found == expected) << "parameters or optimizer state differ";
  }
  // A fake driver that begins anew.
  void begin(Schedule schedule, std::uint64_t seed) {
    device_.reset();
    fake()->begin({.schedule = schedule, .seed = seed});
    device_ = open_device(0);
  }
  // A test's share of the orders that are tried: as many as $SLUICE_SEEDS says, or else the same few each day
  // and as many that are new each day. (A real GPU has an order of its own.)
  static std::vector<std::uint64_t> seeds(std::uint64_t first, std::uint64_t tests) {
    const char* const asked = std::getenv("SLUICE_SEEDS");
    std::vector<std::uint64_t> all;
    for (std::uint64_t seed = first; seed < (asked == nullptr ? tests : std::strtoull(asked, nullptr, 10));
         seed += tests)
      all.push_back(seed);
    const std::uint64_t day = static_cast<std::uint64_t>(std::time(nullptr)) / 86400;
    if (asked == nullptr && fake() != nullptr) all.push_back(day * tests + first);
    return all;
  }
  static void check_memory(const Made& made) {
    const auto ledger = made.ledger.snapshot();
    for (const auto tier : {kDevice, kHost})
      for (std::size_t purpose = 0; purpose < allocator::kPurposes; ++purpose) {
        if (purpose == static_cast<std::size_t>(allocator::Purpose::kBase)) continue;
        EXPECT_GE(made.plan.bytes[static_cast<std::size_t>(tier)][purpose],
                  ledger.lines[static_cast<std::size_t>(tier)][purpose].current)
            << name_of(tier) << ' ' << name_of(static_cast<allocator::Purpose>(purpose));
      }
    EXPECT_EQ(ledger.total[static_cast<std::size_t>(kDevice)].peak, made.plan.device_bytes);
    EXPECT_EQ(ledger.total[static_cast<std::size_t>(kHost)].peak, made.plan.peak_memory);
  }
};

}  // namespace sluice::engine::twins
