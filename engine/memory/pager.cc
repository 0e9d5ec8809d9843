#include "engine/memory/pager.h"

#include <algorithm>
#include <utility>

#include "core/bytes.h"
#include "core/error.h"
#include "engine/memory/holding.h"

namespace sluice::engine {
namespace {

// Writes look further ahead than fetches by so many accesses.
constexpr std::size_t kWrittenAhead = 2;

DeviceWork::Use use_of(bool writable) { return writable ? DeviceWork::Use::kWrite : DeviceWork::Use::kRead; }

}  // namespace

Pager::Pager(allocator::Ledger& ledger, Backings& backings, Waits& waits, DeviceWork* gpu)
    : ledger_(ledger), backings_(backings), waits_(waits), gpu_(gpu) {}

Pager::~Pager() {
  for (auto& holding : holdings_) {
    try {
      holding->transfers.wait();
    } catch (...) {  // NOLINT: nobody is left to be told
    }
  }
  if (gpu_ != nullptr) gpu_->finish();
  for (auto& holding : holdings_) {
    holding->home = {};
    holding->hidden = {};
    holding->device_home = {};
  }
}

HoldingId Pager::define(const HoldingSpec& spec) {
  auto holding = std::make_unique<Holding>();
  const auto id = static_cast<HoldingId>(holdings_.size());
  holding->id = id;
  holding->spec = spec;
  holding->gpu = gpu_;
  holdings_.push_back(std::move(holding));
  uses_.add(id);
  if (spec.tier != tier_of(gpu_)) define_backing(id, spec.tier);
  return id;
}

bool Pager::define_backing(HoldingId id, allocator::Tier tier) {
  Holding& holding = *holdings_[id];
  const HoldingSpec& spec = holding.spec;
  if (holding.backing || !spec.stored || tier == tier_of(gpu_)) return false;
  holding.backing = backings_.make(
      {tier, spec.name, spec.backing_bytes(), spec.purpose, offload::RecordStore::kBlock, spec.unit});
  return true;
}

// Called wherever it changes whether the holding may leave, or when it is needed next.
void Pager::list(Holding& holding) {
  std::optional<Leaver> now;
  const bool unwritten = holding.is_unwritten();
  if (holding.may_leave() && (!unwritten || holding.spec.stored))
    now = Leaver{uses_.time(holding.id), holding.id, unwritten};
  if (now == holding.listed) return;
  if (holding.listed) leavers(holding.listed->unwritten).erase(*holding.listed);
  if (now) leavers(now->unwritten).insert(*now);
  holding.listed = now;
}

allocator::FramePool& Pager::pool_of(const Holding& holding) const {
  return holding.in_shared_pages() ? *small_pool_ : *pool_;
}

void Pager::set_schedule(std::vector<std::vector<HoldingId>> accesses,
                         std::vector<std::vector<HoldingId>> held) {
  const bool comes_again = accesses == uses_.schedule() && held == held_;
  held_ = std::move(held);
  uses_.set_schedule(std::move(accesses));
  for (auto& holding : holdings_) list(*holding);
  assign_device_frames(comes_again);
}

void Pager::set_position(std::size_t position) {
  uses_.set_position(position, [this](HoldingId id) { list(*holdings_[id]); });
}

bool Pager::make_room(const Holding& wanted, bool forced) {
  const std::size_t extents = frames_for(wanted);
  ensure(extents <= frames(), "'{}' needs {} extents, and the plan has {} in all", wanted.spec.name, extents,
         frames());
  const Way way = gpu_ == nullptr ? Way::kClear : clear_way(wanted, forced);
  if (way == Way::kStays || (way == Way::kHeld && !forced)) return false;
  const NextUses::Time limit = forced ? 0 : uses_.distance(wanted.id);
  while (free_frames() < extents) {
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
  if (gpu_ != nullptr) {
    device_pool_->take_away(victim.device_home, gpu_->give_up(victim.memory()));
  } else {
    pool_->shrink(victim.home, 0);
    pool_->shrink(victim.hidden, 0);
  }
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
    if (!holding.resident() && !holding.present && !holding.parked && uses_.distance(id) <= ahead)
      wanted.insert(id);
  });
  if (gpu_ != nullptr) return write_in_the_way(wanted, ahead);
  std::size_t extents = 0;
  for (const HoldingId id : wanted) extents += frames_for(*holdings_[id]);
  write_out(extents, ahead, false);
}

// Begins to write until so many extents are free, or will be without another write. Unless it is forced, it
// writes nothing that the `nearest` next accesses use.
void Pager::write_out(std::size_t extents, NextUses::Time nearest, bool forced) {
  std::size_t available = free_frames();
  if (available < extents) available += leaving_extents(extents - available, nearest);
  while (available < extents) {
    Holding* const unwritten = furthest(true);
    if (unwritten == nullptr || (!forced && uses_.distance(unwritten->id) <= nearest)) return;
    begin_transfer(*unwritten, true);
    available += frames_for(*unwritten);
  }
}

// Returns how many extents can leave without another write and are not used within the `nearest` next
// accesses; counts no further than `wanted`.
std::size_t Pager::leaving_extents(std::size_t wanted, NextUses::Time nearest) const {
  std::size_t extents = 0;
  for (const HoldingId id : moving_) {
    const Holding& holding = *holdings_[id];
    if (holding.io == Holding::Io::kWriting && holding.pins == 0 && uses_.distance(id) > nearest)
      extents += frames_for(holding);
  }
  for (auto leaver = written_.begin(); extents < wanted && leaver != written_.end(); ++leaver) {
    if (uses_.distance(leaver->id) <= nearest) break;
    extents += frames_for(*holdings_[leaver->id]);
  }
  return extents;
}

// Among those that must be written before they leave, or among the others.
Pager::Holding* Pager::furthest(bool unwritten) {
  const Leavers& all = leavers(unwritten);
  return all.empty() ? nullptr : holdings_[all.begin()->id].get();
}

void Pager::begin_transfer(Holding& holding, bool write) {
  const std::span<std::byte> bytes{holding.data(), holding.transfer_bytes()};
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
  ensure(!holding.parked, "'{}' is fetched while its backing is for others to read", holding.spec.name);
  if (!make_room(holding, forced)) return false;
  ensure(place(holding), "no room for '{}' after making it", holding.spec.name);
  holding.present = true;
  list(holding);
  if (holding.contents > 0) begin_transfer(holding, false);
  return true;
}

// A GPU's frames may be used on the stream on which units come in, and on others after that.
bool Pager::place(Holding& holding) {
  const HoldingSpec& spec = holding.spec;
  if (gpu_ == nullptr) return pool_->place(holding.arrival(), spec.bytes, spec.purpose);
  if (!device_pool_->place(holding.device_home, spec.bytes, spec.purpose, gpu_->in())) return false;
  gpu_->end(gpu_->in(), holding.memory(), DeviceWork::Use::kWrite);
  return true;
}

std::size_t Pager::frames_for(const Holding& holding) const {
  const std::size_t bytes = holding.spec.bytes;
  return gpu_ == nullptr ? pool_->extents_for(bytes) : device_pool_->extents_for(bytes);
}

bool Pager::ready(const Holding& holding, Use use) const {
  if (!holding.present || holding.io == Holding::Io::kReading) return false;
  return use == Use::kRead || holding.io == Holding::Io::kNone;
}

void Pager::settle(Holding& holding) {
  const bool writing = holding.io == Holding::Io::kWriting;
  if (!holding.transfers.finished()) {
    const std::uint64_t begun = holding.transfers_begun;
    waits_.during(writing ? Waits::For::kWrites : Waits::For::kReads, holding.spec.name,
                  [&] { holding.transfers.wait(meanwhile_); });
    // What was done meanwhile may have settled it, and begun another transfer.
    if (holding.io == Holding::Io::kNone || holding.transfers_begun != begun) return;
  }
  holding.transfers.wait();  // throws its error
  if (writing) holding.backed = true;
  holding.io = Holding::Io::kNone;
  moving_.erase(holding.id);
  list(holding);
  arrange(holding);
}

// Pages do not move during a transfer; when it has ended, this is called again.
void Pager::arrange(Holding& holding) {
  if (!holding.spec.exposed || !holding.present || holding.io != Holding::Io::kNone) return;
  allocator::FramePool& pool = pool_of(holding);
  if (holding.readers + holding.writers == 0) {
    if (!holding.is_hidden()) pool.move(holding.home, holding.hidden);
    return;
  }
  if (holding.is_hidden()) pool.move(holding.hidden, holding.home);
  using allocator::FramePool;
  pool.protect(holding.home, holding.writers > 0 ? FramePool::Access::kWrite : FramePool::Access::kRead);
}

void Pager::view(HoldingId id, bool writable) {
  Holding& holding = *holdings_[id];
  ++(writable ? holding.writers : holding.readers);
  if (gpu_ != nullptr) return gpu_->begin(gpu_->client(), holding.memory(), use_of(writable));
  if (holding.io != Holding::Io::kNone && (holding.is_hidden() || writable)) settle(holding);
  arrange(holding);
}

void Pager::conceal(HoldingId id, bool writable) {
  Holding& holding = *holdings_[id];
  --(writable ? holding.writers : holding.readers);
  if (gpu_ != nullptr) return gpu_->end(gpu_->client(), holding.memory(), use_of(writable));
  arrange(holding);
}

void Pager::hide(HoldingId id) {
  Holding& holding = *holdings_[id];
  if (holding.spec.exposed && holding.home.placed() > 0 && holding.io != Holding::Io::kNone) settle(holding);
}

void Pager::serve_touches(allocator::TouchServer& server) const {
  for (const auto& holding : holdings_)
    if (holding->spec.exposed) server.serve(holding->home);
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

// Waits for writes first: when they end, their frames can be taken.
void Pager::wait_for_one() {
  for (const auto kind : {Holding::Io::kWriting, Holding::Io::kReading})
    for (const HoldingId id : moving_)
      if (holdings_[id]->io == kind) return settle(*holdings_[id]);
  ensure(on_stall_ && on_stall_(), "the plan has too few frames: everything in memory is held");
}

void Pager::prefetch(std::size_t accesses) {
  if (!has_frames()) return;
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
  if (!holding.present && free_frames() >= frames_for(holding)) begin_fetch(holding, false);
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
  // Who reads what a GPU's client is still writing gets what it has written so far.
  if (gpu_ != nullptr && holding.writers > 0)
    gpu_->end(gpu_->client(), holding.memory(), DeviceWork::Use::kWrite);
  return data(id);
}

bool Pager::try_acquire(HoldingId id, Use use) {
  Holding& holding = *holdings_[id];
  poll();
  if (!holding.present && begin_fetch(holding, false)) poll();  // it may have ended at once
  if (!ready(holding, use)) return false;
  ++holding.pins;
  list(holding);
  return true;
}

void Pager::release(HoldingId id) {
  Holding& holding = *holdings_[id];
  ensure(holding.pins > 0, "'{}' is released and was not held", holding.spec.name);
  --holding.pins;
  list(holding);
}

void Pager::written(HoldingId id, std::size_t bytes) {
  Holding& holding = *holdings_[id];
  holding.contents = bytes;
  if (holding.resident() || !holding.spec.stored) return list(holding);
  ensure(holding.io == Holding::Io::kNone, "'{}' was changed during a transfer", holding.spec.name);
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
  if (holding.io == Holding::Io::kReading) settle(holding);  // it may be fetched already for the next cycle
  set_parked(holding, true);
}

void Pager::unpark(HoldingId id) { set_parked(*holdings_[id], false); }

void Pager::outdate(HoldingId id) {
  Holding& holding = *holdings_[id];
  ensure(holding.pins == 0, "'{}' is outdated while it is held", holding.spec.name);
  if (holding.io != Holding::Io::kNone) settle(holding);
  holding.contents = holding.spec.bytes;
  holding.backed = true;
  if (holding.present) evict(holding);
  set_parked(holding, true);
}

void Pager::discard(HoldingId id) {
  Holding& holding = *holdings_[id];
  forget(id);
  if (!holding.resident() && holding.present) evict(holding);
}

void Pager::forget(HoldingId id) {
  Holding& holding = *holdings_[id];
  ensure(holding.pins == 0, "'{}' is given up while it is held", holding.spec.name);
  if (holding.io != Holding::Io::kNone) settle(holding);
  holding.contents = 0;
  holding.backed = false;
  set_parked(holding, false);
}

std::size_t Pager::bytes(HoldingId id) const { return holdings_[id]->spec.bytes; }

std::size_t Pager::backing_bytes(HoldingId id) const { return holdings_[id]->spec.backing_bytes(); }
bool Pager::resident(HoldingId id) const { return holdings_[id]->resident(); }
bool Pager::present(HoldingId id) const { return ready(*holdings_[id], Use::kRead); }
bool Pager::held(HoldingId id) const { return holdings_[id]->pins > 0; }
std::byte* Pager::data(HoldingId id) const { return holdings_[id]->data(); }
std::byte* Pager::address(HoldingId id) const {
  const Holding& holding = *holdings_[id];
  return holding.in_region() ? holding.data() : holding.home_data();
}
Backing& Pager::backing(HoldingId id) const {
  ensure(holdings_[id]->backing != nullptr, "'{}' has no backing", holdings_[id]->spec.name);
  return *holdings_[id]->backing;
}

}  // namespace sluice::engine
