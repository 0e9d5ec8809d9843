#include <gtest/gtest-spi.h>

#include "comm/worlds.h"
#include "cuda/engine_client.h"
#include "engine/memory/device_work.h"

// Mutants: an engine whose waits are left out, all those of a kind at a time, by the fake driver. Each must
// show, as other bits than the CPU's, as an error, or as a misuse that the driver notices.
namespace sluice::engine::twins {
namespace left_out_waits_test {

using allocator::Tier;
using fake_cuda::LeftOut;

// Streams in the order in which train_on_gpu() and DeviceWork make them.
enum Stream { kClient, kIn, kOut, kChunksIn, kChunksOut, kNumbers, kUpdates, kRanks, kBrought, kBorrowed };
constexpr const char* kNames[] = {"the client's", "in",      "out",   "chunks in", "chunks out",
                                  "numbers",      "updates", "ranks", "brought",   "borrowed"};

// Returns the streams that a stream has to wait for itself. It needs not wait for others, since it has waited
// for a third one that has, or since the caller has: before anything is updated, for the norm. A value that
// the client changes while it goes out goes out again, over the first copy. A shard is brought to a place,
// and copied from there, when the caller has waited for the one that was there before. Before others use a
// piece, the thread that exchanges it has waited for the stream of ranks. Chunks in wait for gradients that
// go out, and for updates where gradients alone stream, which shows here in some runs only.
std::vector<Stream> awaited_by(Stream stream) {
  switch (stream) {
    case kClient:
      return {kIn, kUpdates, kBorrowed};
    case kIn:
      return {kClient, kOut, kUpdates};
    case kOut:
      return {kClient, kIn, kUpdates, kBorrowed};
    case kChunksIn:
      return {kChunksOut};
    case kChunksOut:
      return {kUpdates};
    case kNumbers:
      return {kClient};
    case kUpdates:
      return {kClient, kIn, kChunksIn};
    case kRanks:
    case kBrought:
    case kBorrowed:
      return {};
  }
  return {};
}

// Together they use every way in which memory passes from one stream to another.
enum Way {
  kInHostMemory,
  kOnTheDevice,
  kGradientsOnDisk,
  kLooks,
  kLeaves,
  kOfRanks,
  kOfShards,
  kOfGpus,
  kByNccl,
  kOfPassed,
  kOfShardsOnGpus
};

class LeftOutWaitsTest : public KernelTest {
 protected:
  // Of a DeviceWork, in the order in which it makes them, with the client's.
  static constexpr int kStreams = static_cast<int>(DeviceWork::kStreams) + 1;
  using Schedule = fake_cuda::Schedule;
  struct Scenario {
    Case setup;
    std::vector<Outcome> expected;  // by rank
  };
  // gpu: null where all compute on the CPU; else the first rank's, whose streams are made first.
  static std::vector<Outcome> train(const Case& setup, Device* gpu) {
    const auto train_one = [](const Case& own, Device* device, comm::Communicator* others) {
      return device == nullptr ? train_on_cpu(own, others)
                               : train_on_gpu(
                                     own, *device, [](Made&) {}, others);
    };
    if (setup.ranks.size == 1) return {train_one(setup, gpu, nullptr)};
    std::vector<Outcome> outcomes(static_cast<std::size_t>(setup.ranks.size));
    comm::run_communicators(comm::World::kThreads, setup.ranks.size, [&](comm::Communicator& of) {
      Case own = setup;
      own.ranks.rank = of.rank();
      std::unique_ptr<Device> other;
      std::unique_ptr<comm::Nccl> nccl;
      if (gpu != nullptr && own.ranks.by_nccl) {
        if (of.rank() > 0) other = open_device(of.rank());
        nccl = joined_by_nccl(of, of.rank() == 0 ? *gpu : *other);
        own.nccl = nccl.get();
      }
      if (gpu != nullptr && of.rank() > 0) {
        constexpr std::uint64_t kOfFirst = DeviceWork::kStreams + 2;  // and the client's, before and after
        const auto made = [](fake_cuda::Counts counts) {
          return counts.calls["cuStreamCreate"] + counts.calls["cuStreamCreateWithPriority"];
        };
        while (made(fake()->counts()) < kOfFirst) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        if (other == nullptr) other = open_device(of.rank());
      }
      outcomes[static_cast<std::size_t>(of.rank())] = train_one(own, of.rank() == 0 ? gpu : other.get(), &of);
    });
    return outcomes;
  }

  static Scenario scenario_of(Way way) {
    Case setup;
    setup.blocks = 10;  // more than there are frames and slots for
    setup.steps = 2, setup.micro_batches = 2;
    const Tier tier = way == kOnTheDevice || way == kLooks ? Tier::kDevice : Tier::kHost;
    setup.places = {tier, tier, way == kLeaves ? Tier::kDevice : tier};
    if (way == kGradientsOnDisk) {
      setup.places = {Tier::kHost, Tier::kDisk, Tier::kDevice};
      setup.updates = Tier::kDevice;
    }
    setup.looks = way == kLooks;
    setup.leaves = way == kLeaves;
    if (way == kOfRanks || way == kOfGpus || way == kByNccl) {
      setup.ranks = {0, 2};
      setup.ranks.gpus_meet = way != kOfRanks;
      setup.ranks.by_nccl = way == kByNccl;
      setup.places = {Tier::kDevice, Tier::kDevice, Tier::kDevice};
      setup.updates = Tier::kDevice;
      setup.stage = 1;
    }
    if (way == kOfShards) {  // where gradients also wait in host memory, and units are fetched after the last
      setup.ranks = {0, 2};
      setup.stage = 3;
      setup.looks = true;
    }
    if (way == kOfPassed || way == kOfShardsOnGpus) {
      setup.ranks = {0, 2};
      setup.ranks.gpus_meet = true;
      setup.stage = 3;
      setup.updates = way == kOfPassed ? Tier::kHost : Tier::kDevice;
      setup.places = {Tier::kDevice, *setup.updates, *setup.updates};
      setup.looks = true;
    }
    Scenario scenario = {setup, train(setup, nullptr)};
    return scenario;
  }
  // In which it shows that this is left out.
  static Way way_of(const LeftOut& what) {
    if (what.function == "cuStreamSynchronize") return kLeaves;
    if (what.awaited == kBorrowed) return kOfPassed;
    if (what.stream == kClient && what.awaited == kUpdates) return kOnTheDevice;
    if (what.stream == kIn && what.awaited == kUpdates) return kGradientsOnDisk;
    if (what.stream == kUpdates && what.awaited == kClient) return kLooks;
    return kInHostMemory;
  }

  void expect_found(const Scenario& scenario, const LeftOut& mutant) {
    times_ = 0;
    EXPECT_FALSE(is_right(scenario, mutant)) << text(mutant) << ", left out " << times_ << " times";
  }
  // Whether the training is as the CPU's, without an error and without a misuse: where work is done late, and
  // where some of it is done before what others forgot to wait for.
  bool is_right(const Scenario& scenario, const std::optional<LeftOut>& left_out) {
    // In some of so many the stream that is to wait is the faster one.
    const std::uint64_t seeds = left_out ? 24 : 1;
    for (std::uint64_t seed = 0; seed <= seeds; ++seed)
      if (!is_right(scenario, left_out,
                    {.schedule = seed == 0 ? Schedule::kLate : Schedule::kRandom, .seed = seed}))
        return false;
    return true;
  }
  bool is_right(const Scenario& scenario, const std::optional<LeftOut>& left_out,
                fake_cuda::Settings settings) {
    device_.reset();
    settings.devices = scenario.setup.ranks.size;
    fake()->begin(settings);
    if (left_out) fake()->leave_out(*left_out);
    bool is_right = false;
    {
      // Failures at the end are expected here, too.
      testing::TestPartResultArray failures;
      const testing::ScopedFakeTestPartResultReporter reporter(
          testing::ScopedFakeTestPartResultReporter::INTERCEPT_ALL_THREADS, &failures);
      try {
        device_ = open_device(0);
        is_right = train(scenario.setup, device_.get()) == scenario.expected;
      } catch (const Error&) {
      }
      device_.reset();
      is_right &= failures.size() == 0;
    }
    times_ += fake()->left_out();
    const bool misused = !fake()->take_misuses().empty();
    const bool leaks = !fake()->alive().empty();
    fake()->begin({});
    return is_right && !misused && !leaks;
  }

  static std::string text(const LeftOut& what) {
    std::string text = what.function + " of " + kNames[what.stream];
    if (what.awaited >= 0) text += std::string(" for ") + kNames[what.awaited];
    return text;
  }

  std::uint64_t times_ = 0;  // something was left out
};

class WaitsOfAStream : public LeftOutWaitsTest, public testing::WithParamInterface<Stream> {};
INSTANTIATE_TEST_SUITE_P(In, WaitsOfAStream, testing::Values(kChunksIn));
INSTANTIATE_TEST_SUITE_P(Long, WaitsOfAStream,
                         testing::Values(kClient, kIn, kOut, kChunksOut, kNumbers, kUpdates));

TEST_P(WaitsOfAStream, AreFoundWhereTheyAreLeftOut) {
  SLUICE_NEEDS_THE_FAKE();
  const Stream stream = GetParam();
  std::vector<LeftOut> mutants = {{"cuEventRecord", stream}};
  for (const Stream awaited : awaited_by(stream)) mutants.push_back({"cuStreamWaitEvent", stream, awaited});
  if (stream == kUpdates) mutants.push_back({"cuStreamSynchronize", stream});
  if (stream == kIn || stream == kOut || stream == kNumbers)
    for (const char* function : {"cuEventSynchronize", "cuEventQuery"}) mutants.push_back({function, stream});
  std::map<Way, Scenario> scenarios;
  for (const LeftOut& mutant : mutants) {
    const Way way = way_of(mutant);
    if (scenarios.count(way) == 0) {
      scenarios[way] = scenario_of(way);
      EXPECT_TRUE(is_right(scenarios[way], std::nullopt));
    }
    expect_found(scenarios[way], mutant);
  }
}

struct LeftOutOf {
  Way way;
  std::vector<LeftOut> mutants;
};
class WaitsOfRanks : public LeftOutWaitsTest, public testing::WithParamInterface<LeftOutOf> {};
constexpr const char* kRecord = "cuEventRecord";
constexpr const char* kSynchronize = "cuEventSynchronize";
constexpr const char* kQuery = "cuEventQuery";
const LeftOutOf kOfEachWay[] = {
    // Pieces that GPUs read of each other, which must be there before they are told of, and read before they
    // change.
    {kOfGpus, {{kSynchronize, kRanks}, {kRecord, kRanks}}},
    // Pieces that NCCL sends, which must be there before, and have come before they are used.
    {kByNccl, {{"cuStreamWaitEvent", kRanks, kClient}, {kRecord, kRanks}}},
    // Shards in places that other GPUs copy from, which must be there before they are lent, and copied before
    // they are given back.
    {kOfPassed, {{kSynchronize, kBrought}, {kRecord, kBorrowed}}}};
INSTANTIATE_TEST_SUITE_P(In, WaitsOfRanks, testing::ValuesIn(kOfEachWay));
// Of shards that GPUs copy of each other, the last: that they are updated before they are told of is seen by
// device_shards_test.cc, and here in some runs only.
const LeftOutOf kOthers[] = {
    // Pieces that leave, and those that have come and whose memory is used again.
    {kOfRanks, {{kSynchronize, kOut}, {kSynchronize, kIn}}},
    {kOfShards, {{kSynchronize, kOut}, {kSynchronize, kIn}}},
    {kOfGpus,
     {{kSynchronize, kNumbers},
      {"cuStreamWaitEvent", kRanks, kClient},
      {"cuStreamWaitEvent", kRanks, kUpdates}}},
    {kByNccl, {{kSynchronize, kNumbers}, {"cuStreamWaitEvent", kRanks, kUpdates}}},
    {kOfPassed, {{kRecord, kBrought}, {kQuery, kBrought}, {kSynchronize, kBorrowed}, {kQuery, kBorrowed}}},
    {kOfShardsOnGpus, {{kSynchronize, kIn}}}};
INSTANTIATE_TEST_SUITE_P(Long, WaitsOfRanks, testing::ValuesIn(kOthers));

TEST_P(WaitsOfRanks, AreFoundWhereTheyAreLeftOut) {
  SLUICE_NEEDS_THE_FAKE();
  const Scenario scenario = scenario_of(GetParam().way);
  EXPECT_TRUE(is_right(scenario, std::nullopt));
  for (const LeftOut& mutant : GetParam().mutants) expect_found(scenario, mutant);
}

// A piece of memory passes from one stream to another, and no third stream or thread has waited for it.
TEST_F(LeftOutWaitsTest, OfEachStreamForEachOtherIsFound) {
  SLUICE_NEEDS_THE_FAKE();
  for (int pair = 0; pair < kStreams * kStreams; ++pair)
    for (const bool leaves_out : {false, true}) {
      const int stream = pair / kStreams, awaited = pair % kStreams;
      if (stream == awaited) continue;
      device_.reset();
      fake()->begin({.schedule = Schedule::kLate});
      if (leaves_out) fake()->leave_out({"cuStreamWaitEvent", stream, awaited});
      device_ = open_device(0);
      allocator::Ledger ledger;
      const allocator::DeviceRegion region(ledger, *device_, allocator::Purpose::kStaging, kHugePage);
      const DeviceWork::Memory memory(reinterpret_cast<const std::byte*>(region.address()), kHugePage);
      HostMemory seen(*device_, 16);
      DeviceWork work(*device_);
      work.add(memory, memory.size());
      std::vector<CUstream_st*> all;
      std::ranges::copy(work.streams(), std::back_inserter(all));
      all.push_back(work.client());
      for (const int writer : {awaited, stream}) {
        CUstream_st* const on = all[static_cast<std::size_t>(writer)];
        work.queue(on, {}, {&memory, 1},
                   [&] { device_->fill(on, region.address(), std::byte{writer == stream}, seen.size()); });
      }
      work.wait(memory, DeviceWork::Use::kRead);
      work.wait_for_all();
      device_->copy_out(work.client(), seen.data(), region.address(), seen.size());
      work.wait_for_all();
      EXPECT_EQ(seen[0] == std::byte{1}, !leaves_out) << stream << " for " << awaited;
    }
}

// They are waited for before memory is unmapped, in the first steps and at the end.
TEST_F(LeftOutWaitsTest, EachStreamThatNobodyWaitsForIsFound) {
  SLUICE_NEEDS_THE_FAKE();
  for (int left_out = -1; left_out < kStreams; ++left_out) {
    device_.reset();
    fake()->begin({.schedule = Schedule::kLate});
    if (left_out >= 0) fake()->leave_out({"cuStreamSynchronize", left_out});
    device_ = open_device(0);
    allocator::Ledger ledger;
    const allocator::DeviceRegion memory(ledger, *device_, allocator::Purpose::kStaging, kHugePage);
    DeviceWork work(*device_);
    int stream_index = 0;
    std::vector<CUstream_st*> all;
    std::ranges::copy(work.streams(), std::back_inserter(all));
    all.push_back(work.client());
    for (CUstream_st* const stream : all) {
      const Device::Event event = device_->make_event(false);
      device_->fill(stream, memory.address(), std::byte{1}, 16);
      device_->record(event.get(), stream);
      work.wait_for_all();
      EXPECT_EQ(device_->is_done(event.get()), stream_index++ != left_out);
      device_->synchronize(event.get());
    }
  }
}

}  // namespace left_out_waits_test
}  // namespace sluice::engine::twins
