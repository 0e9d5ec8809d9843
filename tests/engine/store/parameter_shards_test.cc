#include "engine/store/parameter_shards.h"

#include <gtest/gtest.h>

#include <numeric>

#include "comm/worlds.h"
#include "optim/optimizer.h"

namespace sluice::engine {
namespace {

constexpr std::size_t kElements = 10 * 4096;

Layout two_units() {
  return Layout({{"one", {{"a", {kElements}}}}, {"two", {{"b", {3, 4096}}, {"c", {1024}}}}});
}

Plan partitioned(std::initializer_list<UnitId> units) {
  Plan plan;
  plan.units.resize(2);
  for (const UnitId unit : units) plan.units[unit].place(Part::kParameters, allocator::Tier::kRanks);
  return plan;
}

std::vector<float> values_of(const Layout& layout, UnitId unit, float first) {
  std::vector<float> values(layout.unit_elements(unit));
  std::iota(values.begin(), values.end(), first);
  return values;
}

struct Rank {
  explicit Rank(comm::Communicator& communicator, std::initializer_list<UnitId> units = {0, 1})
      : ranks(communicator, layout, *optimizer, true), shards(layout, partitioned(units), ranks) {
    shards.start(ledger);
  }
  void change(UnitId unit, float first) {
    shards.expect(unit);
    shards.take(unit, reinterpret_cast<const std::byte*>(values_of(layout, unit, first).data()));
    shards.publish(unit);
  }
  std::vector<float> fetch(UnitId unit) {
    std::vector<float> found(layout.unit_elements(unit));
    comm::Ending ending;
    shards.make_backing(unit)->fetch(0, std::as_writable_bytes(std::span(found)), ending.done());
    ending.wait();
    return found;
  }
  allocator::Ledger ledger;
  const Layout layout = two_units();
  const std::unique_ptr<optim::Optimizer> optimizer = optim::make_optimizer({});
  Ranks ranks;
  ParameterShards shards;
};

TEST(ParameterShards, PutAUnitTogether) {
  for (const int size : {2, 3, 5, 12}) {
    comm::run_communicators(comm::World::kThreads, size, [](comm::Communicator& communicator) {
      Rank rank(communicator);
      for (const UnitId unit : {0u, 1u}) rank.change(unit, 5);
      for (const UnitId unit : {1u, 0u}) EXPECT_EQ(rank.fetch(unit), values_of(rank.layout, unit, 5));
      communicator.barrier(99, "the end");
    });
  }
}

TEST(ParameterShards, AReaderWaitsForTheVersionThatItExpects) {
  comm::run_communicators(comm::World::kThreads, 2, [](comm::Communicator& communicator) {
    Rank rank(communicator);
    rank.change(0, 1);
    communicator.barrier(99, "the first version");
    if (communicator.rank() == 0) {
      rank.change(0, 2);
      std::vector<float> found(rank.layout.unit_elements(0));
      comm::Ending ending;
      rank.shards.make_backing(0)->fetch(0, std::as_writable_bytes(std::span(found)), ending.done());
      EXPECT_FALSE(ending.has_come(std::chrono::milliseconds(200)));
      communicator.barrier(98, "the reader has asked");
      ending.wait();
      EXPECT_EQ(found, values_of(rank.layout, 0, 2));
    } else {
      communicator.barrier(98, "the reader has asked");
      rank.change(0, 2);
    }
    communicator.barrier(97, "the end");
  });
}

TEST(ParameterShards, WhatIsWholeIsRefused) {
  comm::run_communicators(comm::World::kThreads, 2, [](comm::Communicator& communicator) {
    Rank rank(communicator, {0});
    EXPECT_TRUE(rank.shards.has(0));
    EXPECT_FALSE(rank.shards.has(1));
    rank.change(0, 1);
    communicator.barrier(99, "the values");
    std::vector<std::byte> bytes(8);
    for (const std::uint64_t key : {1u, 7u, 0u}) {  // whole, unknown, of another size
      comm::Ending ending;
      communicator.read(1 - communicator.rank(), key, 1, 0, bytes, ending.done());
      EXPECT_FALSE(ending.error().empty());
    }
    EXPECT_EQ(rank.fetch(0), values_of(rank.layout, 0, 1));
    communicator.barrier(98, "the end");
  });
}

// Versions begin anew, once all ranks have destroyed what they had.
TEST(ParameterShards, OfOneEngineAfterAnother) {
  comm::run_communicators(comm::World::kThreads, 3, [](comm::Communicator& communicator) {
    for (const float value : {1.0f, 2.0f, 3.0f}) {
      communicator.barrier(98, "all begin");
      Rank rank(communicator);
      rank.change(0, value);
      EXPECT_EQ(rank.fetch(0), values_of(rank.layout, 0, value));
      communicator.barrier(99, "all have read");
    }
  });
}

}  // namespace
}  // namespace sluice::engine
