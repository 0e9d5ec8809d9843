#pragma once
#include <array>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "allocator/timeline.h"

namespace sluice::allocator {

// Where the compute device is the CPU its memory is kHost, and kDevice has nothing.
enum class Tier : std::uint8_t { kDevice, kHost, kDisk };
enum class Purpose : std::uint8_t {
  kParameter,
  kGradient,
  kOptimizerState,
  kActivation,
  kStaging,
  kWorkspace,
  kCheckpoint,
  kBase,  // the process itself: code, libraries, small objects
};
inline constexpr std::size_t kTiers = 3;
inline constexpr std::size_t kPurposes = 8;
// Those that people and programs are told of where the compute device is the CPU.
inline constexpr std::array kTiersOfCpu = {Tier::kHost, Tier::kDisk};
std::string_view name_of(Tier tier);        // "device", "host", "disk"
std::string_view name_of(Purpose purpose);  // "parameter", "gradient", "optimizer state", ...

// The account of every byte held, by tier and purpose, with current value and peak, and the place where a
// budget is enforced: a charge that would pass it throws before any memory is taken. Thread rule: all
// functions from any thread.
class Ledger {
 public:
  struct Line {
    std::uint64_t current = 0;
    std::uint64_t peak = 0;
  };
  struct Snapshot {
    std::array<std::array<Line, kPurposes>, kTiers> lines;
    std::array<Line, kTiers> total;
    std::array<std::optional<std::uint64_t>, kTiers> budget;
  };

  Ledger() = default;
  Ledger(const Ledger&) = delete;
  Ledger& operator=(const Ledger&) = delete;

  // The hard limit of a tier; none at first. Throws Error(kBudget) where more than that is held already.
  void set_budget(Tier tier, std::uint64_t bytes);

  // Throws Error(kBudget) that names tier, purpose, what was asked, what is held and the budget; then nothing
  // changed.
  void charge(Tier tier, Purpose purpose, std::uint64_t bytes);
  // REQUIRES: at most what is charged to that line; more is Error(kInternal).
  void discharge(Tier tier, Purpose purpose, std::uint64_t bytes);
  // Bytes that change their purpose and not their place: never refused for the budget.
  void move(Tier tier, Purpose from, Purpose to, std::uint64_t bytes);

  Snapshot snapshot() const;

  // From now on what is held when is kept, by tier and purpose, in at most `parts` parts of the time since
  // `begin`.
  using TierTimeline = Timeline<kPurposes>;
  void record(std::size_t parts, std::chrono::steady_clock::time_point begin);
  // Nothing where it is not kept.
  std::vector<TierTimeline::Part> timeline(Tier tier) const;

 private:
  void note(Tier tier);

  mutable std::mutex mutex_;
  Snapshot state_;
  std::array<std::optional<TierTimeline>, kTiers> timelines_;
};

// Bytes charged for its own lifetime.
class Charge {
 public:
  Charge() = default;
  Charge(Ledger& ledger, Tier tier, Purpose purpose, std::uint64_t bytes);
  ~Charge();
  Charge(Charge&& other) noexcept;
  Charge& operator=(Charge&& other) noexcept;
  std::uint64_t bytes() const { return bytes_; }
  void shrink(std::uint64_t bytes);  // REQUIRES: at most bytes(), and at most what is charged to its purpose
  void grow(std::uint64_t bytes);    // REQUIRES: at least bytes(). Throws as Ledger::charge()

 private:
  Ledger* ledger_ = nullptr;
  Tier tier_ = Tier::kHost;
  Purpose purpose_ = Purpose::kBase;
  std::uint64_t bytes_ = 0;
};

}  // namespace sluice::allocator
