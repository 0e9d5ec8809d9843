#include "engine/planner/walk.h"

#include <fmt/core.h>

#include "core/bytes.h"
#include "engine/planner/placement.h"
#include "engine/planner/planner.h"
#include "testing.h"

namespace sluice::engine {
namespace device_walk_test {

// Rates at which 100 bytes take a second in each direction, also both ways at once, and on the disk.
MachineRates slow() {
  MachineRates rates;
  rates.gpu.in = rates.gpu.out = rates.disk_read = rates.disk_write = 100;
  rates.gpu.both = 200;
  return rates;
}

// Units that compute for a second forward and for two backward, with frames of one extent in backward.
std::vector<UnitOnGpu> computed(std::size_t count) {
  UnitOnGpu unit;
  unit.forward.compute = 1;
  unit.backward.compute = 2;
  unit.backward.extents = 1;
  return std::vector<UnitOnGpu>(count, unit);
}

// With room for everything, and updates in one chunk.
GpuReach ample(bool in_backward) {
  GpuReach reach;
  reach.ahead = 1;
  reach.extents = 100;
  reach.in_backward = in_backward;
  reach.gpu = reach.cpu = {100, 1};
  reach.ranks = {100, 4};
  return reach;
}

void update(UnitOnGpu& unit, bool by_cpu, double seconds, std::uint64_t in, std::uint64_t out) {
  unit.by_cpu = by_cpu;
  unit.elements = 100;
  unit.update = seconds;
  unit.in = in;
  unit.out = out;
}

TEST(WalkOnGpu, IsWhatTheClientComputesWhereAllIsThere) {
  EXPECT_DOUBLE_EQ(walk_on_gpu(computed(4), ample(false), slow()), 12);
  EXPECT_EQ(walk_on_gpu({}, ample(false), slow()), 0);
}

TEST(WalkOnGpu, ComputingHidesWhatIsFetchedMeanwhile) {
  std::vector<UnitOnGpu> units = computed(4);
  for (UnitOnGpu& unit : units) unit.forward.fetched = 100;
  EXPECT_DOUBLE_EQ(walk_on_gpu(units, ample(false), slow()), 12);
  for (UnitOnGpu& unit : units) unit.forward.fetched = 300;
  // The first one comes beside the end of backward, and the others take 3 s each.
  EXPECT_DOUBLE_EQ(walk_on_gpu(units, ample(false), slow()), 12 + 1 + 3 * 2);
  // From the disk it comes before the link's turn, beside which the disk has the next one's.
  for (UnitOnGpu& unit : units) unit.forward.from_disk = 300;
  EXPECT_DOUBLE_EQ(walk_on_gpu(units, ample(false), slow()), 12 + 4 + 2 + 3 + 2);
}

TEST(WalkOnGpu, CopiesBothWaysSlowEachOther) {
  std::vector<UnitOnGpu> units = computed(1);
  units[0].forward = units[0].backward = {};
  update(units[0], false, 0, 1000, 1000);
  GpuReach reach = ample(true);
  EXPECT_DOUBLE_EQ(walk_on_gpu(units, reach, slow()), 20);
  reach.gpu = {10, 2};  // one chunk comes in while the one before goes out
  EXPECT_DOUBLE_EQ(walk_on_gpu(units, reach, slow()), 11);
  MachineRates rates = slow();
  rates.gpu.both = 100;
  EXPECT_NEAR(walk_on_gpu(units, reach, rates), 20, 2);
}

// A chunk's gradient leaves for a second, the CPU updates for two, and parameters come back for one.
TEST(WalkOnGpu, SlotsLetChunksFollowEachOther) {
  std::vector<UnitOnGpu> units = computed(1);
  units[0].forward = units[0].backward = {};
  update(units[0], true, 20, 1000, 1000);
  GpuReach reach = ample(true);
  for (const auto& [slots, seconds] : {std::pair(1, 40), {2, 22}, {3, 22}}) {
    reach.cpu = {10, static_cast<std::size_t>(slots)};
    EXPECT_DOUBLE_EQ(walk_on_gpu(units, reach, slow()), seconds) << slots;
  }
  reach.cpu.chunk_elements = 50;  // in two chunks, each way
  EXPECT_DOUBLE_EQ(walk_on_gpu(units, reach, slow()), 5 + 20 + 5);
  units[0].by_cpu = false;  // the GPU has its own slots
  EXPECT_DOUBLE_EQ(walk_on_gpu(units, reach, slow()), 40);
}

TEST(WalkOnGpu, UpdatesOfBothProcessorsGoOnSideBySide) {
  std::vector<UnitOnGpu> units = computed(2);
  for (UnitOnGpu& unit : units) unit.forward = unit.backward = {};
  for (const bool other : {true, false}) {
    update(units[0], true, 10, 0, 0);
    update(units[1], other, 10, 0, 0);
    EXPECT_DOUBLE_EQ(walk_on_gpu(units, ample(true), slow()), other ? 20 : 10);
  }
}

// Backward goes from the last unit to the first, and so do updates in it; forward needs the first one first.
TEST(WalkOnGpu, AUnitWaitsForItsUpdateAlsoInTheNextStep) {
  std::vector<UnitOnGpu> units = computed(4);
  for (UnitOnGpu& unit : units) update(unit, true, 2, 0, 0);
  EXPECT_DOUBLE_EQ(walk_on_gpu(units, ample(true), slow()), 12 + 2);
  // All of them wait for the end, and then the first one lets forward begin.
  EXPECT_DOUBLE_EQ(walk_on_gpu(units, ample(false), slow()), 12 + 2 + 3);
  for (UnitOnGpu& unit : units) unit.update = 5;
  EXPECT_DOUBLE_EQ(walk_on_gpu(units, ample(true), slow()), 12 + 4 * 5 - 6);
}

TEST(WalkOnGpu, FramesThatWaitForUpdatesHoldUpBackward) {
  std::vector<UnitOnGpu> units = computed(8);
  for (UnitOnGpu& unit : units) {
    unit.forward.compute = 10;
    update(unit, true, 5, 0, 0);
  }
  GpuReach reach = ample(true);
  EXPECT_DOUBLE_EQ(walk_on_gpu(units, reach, slow()), 80 + 2 + 8 * 5);  // the first unit's comes last
  reach.extents = 1;  // each unit's backward, and then its update
  EXPECT_DOUBLE_EQ(walk_on_gpu(units, reach, slow()), 80 + 8 * 7);
  for (UnitOnGpu& unit : units) {
    unit.elements = 0;
    unit.backward.left =
        500;  // the same where a gradient leaves for 5 s, which the next forward does not wait for
  }
  EXPECT_DOUBLE_EQ(walk_on_gpu(units, reach, slow()), 80 + 8 * 7 - 5);
}

// Gradients that leave after earlier micro-batches, which count with forward, take the link, and only later
// transfers from the GPU wait for them.
TEST(WalkOnGpu, GradientsOfEarlierMicroBatchesTakeTheLink) {
  std::vector<UnitOnGpu> units = computed(4);
  for (UnitOnGpu& unit : units) {
    update(unit, true, 0, 0, 0);
    unit.forward.left = 400;
  }
  EXPECT_DOUBLE_EQ(walk_on_gpu(units, ample(true), slow()), 12);
  units[0].backward.left = 100;  // the last one, behind four of 4 s that began after 1 s
  EXPECT_DOUBLE_EQ(walk_on_gpu(units, ample(true), slow()), 1 + 4 * 4 + 1);
}

// ---- other ranks ----

TEST(WalkOnGpu, AnUpdateWaitsForTheSumOverRanks) {
  std::vector<UnitOnGpu> units = computed(1);
  units[0].forward = units[0].backward = {};
  update(units[0], true, 2, 0, 0);
  units[0].sum = {100, 100, 3};
  GpuReach reach = ample(true);
  EXPECT_DOUBLE_EQ(walk_on_gpu(units, reach, slow()), 1 + 3 + 1 + 2);
  reach.ranks = {50, 4};  // the second piece leaves, and the first one returns, beside the other's sum
  EXPECT_DOUBLE_EQ(walk_on_gpu(units, reach, slow()), 0.5 + 3 + 0.5 + 2);
  reach.ranks = {50, 1};
  EXPECT_DOUBLE_EQ(walk_on_gpu(units, reach, slow()), 1 + 3 + 1 + 2);
  units[0].sum = {0, 0, 3};  // in a record
  units[0].backward.left = 200;
  EXPECT_DOUBLE_EQ(walk_on_gpu(units, ample(false), slow()), 2 + 3 + 2);
}

TEST(WalkOnGpu, SumsGoOnBesideBackwardOrAfterIt) {
  std::vector<UnitOnGpu> units = computed(4);
  for (UnitOnGpu& unit : units) update(unit, true, 0, 0, 0);
  for (const auto& [sum, beside, after] : {std::tuple(2, 12 + 2, 12 + 4 * 2), {3, 6 + 4 * 3, 12 + 4 * 3}}) {
    for (UnitOnGpu& unit : units) unit.sum.seconds = sum;
    GpuReach reach = ample(false);
    EXPECT_DOUBLE_EQ(walk_on_gpu(units, reach, slow()), after);
    reach.sums_beside = true;
    EXPECT_DOUBLE_EQ(walk_on_gpu(units, reach, slow()), beside);
    EXPECT_DOUBLE_EQ(walk_on_gpu(units, ample(true), slow()), beside);
  }
}

// The first update waits for the last sum where all of them do, and else only for its own.
TEST(WalkOnGpu, UpdatesAtTheEndWaitForAllSums) {
  std::vector<UnitOnGpu> units = computed(4);
  for (UnitOnGpu& unit : units) {
    update(unit, true, 3, 0, 0);
    unit.sum.seconds = 2;
  }
  GpuReach reach = ample(false);
  reach.sums_beside = true;
  EXPECT_DOUBLE_EQ(walk_on_gpu(units, reach, slow()), 4 * 2 + 2 + 4 * 3 + 1);
  EXPECT_DOUBLE_EQ(walk_on_gpu(units, ample(true), slow()), 4 + 2 + 2 + 4 * 3);
}

TEST(WalkOnGpu, AUnitIsUsedWhenItIsGathered) {
  std::vector<UnitOnGpu> units = computed(2);
  for (UnitOnGpu& unit : units) {
    unit.forward = unit.backward = {};
    update(unit, true, 1, 0, 0);
    unit.gather = {0, 100, 4};
  }
  EXPECT_DOUBLE_EQ(walk_on_gpu(units, ample(true), slow()), 1 + 4 + 4 + 1);
}

TEST(WalkOnGpu, AStepThatSettlesWaitsForAllUpdates) {
  std::vector<UnitOnGpu> units = computed(2);
  for (UnitOnGpu& unit : units) update(unit, true, 1, 0, 0);
  GpuReach reach = ample(false);
  EXPECT_DOUBLE_EQ(walk_on_gpu(units, reach, slow()), 6 + 1);
  reach.settles = true;
  EXPECT_DOUBLE_EQ(walk_on_gpu(units, reach, slow()), 6 + 2);
}

// They come as what is read from the disk does.
TEST(WalkOnGpu, ShardsOfOtherRanksComeBeforeTheyAreCopied) {
  std::vector<UnitOnGpu> units = computed(4);
  for (UnitOnGpu& unit : units) {
    unit.forward.fetched = 300;
    unit.forward.from_ranks = 3;
  }
  EXPECT_DOUBLE_EQ(walk_on_gpu(units, ample(false), slow()), 12 + 4 + 2 + 3 + 2);
}

// The next step's fetch goes first, and is copied beside the sum.
TEST(WalkOnGpu, SumsGathersAndFetchesTakeTurns) {
  std::vector<UnitOnGpu> units = computed(1);
  units[0].forward = units[0].backward = {};
  units[0].forward.fetched = 100;
  units[0].forward.from_ranks = 5;
  update(units[0], true, 2, 0, 0);
  units[0].sum.seconds = 3;
  units[0].gather.seconds = 4;
  EXPECT_DOUBLE_EQ(walk_on_gpu(units, ample(true), slow()), 5 + 3 + 2 + 4);
}

TEST(RanksOnGpus, TakeAsLongAsTheLinkOrTheThreadThatCopies) {
  MachineRates rates;
  const Arriving arriving{1000, 1000, 0};
  EXPECT_EQ(seconds_of_ranks(arriving, rates), 0);
  rates.rank_processor_seconds = 0.004;
  EXPECT_DOUBLE_EQ(seconds_of_ranks(arriving, rates), 4);
  rates.link = Link{500, 1};
  EXPECT_DOUBLE_EQ(seconds_of_ranks(arriving, rates), 4);
  rates.link = Link{200, 1};
  EXPECT_DOUBLE_EQ(seconds_of_ranks(arriving, rates), 6);
  EXPECT_EQ(seconds_of_ranks({}, rates), 0);
}

// Reads of other GPUs' memory take their link, and a message for each piece. Nothing of them passes the link
// to the host.
TEST(RanksOnGpus, ReadEachOthersMemoryAsFastAsTheirLinkIs) {
  constexpr std::uint64_t kElements = std::uint64_t{24} << 20, kRanks = 4, kPieces = 3;
  std::vector<UnitSpec> specs = {{"layer", {{"weight", {kElements}}}}};
  specs[0].dtype = Dtype::kBf16;
  const Profile profile = any_order_profile(specs, 1);
  PlanRequest request;
  request.compute = allocator::Tier::kDevice;
  request.ranks = {1, kRanks};
  request.ranks.gpus_meet = true;
  UnitPlan plan;
  plan.compute = plan.updated_on = allocator::Tier::kDevice;
  for (const Part part : {Part::kParameters, Part::kGradient, Part::kState})
    plan.place(part, allocator::Tier::kDevice);
  MachineRates rates;
  rates.gpu.between = 1e9;
  rates.link = Link{1, 1e-3};  // whose bandwidth does not count
  for (const std::uint64_t stage : {0, 1}) {
    request.stage = stage;
    const Placement placement(profile, *optim::make_optimizer({}), request);
    const std::uint64_t others = (kRanks - 1) * 2 * (stage == 0 ? kElements : kElements / kRanks);
    const double messages = kPieces * rates.link->latency;
    const Placement::SecondsOfRanks seconds = placement.ranks_seconds(0, plan, rates);
    EXPECT_DOUBLE_EQ(seconds.sum, messages + static_cast<double>(others) / rates.gpu.between);
    EXPECT_DOUBLE_EQ(seconds.gather, stage == 0 ? 0 : seconds.sum);
    EXPECT_EQ(placement.received_bytes(0, plan, 1), others * (stage + 1));
    EXPECT_EQ(placement.link_traffic(0, plan).total(), 0u);
  }
}

// ---- the steps that were measured on an H200 (docs/gpu.md), as they were planned and made that day ----

constexpr std::uint64_t kLayer = 100671488, kTable = 98304000;  // elements, with padding
constexpr std::size_t kLayers = 28;
constexpr double kComputing = 0.742, kForward = 0.3;  // seconds, and what of them is forward
// Of AdamW with f32 masters and state, each element: what the CPU reads and writes, and what is streamed.
constexpr double kUpdated = 28;
constexpr std::uint64_t kState = 12, kParameter = 2, kGradient = 4;

// The CPU's updates read and wrote so many bytes a second, as the trace of that day shows: a chunk of 2^20
// elements took 0.28 ms.
constexpr double kCpuMemory = 1.03e11;

struct Measured {
  const char* name;
  bool in_backward;
  double computing;
  std::size_t by_cpu;    // how many layers, from the first one on, the CPU updates
  std::size_t resident;  // of the others, how many have their state on the GPU
  std::size_t extents, layer_extents;
  double seconds;
};
constexpr Measured kSteps[] = {
    {"moves alone", true, 0, 21, 6, 100, 25, 0.600},
    {"updates in backward", true, kComputing, 24, 0, 150, 25, 1.127},
    {"the GPU updates", true, kComputing, 0, 0, 150, 25, 1.062},
    {"updates at step()", false, kComputing, 28, 0, 1247, 193, 1.440},
};

double walked(const Measured& step) {
  MachineRates rates;
  rates.gpu = {Source::kStated, 5.465e10, 5.483e10, 1.009e11, 1 / 4.321e10};
  std::vector<UnitOnGpu> units;
  const auto add = [&](std::uint64_t elements, bool by_cpu, bool resident, std::size_t extents) {
    UnitOnGpu& unit = units.emplace_back();
    const double share = static_cast<double>(elements) / (kLayers * kLayer + 2 * kTable);
    unit.forward.compute = kForward * share * step.computing;
    unit.backward.compute = (1 - kForward) * share * step.computing;
    unit.backward.extents = extents;
    unit.by_cpu = by_cpu;
    unit.elements = elements;
    unit.update = static_cast<double>(elements) * (by_cpu ? kUpdated / kCpuMemory : 1 / 4.321e10);
    if (by_cpu) unit.in = kParameter * elements;
    if (by_cpu) (step.in_backward ? unit.out : unit.backward.left) = kGradient * elements;
    if (!by_cpu && !resident) unit.in = unit.out = kState * elements;
  };
  add(kTable, false, true, step.in_backward ? step.layer_extents : 0);
  for (std::size_t layer = 0, rest = 0; layer < kLayers; ++layer) {
    const bool by_cpu = layer < step.by_cpu;
    add(kLayer, by_cpu, !by_cpu && rest++ < step.resident, step.layer_extents);
  }
  add(kTable, !step.in_backward, false, step.layer_extents);
  GpuReach reach;
  reach.ahead = 2;
  reach.extents = step.extents;
  reach.in_backward = step.in_backward;
  reach.gpu = {1 << 20, 4};
  reach.cpu = {1 << 20, 3};
  return walk_on_gpu(units, reach, rates);
}

Profile layers() {
  std::vector<UnitSpec> units = {{"embedding", {{"table", {32000, 3072}}}}};
  for (std::size_t layer = 0; layer < kLayers; ++layer)
    units.push_back({fmt::format("layer.{}", layer), {{fmt::format("matrix.{}", layer), {32768, 3072}}}});
  for (UnitSpec& unit : units) unit.dtype = Dtype::kBf16;
  return any_order_profile(units, 2);
}

// The same step as it is planned now, where the host's memory gives the CPU's updates so many bytes a second.
// Where the client computes it takes 6 GiB of the GPU's memory.
double planned(const Measured& step, double memory) {
  PlanRequest request;
  request.clip = !step.in_backward;
  request.computing = step.computing;
  if (step.by_cpu == 0) request.updates = allocator::Tier::kDevice;
  MachineRates rates;
  rates.gpu = {Source::kStated, 5.465e10, 5.483e10, 1.009e11, 1 / 4.321e10};
  rates.memory_bandwidth = memory;
  const Budget budget{96 * kGiB, 0, 0, 16 * kGiB, (step.computing > 0 ? 6 * kGiB : 0) + 700 * kMiB};
  return make_plan(layers(), *optim::make_optimizer({}), budget, request, rates).device_time.step;
}

// Prints the predictions of docs/benchmarks/runs.json ("gpu-predicted"), before and after: as the steps were
// planned that day, and as they are planned now, with the host's memory of that day and of the next one.
TEST(GpuSteps, TakeWhatWasMeasured) {
  for (const Measured& step : kSteps) {
    const double before = walked(step), after = planned(step, 2.7e11), next_day = planned(step, 1.6e11);
    EXPECT_NEAR(before / step.seconds, 1, 0.15) << step.name;
    EXPECT_LT(after, before) << step.name;
    EXPECT_LE(after, 1.001 * next_day) << step.name;
    fmt::print(
        "{}: {:.2f} s predicted, {:.3f} s measured; as planned now {:.2f} s predicted, {:.2f} s with "
        "160 GB/s of the host's memory\n",
        step.name, before, step.seconds, after, next_day);
  }
}

// Prints what docs/benchmarks/runs.json has of such plans ("gpu-predicted").
// A plan that chooses what updates is about as fast as one by which either processor updates all, whatever
// else follows from that choice, such as what there is room for on the GPU. (It may leave the CPU out where
// that loses less than a tenth of what is not computing.)
TEST(GpuSteps, AreNotSlowerSinceThePlanChoosesWhatUpdates) {
  const Profile profile = layers();
  const auto optimizer = optim::make_optimizer({});
  int helped_by_cpu = 0, helped_by_gpu = 0;
  for (const bool clip : {true, false})
    for (const double memory : {0.3e11, 1.6e11, 2.7e11})
      for (const std::uint64_t device : {8 * kGiB, 12 * kGiB, 20 * kGiB}) {
        PlanRequest request;
        request.clip = clip;
        request.computing = kComputing;
        MachineRates rates;
        rates.gpu = {Source::kStated, 5.465e10, 5.483e10, 1.009e11, 1 / 4.321e10};
        rates.memory_bandwidth = memory;
        const auto seconds = [&](std::optional<allocator::Tier> updates) {
          request.updates = updates;
          return make_plan(profile, *optimizer, {96 * kGiB, 0, 0, device}, request, rates).device_time.step;
        };
        const double chosen = seconds({}), by_gpu = seconds(allocator::Tier::kDevice),
                     by_cpu = seconds(allocator::Tier::kHost);
        fmt::print(
            "{}, {} of the GPU's memory, {:.0f} GB/s of the host's: {:.2f} s, by the GPU alone {:.2f} s, by "
            "the CPU alone {:.2f} s\n",
            clip ? "updates at step()" : "updates in backward", format_size(device), memory / 1e9, chosen,
            by_gpu, by_cpu);
        EXPECT_LE(chosen, 1.006 * by_gpu);
        EXPECT_LE(chosen, 1.006 * by_cpu + 0.1 * std::max(0.0, by_gpu - kComputing))
            << (clip ? "clipped, " : "") << format_size(device) << ", " << memory;
        helped_by_cpu += chosen < 0.99 * by_gpu ? 1 : 0, helped_by_gpu += chosen < 0.99 * by_cpu ? 1 : 0;
      }
  EXPECT_GT(helped_by_cpu, 5);
  EXPECT_GT(helped_by_gpu, 1);
}

// The CPU needs memory of the host for what it updates.
TEST(GpuSteps, SayThatMemoryIsTooShortForTheCpusUpdates) {
  MachineRates rates;
  rates.gpu = {Source::kStated, 5e10, 5e10, 1e11, 1e-3};
  const auto because = [&](std::uint64_t memory) {
    return make_plan(layers(), *optim::make_optimizer({}), {memory, 0, 0, 64 * kGiB}, {}, rates)
        .updates_because;
  };
  EXPECT_NE(because(96 * kGiB).find("the GPU, and the CPU"), std::string::npos) << because(96 * kGiB);
  EXPECT_NE(because(300 * kMiB).find("memory is too short for updates by the CPU"), std::string::npos)
      << because(300 * kMiB);
}

// They do also where the CPU would be quicker.
TEST(GpuSteps, UpdateStateWhereItIsAskedToBe) {
  MachineRates rates;
  rates.gpu = {Source::kStated, 5e10, 5e10, 1e11, 1e-3};
  rates.memory_bandwidth = 2.7e11;
  PlanRequest request;
  const auto by_cpu = [&] {
    const Plan plan =
        make_plan(layers(), *optim::make_optimizer({}), {96 * kGiB, 0, 0, 64 * kGiB}, request, rates);
    return std::ranges::count_if(plan.units, &UnitPlan::updated_by_cpu);
  };
  EXPECT_GT(by_cpu(), 0);
  request.places[index(Part::kState)] = allocator::Tier::kDevice;
  EXPECT_EQ(by_cpu(), 0);
}

}  // namespace device_walk_test
}  // namespace sluice::engine
