#include "allocator/ledger.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "core/bytes.h"
#include "core/error.h"

namespace sluice::allocator {
namespace {

constexpr std::array<std::string_view, kTiers> kTierNames = {"device", "host", "disk", "ranks"};
constexpr std::array<std::string_view, kPurposes> kPurposeNames = {
    "parameter", "gradient", "optimizer state", "activation", "staging", "workspace", "checkpoint", "base"};

void add(Ledger::Line& line, std::uint64_t bytes) {
  line.current += bytes;
  line.peak = std::max(line.peak, line.current);
}

void require_held(const Ledger::Line& line, Tier tier, Purpose purpose, std::uint64_t bytes) {
  ensure(bytes <= line.current, "the ledger was asked to give up {} bytes of {} on tier {}, which holds {}",
         bytes, name_of(purpose), name_of(tier), line.current);
}

}  // namespace

std::string_view name_of(Tier tier) { return kTierNames[index(tier)]; }
std::string_view name_of(Purpose purpose) { return kPurposeNames[index(purpose)]; }

void Ledger::set_budget(Tier tier, std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t held = state_.total[index(tier)].current;
  if (held > bytes)
    fail(ErrorCode::kBudget, "a budget of {} ({} bytes) for tier {} was asked, but {} bytes are held already",
         format_size(bytes), bytes, name_of(tier), held);
  state_.budget[index(tier)] = bytes;
}

void Ledger::charge(Tier tier, Purpose purpose, std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  Line& total = state_.total[index(tier)];
  const std::optional<std::uint64_t>& budget = state_.budget[index(tier)];
  const std::uint64_t limit = budget.value_or(std::numeric_limits<std::uint64_t>::max());
  if (bytes > limit - total.current)
    fail(ErrorCode::kBudget,
         "{} ({} bytes) for {} on tier {} do not fit: {} bytes are held, of a budget of {} ({} bytes); "
         "{} bytes are missing",
         format_size(bytes), bytes, name_of(purpose), name_of(tier), total.current, format_size(limit), limit,
         bytes - (limit - total.current));
  add(total, bytes);
  add(state_.lines[index(tier)][index(purpose)], bytes);
  note(tier);
}

void Ledger::discharge(Tier tier, Purpose purpose, std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  Line& line = state_.lines[index(tier)][index(purpose)];
  require_held(line, tier, purpose, bytes);
  line.current -= bytes;
  state_.total[index(tier)].current -= bytes;
  note(tier);
}

void Ledger::move(Tier tier, Purpose from, Purpose to, std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  auto& lines = state_.lines[index(tier)];
  require_held(lines[index(from)], tier, from, bytes);
  lines[index(from)].current -= bytes;
  add(lines[index(to)], bytes);
  note(tier);
}

void Ledger::record(std::size_t parts, std::chrono::steady_clock::time_point begin) {
  const std::lock_guard lock(mutex_);
  for (std::size_t tier = 0; tier < kTiers; ++tier) {
    timelines_[tier].emplace(parts, begin);
    note(static_cast<Tier>(tier));
  }
}

void Ledger::note(Tier tier) {
  std::optional<TierTimeline>& timeline = timelines_[index(tier)];
  if (!timeline) return;
  TierTimeline::Held held;
  for (std::size_t purpose = 0; purpose < kPurposes; ++purpose)
    held[purpose] = state_.lines[index(tier)][purpose].current;
  timeline->note(std::chrono::steady_clock::now(), held);
}

std::vector<Ledger::TierTimeline::Part> Ledger::timeline(Tier tier) const {
  const std::lock_guard lock(mutex_);
  const auto& timeline = timelines_[index(tier)];
  return timeline ? timeline->parts() : std::vector<TierTimeline::Part>();
}

Ledger::Snapshot Ledger::snapshot() const {
  const std::lock_guard lock(mutex_);
  return state_;
}

Charge::Charge(Ledger& ledger, Tier tier, Purpose purpose, std::uint64_t bytes) {
  ledger.charge(tier, purpose, bytes);
  held_ = {&ledger, {tier, purpose, bytes}};
}

void Charge::shrink(std::uint64_t bytes) {
  Discharge& held = held_.get_deleter();
  held_->discharge(held.tier, held.purpose, held.bytes - bytes);
  held.bytes = bytes;
}

void Charge::grow(std::uint64_t bytes) {
  Discharge& held = held_.get_deleter();
  held_->charge(held.tier, held.purpose, bytes - held.bytes);
  held.bytes = bytes;
}

}  // namespace sluice::allocator
