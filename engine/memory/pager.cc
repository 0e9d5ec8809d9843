#include "engine/memory/pager.h"

#include <algorithm>
#include <utility>

#include "core/error.h"

namespace sluice::engine {
namespace {

// Write-backs look this many accesses further ahead than fetches.
constexpr std::size_t kWrittenAhead = 2;

}  // namespace

struct Pager::Holding {
  enum class Io : std::uint8_t { kNone, kReading, kWriting };
  HoldingId id = 0;
  std::unique_ptr<Backing> backing;  // an earlier plan's may remain while it is resident
  std::size_t contents = 0;          // in bytes; 0: it has none
  bool present = false;              // has memory, with the contents unless a fetch is in flight
  bool backed = false;               // clean: the backing has the present contents
  bool parked = false;               // an update may read the backing at any time
  int pins = 0;
  Io io = Io::kNone;
  TransferGroup transfers;
  std::uint64_t transfers_begun = 0;

  bool is_unwritten() const { return contents > 0 && !backed; }
};

Pager::Pager(allocator::Ledger& ledger, Backings& backings, Waits& waits, DeviceWork* gpu)
    : backings_(backings),
      waits_(waits),
      homes_(gpu == nullptr ? make_cpu_homes(ledger) : make_gpu_homes(ledger, *gpu)) {}

Pager::~Pager() {
  for (auto& holding : holdings_) {
    try {
      holding->transfers.wait();
    } catch (...) {  // NOLINT: nobody is left to be told
    }
  }
}

// ---- before the first access ----

HoldingId Pager::define(const HoldingSpec& spec) {
  const HoldingId id = homes_->define(spec);
  holdings_.push_back(std::make_unique<Holding>());
  holdings_.back()->id = id;
  uses_.add(id);
  leavers_.add(id);
  define_backing(id, spec.tier);
  return id;
}

bool Pager::define_backing(HoldingId id, allocator::Tier tier) {
  Holding& holding = *holdings_[id];
  const HoldingSpec& spec = homes_->spec(id);
  if (holding.backing || !spec.stored || tier == homes_->tier()) return false;
  holding.backing = backings_.make(
      {tier, spec.name, spec.backing_bytes(), spec.purpose, offload::RecordStore::kBlock, spec.unit});
  return true;
}

void Pager::forget_backing(HoldingId id) { holdings_[id]->backing.reset(); }

void Pager::start(std::size_t extent_bytes, std::size_t extents) {
  homes_->start(extent_bytes, extents);
  for (auto& holding : holdings_) holding->present = resident(holding->id);
}

void Pager::set_schedule(std::vector<std::vector<HoldingId>> accesses,
                         const std::vector<std::vector<HoldingId>>& held) {
  homes_->set_schedule(accesses, held);
  uses_.set_schedule(std::move(accesses));
  for (auto& holding : holdings_) list(*holding);
}

void Pager::set_position(std::size_t position) {
  uses_.set_position(position, [this](HoldingId id) { list(*holdings_[id]); });
}

// ---- eviction ----

// Called wherever the holding's next use, or whether it may be evicted, changes.
void Pager::list(Holding& holding) {
  const bool may_leave = !resident(holding.id) && holding.present && holding.pins == 0 &&
                         holding.io == Holding::Io::kNone &&
                         (!holding.is_unwritten() || homes_->spec(holding.id).stored);
  leavers_.set(holding.id, may_leave ? std::optional(Leavers::Leaver{uses_.time(holding.id), holding.id,
                                                                     holding.is_unwritten()})
                                     : std::nullopt);
}

Pager::Holding* Pager::furthest(bool unwritten) {
  const std::optional<HoldingId> id = leavers_.furthest(unwritten);
  return id ? holdings_[*id].get() : nullptr;
}

Pager::Way Pager::clear_way(const Holding& wanted, bool forced) {
  const NextUses::Time limit = uses_.distance(wanted.id);
  const std::vector<HoldingId> in_the_way = homes_->in_the_way(wanted.id);
  for (const HoldingId id : in_the_way) {
    const Holding& victim = *holdings_[id];
    if (victim.pins > 0 || (victim.is_unwritten() && !homes_->spec(id).stored)) return Way::kHeld;
    const bool is_sooner = uses_.distance(id) <= limit || victim.io != Holding::Io::kNone;
    if (!forced && is_sooner) return Way::kStays;
  }
  Way way = Way::kClear;
  for (const HoldingId id : in_the_way) {
    Holding& victim = *holdings_[id];
    if (victim.io == Holding::Io::kNone && victim.is_unwritten()) begin_transfer(victim, true);
    // A write to host memory completes for the caller as soon as it is queued.
    if (victim.io == Holding::Io::kWriting && victim.transfers.finished()) settle(victim);
    if (victim.io == Holding::Io::kNone)
      evict(victim);
    else
      way = Way::kStays;
  }
  return way;
}

// Where the wanted frames are pinned, waits until an update releases some. Returns false where no update
// does: a client then holds them.
bool Pager::update_gives_way(const Holding& wanted) {
  if (!on_stall_) return false;
  const auto is_held = [&](HoldingId id) { return holdings_[id]->pins > 0; };
  return std::ranges::any_of(homes_->in_the_way(wanted.id), is_held) && on_stall_();
}

bool Pager::make_room(const Holding& wanted, bool forced) {
  const std::size_t extents = homes_->extents_for(wanted.id);
  ensure(extents <= homes_->extents(), "'{}' needs {} extents, and the plan has {} in all",
         homes_->spec(wanted.id).name, extents, homes_->extents());
  const Way way = clear_way(wanted, forced);
  if (way == Way::kStays || (way == Way::kHeld && !forced)) return false;
  const NextUses::Time limit = forced ? 0 : uses_.distance(wanted.id);
  while (homes_->free_extents() < extents) {
    Holding* const victim = furthest(false);
    if (victim == nullptr || (!forced && uses_.distance(victim->id) <= limit)) {
      write_out(extents, limit, forced);
      return false;
    }
    evict(*victim);
  }
  return true;
}

void Pager::evict(Holding& victim) {
  homes_->take_away(victim.id);
  victim.present = false;
  list(victim);
}

void Pager::write_behind(std::size_t accesses) {
  if (uses_.schedule().empty()) {
    while (Holding* const unwritten = furthest(true)) begin_transfer(*unwritten, true);
    return;
  }
  const std::size_t ahead = std::min(accesses + kWrittenAhead, uses_.schedule().size() - 1);
  std::set<HoldingId> wanted;
  uses_.for_each_within(ahead + 1, [&](HoldingId id) {
    const Holding& holding = *holdings_[id];
    if (!resident(id) && !holding.present && !holding.parked && uses_.distance(id) <= ahead)
      wanted.insert(id);
  });
  if (homes_->assigns()) return write_in_the_way(wanted, ahead);
  std::size_t extents = 0;
  for (const HoldingId id : wanted) extents += homes_->extents_for(id);
  write_out(extents, ahead, false);
}

// Begins to write back dirty holdings that must leave for `wanted` and are not used within the `nearest` next
// accesses.
void Pager::write_in_the_way(const std::set<HoldingId>& wanted, NextUses::Time nearest) {
  for (const HoldingId id : wanted)
    for (const HoldingId other : homes_->in_the_way(id)) {
      Holding& victim = *holdings_[other];
      if (leavers_.may_leave(other) && victim.is_unwritten() && uses_.distance(other) > nearest)
        begin_transfer(victim, true);
    }
}

// Begins write-backs until `extents` are free or will be without another one. Unless forced, it writes
// nothing that the `nearest` next accesses use.
void Pager::write_out(std::size_t extents, NextUses::Time nearest, bool forced) {
  std::size_t available = homes_->free_extents();
  if (available < extents) available += leaving_extents(extents - available, nearest);
  while (available < extents) {
    Holding* const unwritten = furthest(true);
    if (unwritten == nullptr || (!forced && uses_.distance(unwritten->id) <= nearest)) return;
    begin_transfer(*unwritten, true);
    available += homes_->extents_for(unwritten->id);
  }
}

// Counts the extents that can be evicted without another write-back and are not used within the `nearest`
// next accesses, up to about `wanted`.
std::size_t Pager::leaving_extents(std::size_t wanted, NextUses::Time nearest) const {
  std::size_t extents = 0;
  for (const HoldingId id : moving_) {
    const Holding& holding = *holdings_[id];
    if (holding.io == Holding::Io::kWriting && holding.pins == 0 && uses_.distance(id) > nearest)
      extents += homes_->extents_for(id);
  }
  for (auto leaver = leavers_.written().begin(); extents < wanted && leaver != leavers_.written().end();
       ++leaver) {
    if (uses_.distance(leaver->id) <= nearest) break;
    extents += homes_->extents_for(leaver->id);
  }
  return extents;
}

// ---- transfers ----

void Pager::begin_transfer(Holding& holding, bool write) {
  const std::size_t size =
      std::min(round_up(holding.contents, holding.backing->grain()), backing_bytes(holding.id));
  const std::span<std::byte> bytes{data(holding.id), size};
  if (write)
    holding.backing->store(0, bytes, holding.transfers.add());
  else
    holding.backing->fetch(0, bytes, holding.transfers.add());
  ++holding.transfers_begun;
  holding.io = write ? Holding::Io::kWriting : Holding::Io::kReading;
  moving_.insert(holding.id);
  list(holding);
}

bool Pager::begin_fetch(Holding& holding, bool forced) {
  ensure(!holding.parked, "'{}' is fetched while its backing is for others to read",
         homes_->spec(holding.id).name);
  if (!make_room(holding, forced)) return false;
  ensure(homes_->place(holding.id), "no room for '{}' after making it", homes_->spec(holding.id).name);
  holding.present = true;
  list(holding);
  if (holding.contents > 0) begin_transfer(holding, false);
  return true;
}

bool Pager::ready(const Holding& holding, Use use) const {
  if (!holding.present || holding.io == Holding::Io::kReading) return false;
  return use == Use::kRead || holding.io == Holding::Io::kNone;
}

void Pager::settle(Holding& holding) {
  const bool writing = holding.io == Holding::Io::kWriting;
  if (!holding.transfers.finished()) {
    const std::uint64_t begun = holding.transfers_begun;
    waits_.during(writing ? Waits::For::kWrites : Waits::For::kReads, homes_->spec(holding.id).name,
                  [&] { holding.transfers.wait(meanwhile_); });
    // The handler may have settled this transfer and begun another one.
    if (holding.io == Holding::Io::kNone || holding.transfers_begun != begun) return;
  }
  holding.transfers.wait();  // throws its error
  if (writing) holding.backed = true;
  holding.io = Holding::Io::kNone;
  moving_.erase(holding.id);
  list(holding);
  arrange(holding);
}

void Pager::poll() {
  for (auto moving = moving_.begin(); moving != moving_.end();) {
    Holding& holding = *holdings_[*moving++];  // settle() removes it from moving_
    if (holding.transfers.finished()) settle(holding);
  }
}

void Pager::wait_all() {
  while (!moving_.empty()) settle(*holdings_[*moving_.begin()]);
}

// Waits for write-backs first: their frames can be taken when they end.
void Pager::wait_for_one() {
  for (const auto kind : {Holding::Io::kWriting, Holding::Io::kReading})
    for (const HoldingId id : moving_)
      if (holdings_[id]->io == kind) return settle(*holdings_[id]);
  ensure(on_stall_ && on_stall_(), "the plan has too few frames: everything in memory is held");
}

// ---- accesses ----

void Pager::prefetch(std::size_t accesses) {
  if (homes_->extents() == 0) return;
  poll();
  if (!uses_.schedule().empty()) fetch_ahead(accesses);
  write_behind(accesses);
}

void Pager::fetch_ahead(std::size_t accesses) {
  const auto& schedule = uses_.schedule();
  for (std::size_t i = 1; i <= std::min(accesses, schedule.size() - 1); ++i)
    for (const HoldingId id : schedule[(uses_.position() + i) % schedule.size()])
      if (!holdings_[id]->present && !holdings_[id]->parked && !begin_fetch(*holdings_[id], false)) return;
}

void Pager::prefetch_one(HoldingId id) {
  Holding& holding = *holdings_[id];
  if (!holding.present && homes_->free_extents() >= homes_->extents_for(id)) begin_fetch(holding, false);
}

std::byte* Pager::acquire(HoldingId id, Use use) {
  Holding& holding = *holdings_[id];
  while (!ready(holding, use)) {
    if (holding.io != Holding::Io::kNone)
      settle(holding);
    else if (!update_gives_way(holding) && !begin_fetch(holding, true))
      wait_for_one();
    poll();
  }
  ++holding.pins;
  list(holding);
  homes_->share_what_is_written(id);
  return data(id);
}

bool Pager::try_acquire(HoldingId id, Use use) {
  Holding& holding = *holdings_[id];
  poll();
  if (!holding.present && begin_fetch(holding, false)) poll();  // it may complete at once
  if (!ready(holding, use)) return false;
  ++holding.pins;
  list(holding);
  return true;
}

void Pager::release(HoldingId id) {
  Holding& holding = *holdings_[id];
  ensure(holding.pins > 0, "'{}' is released and was not held", homes_->spec(id).name);
  --holding.pins;
  list(holding);
}

// Pages cannot move during a transfer; settle() calls this again when it has ended.
void Pager::arrange(Holding& holding) {
  if (holding.present && holding.io == Holding::Io::kNone) homes_->arrange(holding.id);
}

void Pager::view(HoldingId id, bool writable) {
  Holding& holding = *holdings_[id];
  homes_->view(id, writable);
  if (holding.io != Holding::Io::kNone && homes_->must_move(id, writable)) settle(holding);
  arrange(holding);
}

void Pager::conceal(HoldingId id, bool writable) {
  homes_->conceal(id, writable);
  arrange(*holdings_[id]);
}

void Pager::hide(HoldingId id) {
  Holding& holding = *holdings_[id];
  if (holding.io != Holding::Io::kNone && homes_->is_shown(id)) settle(holding);
}

// ---- clean, dirty and out-of-date contents ----

void Pager::written(HoldingId id, std::size_t bytes) {
  Holding& holding = *holdings_[id];
  holding.contents = bytes;
  if (resident(id) || !homes_->spec(id).stored) return list(holding);
  ensure(holding.io == Holding::Io::kNone, "'{}' was changed during a transfer", homes_->spec(id).name);
  holding.backed = false;
  list(holding);
}

void Pager::set_parked(Holding& holding, bool parked) {
  holding.parked = parked;
  uses_.set_parked(holding.id, parked);
  list(holding);
}

void Pager::park(HoldingId id) {
  Holding& holding = *holdings_[id];
  if (holding.io == Holding::Io::kReading) settle(holding);  // a prefetch for the next cycle may be in flight
  set_parked(holding, true);
}

void Pager::unpark(HoldingId id) { set_parked(*holdings_[id], false); }

void Pager::outdate(HoldingId id) {
  Holding& holding = *holdings_[id];
  ensure(holding.pins == 0, "'{}' is outdated while it is held", homes_->spec(id).name);
  if (holding.io != Holding::Io::kNone) settle(holding);
  holding.contents = bytes(id);
  holding.backed = true;
  if (holding.present) evict(holding);
  set_parked(holding, true);
}

void Pager::entrust(HoldingId id) {
  Holding& holding = *holdings_[id];
  ensure(!resident(id) && homes_->spec(id).stored, "'{}' is entrusted, and has no backing",
         homes_->spec(id).name);
  if (holding.io != Holding::Io::kNone) settle(holding);
  if (holding.present && holding.is_unwritten()) {
    begin_transfer(holding, true);
    settle(holding);
  }
  const std::size_t contents = holding.contents;
  outdate(id);
  holding.contents = contents;
}

void Pager::discard(HoldingId id) {
  Holding& holding = *holdings_[id];
  forget(id);
  if (!resident(id) && holding.present) evict(holding);
}

void Pager::forget(HoldingId id) {
  Holding& holding = *holdings_[id];
  ensure(holding.pins == 0, "'{}' is given up while it is held", homes_->spec(id).name);
  if (holding.io != Holding::Io::kNone) settle(holding);
  holding.contents = 0;
  holding.backed = false;
  set_parked(holding, false);
}

bool Pager::present(HoldingId id) const { return ready(*holdings_[id], Use::kRead); }
bool Pager::held(HoldingId id) const { return holdings_[id]->pins > 0; }
Backing& Pager::backing(HoldingId id) const {
  ensure(holdings_[id]->backing != nullptr, "'{}' has no backing", homes_->spec(id).name);
  return *holdings_[id]->backing;
}

// ---- change of plan, shutdown ----

void Pager::set_tier(HoldingId id, allocator::Tier tier) {
  Holding& holding = *holdings_[id];
  const HoldingSpec& spec = homes_->spec(id);
  const bool becomes_resident = tier == homes_->tier();
  if (resident(id) == becomes_resident) return;
  ensure(!spec.packed, "'{}' is packed, and the new plan moves it to another tier", spec.name);
  if (spec.exposed) {
    if (becomes_resident) {
      acquire(id, Use::kModify);
      release(id);
    }
    holding.backed = false;  // its memory changes from now on, or was never written back
  } else {
    if (becomes_resident)
      discard(id);
    else
      holding.contents = 0;
    holding.present = becomes_resident;
  }
  homes_->set_tier(id, tier);
  list(holding);
}

void Pager::set_extents(std::size_t extents) {
  if (extents > homes_->extents()) return homes_->take_more(extents);
  for (homes_->give_back(extents); homes_->extents() > extents; homes_->give_back(extents)) {
    if (Holding* const victim = furthest(false)) {
      evict(*victim);
      continue;
    }
    Holding* const unwritten = furthest(true);
    ensure(unwritten != nullptr, "{} extents are to be left of {}, and everything in them is held", extents,
           homes_->extents());
    begin_transfer(*unwritten, true);
    settle(*unwritten);
  }
}

void Pager::drop_unexposed() {
  for (auto& holding : holdings_) {
    if (homes_->spec(holding->id).exposed) continue;
    settle(*holding);
    holding->present = false;
    list(*holding);
  }
  homes_->drop_unexposed();
}

allocator::FormerHome Pager::leave(HoldingId id, bool with_contents) {
  Holding& holding = *holdings_[id];
  ensure(homes_->spec(id).exposed, "'{}' has no address to leave", homes_->spec(id).name);
  if (with_contents) {
    acquire(id, Use::kModify);
    view(id, true);
    release(id);
  } else {
    try {
      holding.transfers.wait();
    } catch (...) {  // NOLINT: nobody needs what was to be transferred
    }
  }
  allocator::FormerHome former = homes_->leave(id, with_contents);
  holding.present = false;
  list(holding);
  return former;
}

}  // namespace sluice::engine
