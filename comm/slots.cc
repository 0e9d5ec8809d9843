#include "comm/slots.h"

#include <algorithm>

namespace sluice::comm {
namespace {

// The most blocks of sums in flight at a time.
constexpr std::size_t kSlots = 8;
constexpr SlotUse kUses[] = {SlotUse::kOwn, SlotUse::kHost};

std::size_t slot_bytes(int ranks) { return static_cast<std::size_t>(ranks - 1) * kBlockBytes; }

}  // namespace

std::size_t Slots::bytes(int ranks) { return kSlots * slot_bytes(ranks); }

Slots::Slots(std::byte* memory, const Hosts& hosts, int rank) {
  if (hosts.ranks() == 1) return;
  // Ranks of a host without consecutive numbers in the run may have them in a group, whose sums they then
  // relay.
  const bool adds_for_host = !hosts.all_on_one() && hosts.with(rank).size() > 1;
  for (std::size_t i = 0; i < kSlots; ++i) {
    const bool is_own = !adds_for_host || i % 2 == 0;
    slots_.push_back(
        {.memory = memory + i * slot_bytes(hosts.ranks()), .use = is_own ? SlotUse::kOwn : SlotUse::kHost});
  }
  for (Slot& slot : slots_) give_back(slot);
}

void Slots::note(Collective& call) {
  for (const SlotUse use : kUses) {
    auto& waiting = pool(use).waiting;
    const auto place = std::ranges::find(waiting, &call);
    if (call.wants_slot(use) && place == waiting.end()) waiting.push_back(&call);
    if (!call.wants_slot(use) && place != waiting.end()) waiting.erase(place);
  }
}

void Slots::hand_out() {
  for (const SlotUse use : kUses) {
    auto& [free, waiting] = pool(use);
    while (!free.empty() && !waiting.empty()) {
      Collective& call = *waiting.front();
      waiting.pop_front();
      Slot& slot = *free.back();
      free.pop_back();
      call.use_slot(slot);
      if (call.wants_slot(use)) waiting.push_back(&call);
    }
  }
}

void Slots::stop() {
  for (Pool& pool : pools_) pool.waiting.clear();
}

}  // namespace sluice::comm
