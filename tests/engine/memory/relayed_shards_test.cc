#include "engine/memory/relayed_shards.h"

#include "core/error.h"
#include "engine/memory/shards_of_a_rank.h"

// Shards of ranks of other hosts, each of which comes to a host once.
namespace sluice::engine {
namespace relayed_shards_test {

using comm::World;

std::size_t host_of(World world, const comm::Communicator& communicator) {
  return static_cast<std::size_t>(comm::host_of(world, communicator.rank()));
}

// The bytes of a unit that ranks of other hosts have.
std::size_t foreign_bytes(World world, const Rank& rank, UnitId unit) {
  std::size_t bytes = 0;
  for (int other = 0; other < rank.ranks.size(); ++other)
    if (comm::host_of(world, other) != comm::host_of(world, rank.ranks.rank()))
      bytes += rank.ranks.shard(unit, other).size() * sizeof(float);
  return bytes;
}

struct Hosts {
  World world;
  int ranks;
};
void PrintTo(const Hosts& hosts, std::ostream* to) {
  PrintTo(hosts.world, to);
  *to << " of " << hosts.ranks << " ranks";
}

class RelayedShardsTest : public ::testing::TestWithParam<std::tuple<Hosts, bool>> {
 protected:
  static World world() { return std::get<0>(GetParam()).world; }
  static int ranks() { return std::get<0>(GetParam()).ranks; }
  static bool on_disk() { return std::get<1>(GetParam()); }
};
// By number, each in memory or on disk; the other half is long.
std::vector<std::tuple<Hosts, bool>> half_of_hosts(std::size_t begin) {
  constexpr Hosts kAll[] = {{World::kHosts, 4},     {World::kHosts, 5},      {World::kHosts, 8},
                            {World::kWideHosts, 7}, {World::kMixedHosts, 4}, {World::kMixedHosts, 5}};
  std::vector<std::tuple<Hosts, bool>> half;
  for (std::size_t i = 0; i < std::size(kAll); ++i) half.emplace_back(kAll[i], (begin + i) % 2 == 1);
  return half;
}
INSTANTIATE_TEST_SUITE_P(Hosts, RelayedShardsTest, ::testing::ValuesIn(half_of_hosts(0)));
INSTANTIATE_TEST_SUITE_P(Long, RelayedShardsTest, ::testing::ValuesIn(half_of_hosts(1)));

// Units have less than a piece or many, of one version and then another, and pass through few or many.
TEST_P(RelayedShardsTest, PutAUnitTogether) {
  for (const std::size_t pieces : {1, 8})
    comm::run_communicators(world(), ranks(), [&](comm::Communicator& communicator) {
      Rank rank(communicator, {on_disk(), 12 * kPieceElements + 4096, 4, {}, pieces});
      for (const float version : {5.0f, 7.0f}) {
        for (const UnitId unit : {0u, 1u}) rank.change(unit, version);
        for (const UnitId unit : {1u, 0u})
          EXPECT_TRUE(rank.fetch(unit) == values_of(rank.layout, unit, version));
        communicator.barrier(99, "all have read");
      }
    });
}

TEST_P(RelayedShardsTest, ComeToAHostOnce) {
  std::array<std::atomic<std::size_t>, 8> came{}, expected{};
  comm::run_communicators(world(), ranks(), [&](comm::Communicator& communicator) {
    Rank rank(communicator, {on_disk(), 12 * kPieceElements + 4096, 4, {}, 12});
    for (const UnitId unit : {0u, 1u}) rank.change(unit, 5);
    const std::uint64_t before = communicator.counters().received_from_hosts;
    communicator.barrier(97, "the values");
    for (const UnitId unit : {0u, 1u}) rank.fetch(unit);
    communicator.barrier(98, "all have read");
    came[host_of(world(), communicator)] += communicator.counters().received_from_hosts - before;
    expected[host_of(world(), communicator)] =
        foreign_bytes(world(), rank, 0) + foreign_bytes(world(), rank, 1);
  });
  for (std::size_t host = 0; host < came.size(); ++host) EXPECT_EQ(came[host], expected[host]) << host;
}

// Reads of a version that is still to come, of many pieces, leave room for others, for which its owner waits.
TEST(RelayedShards, AreReadWhileOthersWaitForAVersion) {
  comm::run_communicators(World::kHosts, 4, [](comm::Communicator& communicator) {
    Rank rank(communicator, {false, 20 * kPieceElements, 4, {}, 1});
    for (const UnitId unit : {0u, 1u}) rank.change(unit, 1);
    communicator.barrier(96, "the values");
    const bool waits = communicator.rank() < 2;
    std::vector<float> found;
    comm::Ending ending;
    if (waits) {
      rank.change(0, 2);
      rank.begin_fetch(0, found, ending.done());
      EXPECT_EQ(rank.fetch(1), values_of(rank.layout, 1, 1));
      EXPECT_FALSE(ending.has_come(std::chrono::milliseconds(1)));
    }
    communicator.barrier(97, "the others are read");
    if (!waits) rank.change(0, 2);
    if (waits) {
      ending.wait();
      EXPECT_EQ(found, values_of(rank.layout, 0, 2));
    }
    communicator.barrier(98, "the end");
  });
}

// A rank that waits for a version learns that the engine through which it reads is gone.
TEST(RelayedShards, OfAnEngineThatIsDestroyedAreRefused) {
  comm::run_communicators(World::kHosts, 4, [](comm::Communicator& communicator) {
    auto rank = std::make_unique<Rank>(communicator);
    rank->change(0, 1);
    communicator.barrier(96, "the values");
    std::vector<float> found;
    comm::Ending ending;
    if (communicator.rank() == 0) {
      rank->change(0, 2);
      rank->begin_fetch(0, found, ending.done());
      EXPECT_FALSE(ending.has_come(std::chrono::milliseconds(200)));
    }
    communicator.barrier(97, "rank 0 has asked");
    if (communicator.rank() == 1) rank->change(0, 2), rank.reset();
    communicator.barrier(98, "rank 1 has no engine");
    if (communicator.rank() > 1) rank->change(0, 2);
    if (communicator.rank() == 0) {
      EXPECT_NE(ending.error().find("is destroyed"), std::string::npos);
    }
    communicator.barrier(99, "the end");
  });
}

// A request for a shard that this rank does not relay, or of another size, is refused, and hangs nobody.
TEST(RelayedShards, AreReadAsTheyAre) {
  comm::run_communicators(World::kHosts, 4, [](comm::Communicator& communicator) {
    Rank rank(communicator);
    rank.change(0, 1);
    communicator.barrier(96, "the values");
    if (communicator.rank() == 0) {
      const int relay = communicator.hosts().relay(0, 2), other = relay == 1 ? 3 : 2;
      const int relayed = relay == 1 ? 2 : 3;
      std::vector<std::byte> bytes(rank.ranks.shard(0, relayed).size() * sizeof(float));
      const auto read = [&](int owner, std::uint64_t offset, std::size_t size) {
        comm::Ending ending;
        communicator.read_through(1, owner, 0, 1, offset, std::span(bytes).first(size), ending.done());
        return ending.error();
      };
      EXPECT_NE(read(other, 0, bytes.size()).find("elsewhere"), std::string::npos);
      EXPECT_NE(read(relayed, 0, bytes.size() - 4).find("another size"), std::string::npos);
      EXPECT_NE(read(relayed, 4, bytes.size() - 4).find("another size"), std::string::npos);
      EXPECT_NE(read(relayed, 0, 0).find("another size"), std::string::npos);
    }
    communicator.barrier(97, "the end");
  });
}

}  // namespace relayed_shards_test
}  // namespace sluice::engine
