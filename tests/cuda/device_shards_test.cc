#include "engine/memory/device_shards.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>

#include "comm/worlds.h"
#include "cuda/engine_fixture.h"
#include "cuda/file_limit.h"
#include "thrown.h"

// Units that come to a GPU from the shards of all ranks. Each rank has a GPU.
namespace sluice::engine::twins {
namespace device_shards_test {

using comm::World;

// Few; more than pass through the memory of a rank at once, where shards are sent; and more than a place has
// of each of two ranks' shards.
constexpr std::size_t kFewElements = 1'000'000, kElements = 10'000'000, kManyElements = 17'000'000;

class OneOfRanks {
 public:
  OneOfRanks(comm::Communicator& of, Device& gpu, ShardPlace place, std::size_t places,
             std::size_t elements = kFewElements)
      : gpu_(gpu),
        layout_({{"unit", {{"a", {elements}}, {"b", {1000}}}}}),
        ranks_(of, layout_, *optimizer_, {true}),
        shards_(layout_, plan(place, places), ranks_),
        there_(ledger_, gpu, allocator::Purpose::kParameter, layout_.unit_bytes(0)),
        whole_(ledger_, gpu, allocator::Purpose::kParameter, layout_.unit_bytes(0)),
        back_(ledger_, gpu, allocator::Purpose::kStaging, layout_.unit_bytes(0)) {
    for (std::byte* const unit : {to(), whole()})
      work_.add({unit, layout_.unit_bytes(0)}, layout_.unit_bytes(0));
    work_.add({back_.data(), layout_.unit_bytes(0)}, layout_.unit_bytes(0));
  }
  ~OneOfRanks() { work_.finish(); }
  OneOfRanks(const OneOfRanks&) = delete;
  OneOfRanks& operator=(const OneOfRanks&) = delete;

  void start() {
    shards_.start(ledger_, &work_);
    from_ranks_.start(ledger_);
    from_ranks_.share();
  }
  bool shares() const { return shards_.is_shared(); }
  void change(float first) {
    const std::vector<float> all = values(first);
    shards_.expect(0);
    if (shards_.on_gpus()) {
      std::memcpy(back_.data(), all.data(), layout_.unit_bytes(0));
      work_.copy_in(whole(), {back_.data(), layout_.unit_bytes(0)});
      shards_.take(0, whole());
    } else {
      shards_.take(0, reinterpret_cast<const std::byte*>(all.data()));
    }
    shards_.publish(0);
  }
  void wait_for_own() {
    work_.wait({shards_.data(0), ranks_.own(0).size() * sizeof(float)}, DeviceWork::Use::kRead);
  }
  void begin_fetch(Done done) { unit_->fetch(0, {to(), layout_.unit_bytes(0)}, std::move(done)); }
  void fetch() {
    comm::Ending ending;
    begin_fetch(ending.done());
    ending.wait();
  }
  void await() { from_ranks_.await(0); }
  // The client uses the memory of the unit.
  void compute() {
    const DeviceWork::Memory unit{to(), layout_.unit_bytes(0)};
    work_.queue(work_.client(), {}, std::array{unit},
                [&] { gpu_.fill(work_.client(), there_.address(), std::byte{}, layout_.unit_bytes(0)); });
  }
  void borrow(int owner, std::size_t part, Pieces::Use use) {
    const auto parts = shards_.pieces_of(0, PassedShards::kMostBytes);
    const auto first = std::ranges::find(parts, owner, &ParameterShards::Piece::owner);
    shards_.borrow(0, shards_.expected(0), first[static_cast<std::ptrdiff_t>(part)], std::move(use));
  }
  // Returns what gives the place back.
  Done borrow(int owner, std::size_t part) {
    comm::Ending ending;
    Done give_back;
    borrow(owner, part,
           [&, lent = ending.done()](std::span<const std::byte>, const std::exception_ptr& error,
                                     const Done& used) {
             give_back = used;
             lent(error);
           });
    ending.wait();
    return give_back;
  }
  void borrow_and_return(std::size_t part_of_first_rank) {
    comm::Ending ending;
    borrow(0, part_of_first_rank,
           [lent = ending.done()](std::span<const std::byte>, const std::exception_ptr& error,
                                  const Done& used) {
             if (used) used(nullptr);
             lent(error);
           });
    ending.wait();
  }
  // Whether the GPU has these.
  bool has(float first) {
    work_.wait({to(), layout_.unit_bytes(0)}, DeviceWork::Use::kRead);
    gpu_.copy_out(work_.in(), back_.data(), there_.address(), layout_.unit_bytes(0));
    gpu_.synchronize(work_.in());
    const std::vector<float> all = values(first);
    return std::memcmp(back_.data(), all.data(), layout_.unit_bytes(0)) == 0;
  }
  std::size_t unit_bytes() const { return layout_.unit_bytes(0); }
  std::size_t shard_bytes() const { return ranks_.own(0).size() * sizeof(float); }
  std::size_t bytes_of_others() const { return layout_.unit_bytes(0) - ranks_.own(0).size() * sizeof(float); }
  std::size_t staging() const {
    return ledger_.snapshot()
        .lines[static_cast<std::size_t>(kHost)][static_cast<std::size_t>(allocator::Purpose::kStaging)]
        .current;
  }
  std::size_t own_staging() const { return round_up(layout_.unit_bytes(0), kHugePage); }

 private:
  Plan plan(ShardPlace place, std::size_t places) const {
    Plan plan;
    plan.units.resize(1);
    plan.units[0].place(Part::kParameters, allocator::Tier::kRanks);
    plan.units[0].compute = kDevice;
    plan.units[0].updated_on = place == ShardPlace::kGpu ? kDevice : kHost;
    if (place != ShardPlace::kPassed) return plan;
    plan.passing_places = places;
    plan.passing_place_bytes = std::min(PassedShards::kMostBytes, layout_.unit_bytes(0));
    return plan;
  }
  std::byte* whole() const { return reinterpret_cast<std::byte*>(whole_.address()); }
  std::byte* to() const { return reinterpret_cast<std::byte*>(there_.address()); }
  std::vector<float> values(float first) const {
    std::vector<float> all(layout_.unit_elements(0), first);
    for (std::size_t i = 0; i < all.size(); ++i) all[i] += static_cast<float>(i % 4096);
    return all;
  }

  Device& gpu_;
  allocator::Ledger ledger_;
  const Layout layout_;
  const std::unique_ptr<optim::Optimizer> optimizer_ = optim::make_optimizer({});
  Ranks ranks_;
  DeviceWork work_{gpu_};
  ParameterShards shards_;
  DeviceShards from_ranks_{shards_, work_};
  const std::unique_ptr<Backing> unit_ = from_ranks_.make(0);
  const allocator::DeviceRegion there_, whole_;
  const RegisteredRegion back_;
};

class DeviceShardsTest : public DeviceEngineTest {
 protected:
  void run(World world, int ranks, Schedule schedule, ShardPlace place,
           const std::function<void(comm::Communicator& of, OneOfRanks& rank)>& body,
           bool may_open_files = true, std::size_t places = 3, std::size_t elements = kFewElements) {
    device_.reset();
    fake()->begin({.schedule = schedule, .seed = 1, .memory = kGiB, .devices = ranks});
    FileLimit limit;
    comm::run_communicators(world, ranks, [&](comm::Communicator& of) {
      const std::unique_ptr<Device> device = open_device(of.rank());
      OneOfRanks rank(of, *device, place, places, elements);
      of.barrier(1, "all ranks");
      if (of.rank() == 0 && !may_open_files) limit.set(0);
      of.barrier(1, "the limit");
      rank.start();
      body(of, rank);
      of.barrier(1, "the end of the engines");
    });
  }
  // Where ranks are, and their shards.
  static std::vector<std::pair<World, ShardPlace>> worlds() {
    std::vector<std::pair<World, ShardPlace>> all = {{World::kThreads, ShardPlace::kHost},
                                                     {World::kThreads, ShardPlace::kPassed},
                                                     {World::kThreads, ShardPlace::kGpu}};
    if (comm::kForksAllowed) all.emplace_back(World::kProcesses, ShardPlace::kHost);
    return all;
  }
};

TEST_F(DeviceShardsTest, AreCopiedFromWhereTheirOwnersHaveThemAndNotSent) {
  SLUICE_NEEDS_THE_FAKE();
  for (const auto& [world, place] : worlds())
    run(world, 3, Schedule::kRandom, place, [&](comm::Communicator& of, OneOfRanks& rank) {
      EXPECT_EQ(rank.shares(), place != ShardPlace::kPassed);
      EXPECT_EQ(rank.staging(), rank.own_staging()) << "nothing passes through memory of a rank";
      for (const float version : {1.0f, 2.0f}) {
        rank.change(version);
        const std::uint64_t before = of.counters().received;
        rank.fetch();
        EXPECT_LT(of.counters().received - before, 4096u);
        EXPECT_TRUE(rank.has(version));
        of.barrier(1, "all have read");
      }
    });
}

// On several hosts, and where a rank cannot open another one's memory.
TEST_F(DeviceShardsTest, AreSentWhereTheyCannotBeShared) {
  SLUICE_NEEDS_THE_FAKE();
  for (const World world : {World::kMixedHosts, World::kThreads})
    run(
        world, 2, Schedule::kRandom, ShardPlace::kHost,
        [](comm::Communicator& of, OneOfRanks& rank) {
          EXPECT_FALSE(rank.shares());
          EXPECT_EQ(rank.staging(), rank.own_staging() + DeviceShards::bytes());
          rank.change(1);
          const std::uint64_t before = of.counters().received;
          rank.fetch();
          EXPECT_GE(of.counters().received - before, rank.bytes_of_others());
          EXPECT_TRUE(rank.has(1));
          of.barrier(1, "all have read");
        },
        world != World::kThreads, 3, kElements);
}

// Without that question the GPU would have what was there before.
TEST_F(DeviceShardsTest, AreCopiedWhenTheirOwnersHaveTheVersion) {
  SLUICE_NEEDS_THE_FAKE();
  for (const auto& [world, place] : worlds())
    run(world, 3, Schedule::kEarly, place, [](comm::Communicator& of, OneOfRanks& rank) {
      rank.change(1);
      rank.fetch();
      of.barrier(1, "all have the first version");
      const bool is_last = of.rank() == 2;
      if (is_last) of.barrier(1, "the others have asked");
      rank.change(2);
      comm::Ending ending;
      rank.begin_fetch(ending.done());
      if (!is_last) {
        EXPECT_FALSE(ending.has_come(std::chrono::milliseconds(200)));
        of.barrier(1, "the others have asked");
      }
      ending.wait();
      EXPECT_TRUE(rank.has(2));
    });
}

// A GPU that changes its shard late has it until then as it was.
TEST_F(DeviceShardsTest, OnGpusAreToldOfWhenTheGpuHasChangedThem) {
  SLUICE_NEEDS_THE_FAKE();
  run(World::kThreads, 3, Schedule::kLate, ShardPlace::kGpu, [](comm::Communicator& of, OneOfRanks& rank) {
    for (const float version : {1.0f, 2.0f}) {
      rank.change(version);
      rank.fetch();
      EXPECT_TRUE(rank.has(version));
      rank.await();
      of.barrier(1, "all have read");
    }
  });
}

TEST_F(DeviceShardsTest, AreInOneKindOfMemoryOnAllRanks) {
  SLUICE_NEEDS_THE_FAKE();
  device_.reset();
  fake()->begin({.memory = kGiB, .devices = 2});
  comm::run_communicators(World::kThreads, 2, [&](comm::Communicator& of) {
    const std::unique_ptr<Device> device = open_device(of.rank());
    OneOfRanks rank(of, *device, of.rank() == 1 ? ShardPlace::kGpu : ShardPlace::kPassed, 3);
    expect_error(
        ErrorCode::kInvalidArgument,
        {"in the memory of its GPU on rank 1, and passed by its GPU from host memory on rank 0", "links"},
        [&] { rank.start(); });
    of.barrier(1, "the end of the engines");
  });
}

// A GPU that is late copies what is there by then.
TEST_F(DeviceShardsTest, ChangeWhenEachRankHasWaitedForItsCopies) {
  SLUICE_NEEDS_THE_FAKE();
  for (const auto& [waits, place] : {std::pair{true, ShardPlace::kHost},
                                     {false, ShardPlace::kHost},
                                     {true, ShardPlace::kGpu},
                                     {false, ShardPlace::kGpu}})
    run(World::kThreads, 2, Schedule::kLate, place, [&](comm::Communicator& of, OneOfRanks& rank) {
      rank.change(1);
      of.barrier(1, "the first version");
      if (of.rank() == 0) rank.fetch();
      if (of.rank() == 0 && waits) rank.await();
      of.barrier(1, "the copies");
      if (of.rank() == 1) rank.change(2);
      if (of.rank() == 1) rank.wait_for_own();
      of.barrier(1, "the second version");
      EXPECT_TRUE(of.rank() == 1 || rank.has(1) == waits);
    });
}

// A GPU brings its rank's part over its link, once for all.
TEST_F(DeviceShardsTest, ThatArePassedCrossOneLinkOnce) {
  SLUICE_NEEDS_THE_FAKE();
  run(World::kThreads, 3, Schedule::kRandom, ShardPlace::kPassed,
      [](comm::Communicator& of, OneOfRanks& rank) {
        for (const float version : {1.0f, 2.0f}) {
          rank.change(version);
          of.barrier(1, "the version");
          const std::uint64_t before = fake()->counts().bytes_in;
          of.barrier(1, "the count");
          rank.fetch();
          EXPECT_TRUE(rank.has(version));
          of.barrier(1, "all have read");
          EXPECT_EQ(fake()->counts().bytes_in - before, rank.unit_bytes());
        }
      });
}

// A fetch reads the shard of each other rank once, in the memory of that rank's GPU, and nothing more there.
TEST_F(DeviceShardsTest, AreReadFromOtherGpusOnceInAFetch) {
  SLUICE_NEEDS_THE_FAKE();
  for (const ShardPlace place : {ShardPlace::kGpu, ShardPlace::kPassed})
    run(World::kThreads, 3, Schedule::kRandom, place, [](comm::Communicator& of, OneOfRanks& rank) {
      const auto read = [&] { return fake()->counts().of_devices[of.rank()].bytes_copied; };
      rank.change(1);
      const std::uint64_t before = read();
      rank.fetch();
      EXPECT_TRUE(rank.has(1));
      EXPECT_EQ(read() - before, rank.unit_bytes() - rank.shard_bytes());
      of.barrier(1, "all have read");
    });
}

// With one place, for two parts of each shard, which all ranks ask for at once.
TEST_F(DeviceShardsTest, ThatArePassedNeedNoMorePlacesThanOne) {
  SLUICE_NEEDS_THE_FAKE();
  for (const Schedule schedule : {Schedule::kLate, Schedule::kRandom})
    run(
        World::kThreads, 2, schedule, ShardPlace::kPassed,
        [](comm::Communicator& of, OneOfRanks& rank) {
          for (const float version : {1.0f, 2.0f}) {
            rank.change(version);
            rank.fetch();
            EXPECT_TRUE(rank.has(version));
            if (of.rank() == 0) rank.fetch();  // alone
            EXPECT_TRUE(rank.has(version));
            of.barrier(1, "all have read");
          }
        },
        true, 1, kManyElements);
}

// The work that the client queued before may itself wait for other ranks, which wait for places.
TEST_F(DeviceShardsTest, ThatArePassedAreAskedForWhenTheUnitsMemoryIsFree) {
  SLUICE_NEEDS_THE_FAKE();
  run(
      World::kThreads, 2, Schedule::kLate, ShardPlace::kPassed,
      [](comm::Communicator& of, OneOfRanks& rank) {
        const auto waits = [] { return fake()->counts().calls["cuEventSynchronize"]; };
        rank.change(1);
        const Done give_back = rank.borrow(of.rank(), 0);
        rank.change(2);
        of.barrier(1, "the only places have the version before");
        if (of.rank() == 1) {
          rank.compute();
          const std::uint64_t before = waits();
          comm::Ending all;
          rank.begin_fetch(all.done());
          for (int i = 0; i < 10'000 && waits() == before; ++i)
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
          EXPECT_GT(waits(), before) << "the rank waits for a place, and not for its client";
          EXPECT_FALSE(all.has_come(std::chrono::milliseconds(0)));
          of.barrier(1, "the client is done");
          give_back(nullptr);
          all.wait();
          EXPECT_TRUE(rank.has(2));
        } else {
          of.barrier(1, "the client is done");
          give_back(nullptr);
        }
      },
      true, 1);
}

// An engine ends when its places are given back. Who waits for one then learns of it, and the run goes on.
TEST_F(DeviceShardsTest, ThatArePassedEndWithWhatIsLent) {
  SLUICE_NEEDS_THE_FAKE();
  device_.reset();
  fake()->begin({.schedule = Schedule::kRandom, .seed = 1, .memory = kGiB, .devices = 2});
  comm::run_communicators(World::kThreads, 2, [](comm::Communicator& of) {
    const std::unique_ptr<Device> device = open_device(of.rank());
    auto rank = std::make_unique<OneOfRanks>(of, *device, ShardPlace::kPassed, 1, kManyElements);
    rank->start();
    rank->change(1);
    of.barrier(1, "the version");
    if (of.rank() == 1) {
      const Done give_back = rank->borrow(0, 0);
      comm::Ending second;
      rank->borrow(0, 1,
                   [lent = second.done()](std::span<const std::byte>, const std::exception_ptr& error,
                                          const Done& used) {
                     if (used) used(nullptr);
                     lent(error);
                   });
      of.barrier(2, "one is lent");
      EXPECT_FALSE(second.has_come(std::chrono::milliseconds(1000)));
      give_back(nullptr);
      EXPECT_THAT(second.error(), testing::HasSubstr("the engine that had it is destroyed"));
    } else {
      of.barrier(2, "one is lent");
    }
    rank.reset();
    of.barrier(3, "the next engine");
    EXPECT_EQ(of.failure(), "");
  });
}

// A GPU that is late copies what is in the place by then.
TEST_F(DeviceShardsTest, ThatArePassedKeepTheirPlacesUntilTheyAreCopied) {
  SLUICE_NEEDS_THE_FAKE();
  run(
      World::kThreads, 2, Schedule::kLate, ShardPlace::kPassed,
      [](comm::Communicator& of, OneOfRanks& rank) {
        rank.change(1);
        if (of.rank() == 1) rank.fetch();
        of.barrier(1, "the copies are queued");
        rank.change(2);
        if (of.rank() == 0) rank.borrow_and_return(0);
        of.barrier(1, "the place has another version");
        EXPECT_TRUE(of.rank() == 0 || rank.has(1));
      },
      true, 1);
}

}  // namespace device_shards_test
}  // namespace sluice::engine::twins
