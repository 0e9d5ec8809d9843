#include "engine/planner/placement.h"

#include "core/bytes.h"
#include "engine/planner/planner.h"
#include "engine/toy.h"
#include "testing.h"

namespace sluice::engine::placement_test {

constexpr auto kDisk = allocator::Tier::kDisk;
const std::vector<Part> kInFrames = {Part::kParameters, Part::kGradient};

// Units of random sizes, some of them frozen; the first may be tied.
Profile random_profile(std::mt19937& random, bool any_order) {
  Profile profile =
      toy::profile(1 + random() % 4, {random() % 2 == 0 ? Dtype::kF32 : Dtype::kBf16}, 1 + random() % 9);
  for (UnitSpec& unit : profile.units) {
    unit.parameters[0].shape = {1 + random() % 3000, 1 + random() % 1000};
    if (unit.name.starts_with("block")) unit.trainable = random() % 4 != 0;
  }
  if (any_order) return any_order_profile(profile.units, 1 + random() % 3);
  for (Access& access : profile.schedule)
    if (!profile.units[access.unit].trainable) access = {access.unit, true, -1, false};
  return profile;
}

// Puts random parts in memory and the others on disk; a part without bytes is nowhere.
std::vector<UnitPlan> random_places(std::mt19937& random, const Placement& placement) {
  std::vector<UnitPlan> units(placement.layout().units().size());
  for (UnitId unit = 0; unit < units.size(); ++unit)
    for (std::size_t part = 0; part < kParts; ++part) {
      const auto which = static_cast<Part>(part);
      const bool empty = (which == Part::kGradient && placement.gradient_bytes(unit) == 0) ||
                         (which == Part::kState && placement.state_bytes(unit) == 0);
      if (!empty && random() % 4 != 0) units[unit].place(which, kDisk);
    }
  return units;
}

// Returns the huge pages that an access needs for what is not resident, by part and use.
std::map<std::pair<Part, int>, std::size_t> needs(const Layout& layout, const Access& access,
                                                  const UnitPlan& plan) {
  std::map<std::pair<Part, int>, std::size_t> pages;
  const auto whole = [](std::size_t bytes) { return (bytes + kHugePage - 1) / kHugePage; };
  if (access.parameters && !plan.resident(Part::kParameters))
    pages[{Part::kParameters, 0}] = whole(layout.unit_bytes(access.unit));
  int uses = 0;
  for (const ParameterSpec& parameter : layout.units()[access.unit].parameters)
    uses = std::max(uses, parameter.uses);
  for (int use = 0; use < uses && layout.trainable(access.unit) && !plan.resident(Part::kGradient); ++use)
    if (use == access.gradient_use || access.final)
      pages[{Part::kGradient, use}] = whole(use_elements(layout, access.unit, use) * 4);
  return pages;
}

// Tries every window of accesses, one after another.
std::size_t frames_in_order(const Profile& profile, const Layout& layout, const std::vector<UnitPlan>& units,
                            std::size_t window) {
  std::size_t most = 0;
  for (std::size_t first = 0; first < profile.schedule.size(); ++first) {
    std::map<UnitId, std::map<std::pair<Part, int>, std::size_t>> taken;
    for (std::size_t i = first; i < first + std::min(window, profile.schedule.size()); ++i) {
      const Access& access = profile.schedule[i % profile.schedule.size()];
      taken[access.unit].merge(needs(layout, access, units[access.unit]));
    }
    std::size_t sum = 0;
    for (const auto& [unit, parts] : taken)
      for (const auto& [part, pages] : parts) sum += pages;
    most = std::max(most, sum);
  }
  return most;
}

std::size_t frames_in_any_order(const Layout& layout, const std::vector<UnitPlan>& units, std::size_t held) {
  std::multiset<std::size_t, std::greater<>> all;
  for (UnitId unit = 0; unit < units.size(); ++unit) {
    std::size_t sum = 0;
    for (const auto& [part, pages] : needs(layout, {unit, true, 0, true}, units[unit])) sum += pages;
    all.insert(sum);
  }
  std::size_t sum = 0;
  for (auto unit = all.begin(); unit != all.end() && held-- > 0; ++unit) sum += *unit;
  return sum;
}

TEST(Placement, FramesAreThoseOfTheWorstWindowWhateverBecomesResident) {
  std::mt19937 random(5);
  const auto optimizer = optim::make_optimizer({});
  for (int round = 0; round < 60; ++round) {
    const Profile profile = random_profile(random, round % 2 == 0);
    const Placement placement(profile, *optimizer, {});
    const Lookahead lookahead{1 + random() % 6, random() % 2 == 0};
    const std::size_t near = profile.any_order ? profile.held_units : 1;
    const auto expected = [&](const std::vector<UnitPlan>& units) {
      return profile.any_order
                 ? frames_in_any_order(placement.layout(), units, near + lookahead.ahead())
                 : frames_in_order(profile, placement.layout(), units, near + lookahead.ahead());
    };
    std::vector<UnitPlan> units = random_places(random, placement);
    const FrameNeeds frame_needs = placement.frame_needs(lookahead);
    Frames frames(frame_needs, units);
    EXPECT_EQ(frames.most(), expected(units));
    for (int change = 0; change < 20; ++change) {
      const auto unit = static_cast<UnitId>(random() % units.size());
      const Part part = kInFrames[random() % 2];
      if (units[unit].resident(part)) continue;
      const UnitPlan before = units[unit];
      units[unit].place(part, kCpuTier);
      EXPECT_EQ(frames.most_without(unit, part), expected(units));
      if (random() % 2 == 0)
        frames.remove(unit, part);
      else
        units[unit] = before;
      EXPECT_GE(frames.bound(), expected(units));
      EXPECT_EQ(frames.most(), expected(units));
    }
  }
}

// One rank stores its shard of a final gradient, in memory or on disk.
TEST(Placement, ShardsOfFinalGradientsTakeAsMuchOfAllRanksAsTheGradientOfOne) {
  const auto optimizer = optim::make_optimizer({});
  Profile profile;
  for (const std::size_t rows : {256, 1024, 777}) {
    profile.schedule.push_back({static_cast<UnitId>(profile.units.size()), true, 0, true});
    profile.units.push_back({std::to_string(rows), {{std::to_string(rows), {rows, 4096}}}});
    profile.unit_profiles.emplace_back().choices.emplace_back();
  }
  std::uint64_t whole = 0, in_memory = 0, on_disk = 0;
  for (int rank = 0; rank < 4; ++rank) {
    PlanRequest request;
    request.ranks = {rank, 4};
    request.stage = 2;
    const Placement placement(profile, *optimizer, request);
    std::vector<UnitPlan> units(profile.units.size());
    for (UnitId unit = 0; unit < units.size(); ++unit) {
      ASSERT_TRUE(placement.partitions_gradient(unit, 1));
      if (rank == 0) whole += placement.layout().unit_bytes(unit);
      units[unit].gradient_in_shards = true;
      units[unit].place(Part::kGradient, kDisk);
    }
    Footprint footprint = placement.footprint(units);
    on_disk += footprint.disk[index(Part::kGradient)];
    EXPECT_EQ(footprint.shards[index(Part::kGradient)], 0u);
    for (UnitId unit = 0; unit < units.size(); ++unit) {
      placement.to_memory(unit, Part::kGradient, kCpuTier, units[unit], footprint);
      EXPECT_EQ(units[unit].tier(Part::kGradient), allocator::Tier::kRanks);
    }
    in_memory += footprint.shards[index(Part::kGradient)];
    EXPECT_EQ(footprint.disk[index(Part::kGradient)], 0u);
  }
  const std::uint64_t padding = 4 * profile.units.size() * kDiskBlock;  // of each shard, at most
  for (const std::uint64_t all : {on_disk, in_memory}) {
    EXPECT_GE(all, whole);
    EXPECT_LE(all, whole + padding);
  }
}

// A shard of parameters is on disk or in memory, and a step reads it for each fetch of its unit.
TEST(Placement, ShardsOfParametersTakeAsMuchOfAllRanksAsTheParametersOfOne) {
  for (const bool narrow : {false, true}) {
    const auto optimizer = optim::make_optimizer({});
    Profile profile;
    for (const std::size_t rows : {256, 1024, 777}) {
      profile.schedule.push_back({static_cast<UnitId>(profile.units.size()), true, 0, true});
      profile.units.push_back({std::to_string(rows), {{std::to_string(rows), {rows, 4096}}}});
      profile.units.back().dtype = narrow ? Dtype::kBf16 : Dtype::kF32;
      profile.unit_profiles.emplace_back().choices.emplace_back();
    }
    std::uint64_t whole = 0, in_memory = 0, on_disk = 0, fetched = 0;
    for (int rank = 0; rank < 4; ++rank) {
      PlanRequest request;
      request.ranks = {rank, 4};
      request.stage = 3;
      const Placement placement(profile, *optimizer, request);
      std::vector<UnitPlan> units(profile.units.size());
      for (UnitId unit = 0; unit < units.size(); ++unit) {
        if (rank == 0) whole += placement.layout().unit_bytes(unit);
        ASSERT_TRUE(placement.may_store_shard(unit));
        units[unit].place(Part::kParameters, allocator::Tier::kRanks);
        units[unit].shard_on_disk = true;
        // An update with masters overwrites the parameters.
        EXPECT_EQ(placement.shard_traffic(unit).read,
                  placement.format().has_master(unit) ? 0 : placement.shard_bytes(unit));
        EXPECT_EQ(placement.format().has_master(unit), narrow);
        EXPECT_EQ(placement.shard_traffic(unit).written, placement.shard_bytes(unit));
      }
      Footprint footprint = placement.footprint(units);
      on_disk += footprint.disk[index(Part::kParameters)];
      EXPECT_EQ(footprint.shards[index(Part::kParameters)], 0u);
      for (const Visit& visit : placement.visits(units, 1, placement.times({}))) fetched += visit.fetched;
      for (UnitId unit = 0; unit < units.size(); ++unit)
        placement.to_memory(unit, Part::kParameters, kCpuTier, units[unit], footprint);
      for (const Visit& visit : placement.visits(units, 1, placement.times({}))) EXPECT_EQ(visit.fetched, 0u);
      in_memory += footprint.shards[index(Part::kParameters)];
      EXPECT_EQ(footprint.disk[index(Part::kParameters)], 0u);
      EXPECT_EQ(footprint.shards_on_disk, 0u);
    }
    const std::uint64_t padding = 4 * profile.units.size() * kDiskBlock;  // of each shard, at most
    for (const std::uint64_t all : {on_disk, in_memory, fetched}) {
      EXPECT_GE(all, whole);
      EXPECT_LE(all, whole + padding);
    }
  }
}

// A step waits for sums over the ranks of a layer as far as they take longer than what is computed beside
// them.
TEST(Placement, SumsOverRanksOfALayerAreHiddenByWhatIsComputedBesideThem) {
  const auto optimizer = optim::make_optimizer({});
  Profile profile = toy::profile(1, {Dtype::kF32}, 1);
  const auto gigabytes = [](double computed, std::uint64_t received) {
    Work work;
    work.bytes = computed * 1e9;
    work.received = received * 1'000'000'000;
    return work;
  };
  for (UnitProfile& unit : profile.unit_profiles) {
    unit.backward = gigabytes(10, 5);
    unit.beside = gigabytes(3, 4);
  }
  MachineRates rates;
  rates.memory_bandwidth = 1e9;
  const auto backward = [&](std::optional<double> bandwidth) {
    if (bandwidth) rates.layer_link = Link{*bandwidth, 0};
    const Placement::Times times = Placement(profile, *optimizer, {}).times(rates)[0];
    return std::pair{times.backward[0], times.backward_layers[0]};
  };
  EXPECT_EQ(backward({}), (std::pair{10.0, 0.0}));
  EXPECT_EQ(backward(4e9), (std::pair{10 + 0.25, 0.25}));        // all that is beside is hidden
  EXPECT_EQ(backward(1e9), (std::pair{10 + 5.0 - 3, 5.0 - 3}));  // as much as is computed beside it
}

// As memory shrinks, so do the shards of parameters in it, down to where the frames alone are left.
class ShardsOfParameters : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(InAnyOrder, ShardsOfParameters, testing::Bool());

TEST_P(ShardsOfParameters, AreOnDiskAsFarAsMemoryIsShort) {
  const auto optimizer = optim::make_optimizer({});
  Profile profile;
  for (UnitId unit = 0; unit < 24; ++unit) {
    profile.units.push_back({std::to_string(unit), {{std::to_string(unit), {2048, 2048}}}});
    profile.unit_profiles.emplace_back().choices.emplace_back();
    profile.schedule.push_back({unit, true, -1, false});
  }
  for (UnitId unit = 24; unit-- > 0;) profile.schedule.push_back({unit, true, 0, true});
  profile.any_order = GetParam();
  const std::uint64_t parameters = 24 * 2048 * 2048 * sizeof(float);
  PlanRequest request;
  request.ranks = {0, 2};
  request.stage = 3;
  std::size_t most = 0;
  std::uint64_t least = 0;
  for (std::uint64_t memory = 1200 * kMiB; memory > 0; memory -= 20 * kMiB) {
    Plan plan;
    try {
      plan = make_plan(profile, *optimizer, {memory, 4 * kGiB, 0}, request, {});
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kBudget);
      break;
    }
    least = memory;
    EXPECT_LE(plan.peak_memory, memory);
    const auto on_disk =
        static_cast<std::size_t>(std::ranges::count(plan.units, true, &UnitPlan::shard_on_disk));
    EXPECT_EQ(plan.serving_pieces > 0, on_disk > 0);
    const bool have_room = plan.serving_pieces < 32 && memory - plan.peak_memory >= 2 * kMiB;
    EXPECT_TRUE(on_disk == 0 || profile.any_order || !have_room) << plan.serving_pieces;
    EXPECT_EQ(plan.bytes[static_cast<std::size_t>(kDisk)][0], on_disk * parameters / 2 / 24);
    EXPECT_TRUE(memory < 1200 * kMiB || on_disk == 0);
    most = std::max(most, on_disk);
  }
  EXPECT_EQ(most, 24u);
  EXPECT_LT(least, parameters / 2);
}

// Where not everything can be in memory, partitioned parameters leave the disk less to do, and the link more.
TEST(Placement, OfStagesThatNeedTheDiskTheFastestIsChosen) {
  const auto optimizer = optim::make_optimizer({});
  std::vector<UnitSpec> units;
  for (UnitId unit = 0; unit < 12; ++unit)
    units.push_back({std::to_string(unit), {{std::to_string(unit), {2048, 2048}}}});
  Profile profile = any_order_profile(std::move(units), 1);
  profile.micro_batches = 4;
  PlanRequest request;
  request.ranks = {0, 2};
  MachineRates rates;
  const auto stage_with = [&](std::optional<Link> link) {
    rates.link = link;
    const Plan plan = make_plan(profile, *optimizer, {500 * kMiB, 4 * kGiB, 0}, request, rates);
    EXPECT_TRUE(plan.uses_disk());
    double best = plan.time.step;
    for (std::size_t stage = 0; stage <= kMostStage; ++stage) {
      PlanRequest at = request;
      at.stage = stage;
      try {
        best = std::min(best, make_plan(profile, *optimizer, {500 * kMiB, 4 * kGiB, 0}, at, rates).time.step);
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kBudget);
      }
    }
    if (link) {
      EXPECT_LE(plan.time.step, best * 1.01);
    }
    return plan.one_stage();
  };
  EXPECT_EQ(stage_with(std::nullopt), kMostStage);
  const std::optional<std::size_t> behind_slow_link = stage_with(Link{1e6, 0});
  ASSERT_TRUE(behind_slow_link.has_value()) << "units have different stages";
  EXPECT_LT(*behind_slow_link, kMostStage);
}

// Goes through a step access by access, and counts the traffic of one unit.
struct Simulated {
  std::uint64_t parameters_read = 0, kept_read = 0, kept_written = 0;
};
Simulated simulate(const Profile& profile, const Layout& layout, UnitId unit, std::size_t groups,
                   bool overwritten_first) {
  Simulated moved;
  bool is_written_first = overwritten_first;
  std::map<int, bool> has_sum;  // whether a use has a sum in this step
  for (std::size_t group = 0; group < groups; ++group) {
    std::vector<UnitId> near;  // units of the two accesses before
    for (const Access& access : profile.schedule) {
      if (access.unit == unit && access.parameters && std::count(near.begin(), near.end(), unit) == 0 &&
          !std::exchange(is_written_first, false))
        moved.parameters_read += layout.unit_bytes(unit);
      const int uses = layout.units()[unit].parameters.front().uses;
      for (int use = 0; access.unit == unit && use < uses; ++use) {
        const bool is_final = access.final && group + 1 == groups;
        if (use != access.gradient_use && !is_final) continue;
        const std::uint64_t bytes = use_elements(layout, unit, use) * 4;
        if (has_sum[use]) {  // it was written, and is read to be added to
          moved.kept_written += bytes;
          moved.kept_read += bytes;
        }
        has_sum[use] = true;
      }
      near.push_back(access.parameters ? access.unit : UnitId(-1));
      if (near.size() > 2) near.erase(near.begin());
    }
  }
  return moved;
}

// In frames the CPU touches this rank's part of what others give alone; in the host each byte that leaves,
// too.
TEST(Placement, WhatRanksBesideGpusReadInSharedMemoryIsWhatTheCpuTouches) {
  constexpr std::uint64_t kElements = std::uint64_t{4} << 20, kRanks = 4, kOwn = kElements / kRanks;
  std::vector<UnitSpec> specs = {{"layer", {{"weight", {kElements}}}}};
  specs[0].dtype = Dtype::kBf16;
  Profile profile = any_order_profile(specs, 1);
  PlanRequest request;
  request.compute = allocator::Tier::kDevice;
  request.stage = 1;
  request.ranks = {1, kRanks};
  const auto optimizer = optim::make_optimizer({});
  UnitPlan on_gpu, in_host;
  on_gpu.compute = on_gpu.updated_on = in_host.compute = allocator::Tier::kDevice;
  for (const Part part : {Part::kParameters, Part::kGradient, Part::kState}) {
    on_gpu.place(part, allocator::Tier::kDevice);
    in_host.place(part, allocator::Tier::kHost);
  }
  in_host.gradient_stored = true;
  in_host.updated_on = allocator::Tier::kHost;
  for (const std::uint64_t given : {2, 4}) {  // bytes of an element: several micro-batches add in f32
    profile.micro_batches = given / 2;
    const Placement placement(profile, *optimizer, request);
    const std::uint64_t sum = kOwn * (kRanks * given + 8), others = kElements - kOwn;
    EXPECT_EQ(placement.moved_of_shared(0, on_gpu).sum, sum);
    EXPECT_EQ(placement.moved_of_shared(0, on_gpu).gather, 4 * others);
    // Half of a sum in the place of narrow gradients is moved in the end.
    EXPECT_EQ(placement.moved_of_shared(0, in_host).sum,
              sum + (given == 2 ? 2 * given * kElements + kOwn / 2 * 8 : 2 * given * others));
    EXPECT_EQ(placement.moved_of_shared(0, in_host).gather, 4 * kElements);
  }
}

TEST(Placement, TrafficIsThatOfAStepAccessByAccess) {
  std::mt19937 random(7);
  const auto optimizer = optim::make_optimizer({});
  for (int round = 0; round < 30; ++round) {
    const Profile profile = random_profile(random, false);
    PlanRequest request;
    request.clip = round % 2 == 0;
    const Placement placement(profile, *optimizer, request);
    const Layout& layout = placement.layout();
    for (UnitId unit = 0; unit < profile.units.size(); ++unit)
      for (const std::size_t groups : {1, 2, 3}) {
        const bool trainable = layout.trainable(unit), narrow = layout.dtype(unit) != Dtype::kF32;
        const Simulated moved = simulate(profile, layout, unit, groups, trainable && narrow && request.clip);
        const Placement::Traffic parameters = placement.parameter_traffic(unit, groups);
        EXPECT_EQ(parameters.read, moved.parameters_read) << unit;
        EXPECT_EQ(parameters.written, trainable ? layout.unit_bytes(unit) : 0) << unit;
        const Placement::Traffic kept = placement.kept_gradient_traffic(unit, groups);
        EXPECT_EQ(kept.read, moved.kept_read) << unit;
        EXPECT_EQ(kept.written, moved.kept_written) << unit;
        // A gradient that waits for the norm is written when it is final, and read for its update.
        const Placement::Traffic all = placement.gradient_traffic(unit, groups);
        const std::uint64_t once = trainable && request.clip ? layout.unit_bytes(unit) : 0;
        EXPECT_EQ(all.read - kept.read, once) << unit;
        EXPECT_EQ(all.written - kept.written, once) << unit;
        EXPECT_EQ(placement.stores_gradient(unit, groups), trainable && (request.clip || moved.kept_read > 0))
            << unit;
        EXPECT_EQ(placement.state_traffic(unit).read, placement.state_bytes(unit));
        EXPECT_EQ(placement.state_traffic(unit).written, placement.state_bytes(unit));
      }
  }
}

}  // namespace sluice::engine::placement_test
