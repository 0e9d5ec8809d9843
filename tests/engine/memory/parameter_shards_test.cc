#include "engine/memory/parameter_shards.h"

#include "core/error.h"
#include "engine/memory/shards_of_a_rank.h"

namespace sluice::engine {
namespace parameter_shards_test {

class ParameterShardsTest : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(InMemoryAndOnDisk, ParameterShardsTest, ::testing::Bool(),
                         [](const auto& place) { return place.param ? "Disk" : "Memory"; });

TEST_P(ParameterShardsTest, PutAUnitTogether) {
  for (const int size : {3, 12}) {
    comm::run_communicators(comm::World::kThreads, size, [&](comm::Communicator& communicator) {
      Rank rank(communicator, {GetParam()});
      for (const UnitId unit : {0u, 1u}) rank.change(unit, 5);
      for (const UnitId unit : {1u, 0u}) EXPECT_EQ(rank.fetch(unit), values_of(rank.layout, unit, 5));
      communicator.barrier(99, "the end");
    });
  }
}

TEST_P(ParameterShardsTest, AReaderWaitsForTheVersionThatItExpects) {
  comm::run_communicators(comm::World::kThreads, 2, [&](comm::Communicator& communicator) {
    Rank rank(communicator, {GetParam()});
    rank.change(0, 1);
    communicator.barrier(99, "the first version");
    if (communicator.rank() == 0) {
      rank.change(0, 2);
      std::vector<float> found;
      comm::Ending ending;
      rank.begin_fetch(0, found, ending.done());
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

TEST_P(ParameterShardsTest, WhatIsWholeIsRefused) {
  comm::run_communicators(comm::World::kThreads, 2, [&](comm::Communicator& communicator) {
    Rank rank(communicator, {GetParam()}, {0});
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
TEST_P(ParameterShardsTest, OfOneEngineAfterAnother) {
  comm::run_communicators(comm::World::kThreads, 3, [&](comm::Communicator& communicator) {
    for (const float value : {1.0f, 2.0f, 3.0f}) {
      communicator.barrier(98, "all begin");
      Rank rank(communicator, {GetParam()});
      rank.change(0, value);
      EXPECT_EQ(rank.fetch(0), values_of(rank.layout, 0, value));
      communicator.barrier(99, "all have read");
    }
  });
}

// They have many pieces, which pass through fewer pieces of memory, on a disk that takes its time; the ranks
// are at different places of the unit.
TEST(StoredShards, AreServedThroughFewPiecesToRanksThatComeWhenTheyWant) {
  for (const std::size_t pieces : {1, 4}) {
    comm::run_communicators(comm::World::kThreads, 4, [&](comm::Communicator& communicator) {
      Rank rank(communicator, {true, 40 * kPieceElements + 4096, pieces, {.delay_microseconds = 300}});
      for (const UnitId unit : {0u, 1u}) rank.change(unit, 5);
      communicator.barrier(96, "the values");
      std::this_thread::sleep_for(std::chrono::milliseconds(5 * communicator.rank()));
      for (const float version : {5.0f, 7.0f}) {
        if (version > 5) {
          communicator.barrier(97, "all have read");
          for (const UnitId unit : {0u, 1u}) rank.change(unit, version);
        }
        for (const UnitId unit : {1u, 0u})
          EXPECT_TRUE(rank.fetch(unit) == values_of(rank.layout, unit, version)) << pieces;
      }
      communicator.barrier(99, "the end");
    });
  }
}

// Both ranks have asked for each other's shards, through one piece of memory each, before any can be had.
TEST(StoredShards, AreServedWhileTheirOwnerWaitsForAnother) {
  comm::run_communicators(comm::World::kThreads, 2, [](comm::Communicator& communicator) {
    Rank rank(communicator, {true, 20 * kPieceElements, 1, {.delay_microseconds = 100}});
    for (const UnitId unit : {0u, 1u}) rank.change(unit, 3);
    communicator.barrier(96, "the values");
    std::vector<std::vector<float>> found(6);
    std::vector<comm::Ending> endings(found.size());
    for (std::size_t i = 0; i < found.size(); ++i)
      rank.begin_fetch(static_cast<UnitId>((i + static_cast<std::size_t>(communicator.rank())) % 2), found[i],
                       endings[i].done());
    for (comm::Ending& ending : endings) ending.wait();
    for (std::size_t i = 0; i < found.size(); ++i) {
      const auto unit = static_cast<UnitId>((i + static_cast<std::size_t>(communicator.rank())) % 2);
      EXPECT_TRUE(found[i] == values_of(rank.layout, unit, 3));
    }
    communicator.barrier(99, "the end");
  });
}

TEST(StoredShards, AreReadOnceForAllRanksThatComeTogether) {
  comm::run_communicators(comm::World::kThreads, 4, [](comm::Communicator& communicator) {
    // There is a place for each piece, so that no rank comes too late.
    Rank rank(communicator, {true, 20 * kPieceElements, 6});
    rank.change(0, 1);
    communicator.barrier(96, "the values");
    EXPECT_EQ(rank.fetch(0), values_of(rank.layout, 0, 1));
    communicator.barrier(97, "all have read");
    EXPECT_EQ(rank.bytes_read(), rank.ranks.own(0).size() * sizeof(float));
    communicator.barrier(99, "the end");
  });
}

// The others name the rank whose disk it is, and what could not be read.
TEST(StoredShards, ThatCannotBeReadEndTheWorkOfAllRanks) {
  for (const bool flipped : {false, true}) {
    comm::run_communicators(comm::World::kThreads, 3, [&](comm::Communicator& communicator) {
      Place place{true};
      if (communicator.rank() == 1) (flipped ? place.faults.read_flip : place.faults.read_error) = 1;
      Rank rank(communicator, place, {0});
      rank.change(0, 1);
      std::string error;
      try {
        communicator.barrier(96, "the values");  // which others may have passed
        rank.fetch(0);
      } catch (const Error& thrown) {
        error = thrown.what();
        communicator.fail(error);  // as an engine does
      }
      EXPECT_NE(error.find("shard of the parameters of one"), std::string::npos) << error;
      if (communicator.rank() == 1) return;
      EXPECT_NE(error.find("rank 1 has failed"), std::string::npos) << error;
    });
  }
}

}  // namespace parameter_shards_test
}  // namespace sluice::engine
