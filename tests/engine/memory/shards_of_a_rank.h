#pragma once
#include "comm/worlds.h"
#include "engine/memory/parameter_shards.h"
#include "offload/records.h"
#include "offload/test_files.h"
#include "optim/optimizer.h"
#include "testing.h"

// A rank of tests that has shards of two units.
namespace sluice::engine {
inline constexpr std::size_t kElements = 10 * 4096;
inline constexpr std::size_t kPieceElements = StoredShards::kPiece / sizeof(float);

inline Layout two_units(std::size_t elements) {
  return Layout({{"one", {{"a", {elements}}}}, {"two", {{"b", {3, 4096}}, {"c", {1024}}}}});
}

// Where shards are, and of what kind the disk is.
struct Place {
  bool on_disk = false;
  std::size_t elements = kElements;  // of the first unit
  std::size_t pieces = StoredShards::kFewestPieces;
  offload::Faults faults = {};
  std::size_t relay_pieces = 8;  // where several ranks share a host
};

inline Plan partitioned(std::initializer_list<UnitId> units, const Place& place) {
  Plan plan;
  plan.units.resize(2);
  if (place.on_disk) plan.serving_pieces = place.pieces;
  plan.relay_pieces = place.relay_pieces;
  plan.relay_piece_bytes = Pieces::kMostBytes;
  for (const UnitId unit : units) {
    plan.units[unit].place(Part::kParameters, allocator::Tier::kRanks);
    plan.units[unit].shard_on_disk = place.on_disk;
  }
  return plan;
}

inline std::vector<float> values_of(const Layout& layout, UnitId unit, float first) {
  std::vector<float> values(layout.unit_elements(unit));
  std::iota(values.begin(), values.end(), first);
  return values;
}

struct Rank {
  explicit Rank(comm::Communicator& communicator, const Place& the_place = {},
                std::initializer_list<UnitId> units = {0, 1})
      : place(the_place),
        ranks(communicator, layout, *optimizer, std::vector<bool>(layout.units().size(), true)),
        shards(layout, partitioned(units, place), ranks) {
    shards.define(*backings);
    backings->allocate();
    shards.start(ledger);
  }
  void change(UnitId unit, float first) {
    shards.expect(unit);
    shards.take(unit, reinterpret_cast<const std::byte*>(values_of(layout, unit, first).data()));
    shards.publish(unit);
  }
  void begin_fetch(UnitId unit, std::vector<float>& into, Done done) {
    into.resize(layout.unit_elements(unit));
    shards.make_backing(unit)->fetch(0, std::as_writable_bytes(std::span(into)), std::move(done));
  }
  std::vector<float> fetch(UnitId unit) {
    std::vector<float> found;
    comm::Ending ending;
    begin_fetch(unit, found, ending.done());
    ending.wait();
    return found;
  }
  std::uint64_t bytes_read() const { return disk.counters().bytes_read; }

  const Place place;
  allocator::Ledger ledger;
  const std::unique_ptr<offload::File> inner = offload::make_memory_file("the disk");
  offload::RecordStore disk{offload::alone(offload::make_faulty_file(*inner, place.faults)), ledger};
  const std::unique_ptr<Backings> backings = make_backings(&disk);
  const Layout layout = two_units(place.elements);
  const std::unique_ptr<optim::Optimizer> optimizer = optim::make_optimizer({});
  Ranks ranks;
  ParameterShards shards;
};

}  // namespace sluice::engine
