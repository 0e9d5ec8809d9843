#pragma once
#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "allocator/timeline.h"

namespace sluice::allocator {

// A tier of memory. Where the CPU computes, its memory is kHost and nothing is on kDevice. kRanks is the
// memory of all ranks together, of which a process charges only its own shard, as kHost or kDisk.
enum class Tier : std::uint8_t { kDevice, kHost, kDisk, kRanks };
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
inline constexpr std::size_t kTiers = 4;
inline constexpr std::size_t kPurposes = 8;
constexpr std::size_t index(Tier tier) { return static_cast<std::size_t>(tier); }
constexpr std::size_t index(Purpose purpose) { return static_cast<std::size_t>(purpose); }
// The tiers in reports where the CPU computes.
inline constexpr std::array kTiersOfCpu = {Tier::kHost, Tier::kDisk};
std::string_view name_of(Tier tier);        // "device", "host", "disk", "ranks"
std::string_view name_of(Purpose purpose);  // "parameter", "gradient", "optimizer state", ...

// Accounts for every byte held, by tier and purpose, with current value and peak. It enforces the budgets: a
// charge beyond a budget throws before any memory is allocated. Thread rule: all functions from any thread.
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

  // Sets the hard limit of a tier, which has none at first. Throws Error(kBudget) where more is held already.
  void set_budget(Tier tier, std::uint64_t bytes);

  // Throws Error(kBudget), with nothing changed, that names tier, purpose, the request, the bytes held and
  // the budget.
  void charge(Tier tier, Purpose purpose, std::uint64_t bytes);
  // REQUIRES: at least that many bytes are charged to tier and purpose. Throws Error(kInternal) otherwise.
  void discharge(Tier tier, Purpose purpose, std::uint64_t bytes);
  // Moves a charge to another purpose of the same tier. The budget never refuses it.
  void move(Tier tier, Purpose from, Purpose to, std::uint64_t bytes);

  Snapshot snapshot() const;

  // Starts recording a timeline of each tier, by purpose, in at most `parts` time intervals since `begin`.
  using TierTimeline = Timeline<kPurposes>;
  void record(std::size_t parts, std::chrono::steady_clock::time_point begin);
  // Returns an empty vector where record() was not called.
  std::vector<TierTimeline::Part> timeline(Tier tier) const;

 private:
  void note(Tier tier);

  mutable std::mutex mutex_;
  Snapshot state_;
  std::array<std::optional<TierTimeline>, kTiers> timelines_;
};

// Keeps bytes charged while it lives.
class Charge {
 public:
  Charge() = default;
  Charge(Ledger& ledger, Tier tier, Purpose purpose, std::uint64_t bytes);
  std::uint64_t bytes() const { return held_ == nullptr ? 0 : held_.get_deleter().bytes; }
  void shrink(std::uint64_t bytes);  // REQUIRES: bytes is at most bytes(), and the charge was not moved
  void grow(std::uint64_t bytes);    // REQUIRES: bytes is at least bytes(). Throws as Ledger::charge()

 private:
  struct Discharge {
    Tier tier;
    Purpose purpose;
    std::uint64_t bytes;
    void operator()(Ledger* ledger) const { ledger->discharge(tier, purpose, bytes); }
  };
  std::unique_ptr<Ledger, Discharge> held_;  // owns the charge, not the ledger
};

}  // namespace sluice::allocator
