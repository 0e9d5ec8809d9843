#include "engine/memory/device_shards.h"

#include <array>
#include <limits>
#include <utility>
#include <vector>

#include "core/error.h"

namespace sluice::engine {

class DeviceShards::Unit final : public CheckedBacking {
 public:
  using CheckedBacking::store;
  Unit(DeviceShards& owner, UnitId unit) : owner_(owner), unit_(unit) {}
  void fetch(std::uint64_t offset, std::span<std::byte> into, Done done) override {
    ensure(offset == 0, "a partitioned unit is fetched from byte {} on", offset);
    owner_.fetch(unit_, owner_.shards_.expected(unit_), into, std::move(done));
  }
  void store(std::uint64_t, std::span<const std::byte>, Done) override {
    fail(ErrorCode::kInternal, "partitioned parameters are stored as a whole");
  }

 private:
  DeviceShards& owner_;
  const UnitId unit_;
};

std::unique_ptr<Backing> DeviceShards::make(UnitId unit) { return std::make_unique<Unit>(*this, unit); }

void DeviceShards::start(allocator::Ledger& ledger) {
  ledger_ = &ledger;
  if (!shards_.on_one_host()) take_staging();
  queue_.emplace();
}

void DeviceShards::take_staging() {
  memory_ = RegisteredRegion(*ledger_, gpu_.device(), allocator::Purpose::kStaging, bytes());
  gpu_.add({memory_.data(), bytes()}, StoredShards::kPiece);
}

void DeviceShards::share() {
  shards_.share();
  const bool lends = shards_.are_passed() || (shards_.is_shared() && shards_.lends_any());
  for (std::optional<SerialQueue>* const queue : {&returning_, &copying_, &asking_})
    if (lends) queue->emplace();
  if (shards_.are_passed()) return;
  if (!shards_.is_shared() && memory_.data() == nullptr) take_staging();
  for (UnitId unit = 0; shards_.is_shared() && unit < shards_.units(); ++unit)
    for (const ParameterShards::Piece& shard : shards_of(unit)) {
      const DeviceWork::Memory there = shards_.place_of(unit, shard);
      gpu_.add(there, there.size());
    }
}

std::vector<ParameterShards::Piece> DeviceShards::pieces_of(UnitId unit, bool lent, std::size_t most) const {
  if (!shards_.has(unit)) return {};
  std::vector<ParameterShards::Piece> pieces = shards_.pieces_of(unit, most);
  std::erase_if(pieces, [&](const auto& piece) { return shards_.lends(unit, piece.owner) != lent; });
  return pieces;
}

std::vector<ParameterShards::Piece> DeviceShards::shards_of(UnitId unit) const {
  return pieces_of(unit, false, std::numeric_limits<std::size_t>::max());
}

void DeviceShards::await(UnitId unit) {
  if (!shards_.is_shared()) return;  // the fetch completed with its bytes in host memory
  for (const ParameterShards::Piece& shard : shards_of(unit))
    gpu_.wait(shards_.place_of(unit, shard), DeviceWork::Use::kWrite);
}

// A unit of which any shard is lent is copied by one thread, on one stream.
void DeviceShards::fetch(UnitId unit, std::uint64_t version, std::span<std::byte> into, Done done) {
  if (shards_.are_passed() || (shards_.is_shared() && !pieces_of(unit, true, shards_.most_lent()).empty()))
    return ask(unit, version, into, std::move(done));
  const auto work = [this, unit, version, to = into.data()](Done&) {
    shards_.is_shared() ? copy(unit, version, to) : receive(unit, version, to);
  };
  queue_->add(work, std::move(done));
}

// An error leaves no transfer in flight: the destructor of a group waits for its transfers.
void DeviceShards::copy(UnitId unit, std::uint64_t version, std::byte* to) {
  const std::vector<ParameterShards::Piece> all = shards_of(unit);
  std::vector<TransferGroup> has_version(all.size());
  for (std::size_t i = 0; i < all.size(); ++i)
    shards_.await(unit, version, all[i].owner, has_version[i].add());
  for (std::size_t i = 0; i < all.size(); ++i) {
    has_version[i].wait();
    const DeviceWork::Memory there = shards_.place_of(unit, all[i]);
    if (shards_.on_gpus())
      gpu_.copy_within(to + all[i].in_unit, there);
    else
      gpu_.copy_in(to + all[i].in_unit, there);
  }
}

// Work of the client that uses the memory may wait for other ranks, which may wait for places. So this thread
// waits until the memory is free before it requests any place; otherwise there could be a deadlock.
void DeviceShards::ask(UnitId unit, std::uint64_t version, std::span<std::byte> into, Done done) {
  const auto work = [this, unit, version, into](Done& done_when_copied) {
    gpu_.wait(into, DeviceWork::Use::kWrite);
    borrow(unit, version, into.data(), std::exchange(done_when_copied, nullptr));
  };
  asking_->add(work, std::move(done));
}

// Each part is copied as soon as it is lent, whatever the other parts wait for, so that its memory becomes
// free.
void DeviceShards::borrow(UnitId unit, std::uint64_t version, std::byte* to, Done done) {
  const auto lent = pieces_of(unit, true, shards_.most_lent()), others = shards_of(unit);
  const Done part_done = after(lent.size() + others.size(), std::move(done));
  for (const ParameterShards::Piece& part : lent)
    shards_.borrow(unit, version, part,
                   [this, at = to + part.in_unit, part_done](
                       DeviceWork::Memory from, const std::exception_ptr& error, const Done& used) {
                     if (error != nullptr) return part_done(error);
                     copy_borrowed(at, from, part_done, used);
                   });
  for (const ParameterShards::Piece& shard : others)
    shards_.await(unit, version, shard.owner,
                  [this, at = to + shard.in_unit, from = shards_.place_of(unit, shard),
                   part_done](const std::exception_ptr& error) {
                    if (error != nullptr) return part_done(error);
                    copy_borrowed(at, from, part_done, nullptr);
                  });
}

// used: null where nothing is returned.
void DeviceShards::copy_borrowed(std::byte* to, DeviceWork::Memory from, Done done, Done used) {
  const auto wait = [this, from](Done&) { gpu_.wait(from, DeviceWork::Use::kWrite); };
  const auto copy = [this, to, from](Done&) {
    shards_.are_passed() ? gpu_.copy_within(to, from, DeviceWork::Flow::kPassed)
                         : gpu_.copy_in(to, from, DeviceWork::Flow::kPassed);
  };
  copying_->add(
      copy, [this, wait, done = std::move(done), used = std::move(used)](const std::exception_ptr& error) {
        if (used) returning_->add(wait, used);
        done(error);
      });
}

void DeviceShards::receive(UnitId unit, std::uint64_t version, std::byte* to) {
  const std::vector<ParameterShards::Piece> pieces = shards_.pieces_of(unit);
  std::array<TransferGroup, kPieces> reads;
  const auto begin = [&](std::size_t i) {
    if (i >= pieces.size()) return;
    const std::span into{host(pieces_before_ + i), pieces[i].bytes};
    gpu_.wait(into, DeviceWork::Use::kWrite);
    shards_.read(unit, version, pieces[i], into, reads[i % kPieces].add());
  };
  for (std::size_t i = 0; i < kPieces; ++i) begin(i);
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    reads[i % kPieces].wait();
    gpu_.copy_in(to + pieces[i].in_unit, {host(pieces_before_ + i), pieces[i].bytes});
    begin(i + kPieces);
  }
  pieces_before_ += pieces.size();
}

}  // namespace sluice::engine
