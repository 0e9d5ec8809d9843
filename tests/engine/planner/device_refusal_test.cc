#include <fmt/format.h>

#include "core/bytes.h"
#include "core/error.h"
#include "engine/plan/plan.h"
#include "engine/planner/planner.h"
#include "engine/planner/shortage.h"
#include "engine/refused.h"
#include "testing.h"

// Parts that are not on a GPU are in host memory wherever they fit there, and a refusal names memory that is
// enough.
namespace sluice::engine::device_refusal_test {

using allocator::Tier;

struct Kind {
  std::size_t units = 4, rows = 1000, width = 500;
  Dtype type = Dtype::kF32;
  std::string optimizer = "adamw";
  bool clip = true;
  std::optional<Tier> updates = {};
  std::array<std::optional<Tier>, kParts> places = {};
  MachineRates rates = {};
  std::optional<std::size_t> chunk = kChunkGrain;
};

struct Planned {
  std::optional<Plan> plan;
  std::string refusal;
};

class Model {
 public:
  explicit Model(const Kind& kind)
      : profile_(any_order_profile(units_of(kind), 1)),
        optimizer_(optim::make_optimizer({kind.optimizer, Json::object(), {Dtype::kF32, true, 11}})),
        rates_(kind.rates) {
    request_.clip = kind.clip;
    request_.updates = kind.updates;
    request_.places = kind.places;
    request_.chunk_elements = kind.chunk;
  }
  Planned plan(std::uint64_t memory, std::uint64_t disk, std::uint64_t device) const {
    const Budget budget{memory, disk, 0, device};
    try {
      Plan plan = make_plan(profile_, *optimizer_, budget, request_, rates_);
      EXPECT_LE(plan.peak_memory, memory);
      EXPECT_LE(plan.disk_bytes, disk);
      EXPECT_LE(plan.device_bytes, device);
      return {std::move(plan), {}};
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kBudget) << error.what();
      return {{}, error.what()};
    }
  }
  // The least device memory, in whole MiB.
  std::uint64_t least_device() const {
    const Planned none = plan(1024 * kGiB, 1024 * kGiB, kMiB);
    const auto named = mebibytes_after("device_memory=", none.refusal);
    EXPECT_TRUE(named) << none.refusal;
    return named.value_or(kGiB);
  }
  // Each of the alternatives that a refusal names is enough.
  void follow(const std::string& text, std::uint64_t memory, std::uint64_t disk, std::uint64_t device) const {
    constexpr std::string_view kGive = "ive ";
    std::size_t at = text.find(kGive);
    ASSERT_NE(at, std::string::npos) << text;
    std::size_t followed = 0;
    for (at += kGive.size(); at < text.size();) {
      const std::size_t end = std::min(text.find(", ", at), text.size());
      const std::string words = text.substr(at, end - at);
      at = end + 2;
      const auto more = mebibytes_after("memory=", words), folder = mebibytes_after("folder with ", words);
      if (!more && !folder) continue;
      ++followed;
      const Planned then = plan(more.value_or(memory), folder.value_or(disk), device);
      EXPECT_TRUE(then.plan) << text << "\n'" << words << "' was given: " << then.refusal;
    }
    EXPECT_GT(followed, 0U) << text;
  }

 private:
  static std::vector<UnitSpec> units_of(const Kind& kind) {
    std::vector<UnitSpec> units = {{"norm", {{"norm.weight", {700}}}}};
    for (std::size_t i = 0; i < kind.units; ++i) {
      const std::string name = "block." + std::to_string(i);
      units.push_back({name, {{name + ".weight", {kind.rows + 100 * i, kind.width}}}});
    }
    for (UnitSpec& unit : units) unit.dtype = kind.type;
    units.push_back({"frozen", {{"table", {kind.rows, kind.width}}}, false});
    return units;
  }
  Profile profile_;
  std::unique_ptr<optim::Optimizer> optimizer_;
  PlanRequest request_;
  MachineRates rates_;
};

std::vector<Kind> kinds() {
  std::vector<Kind> result;
  MachineRates fast_cpu;
  fast_cpu.memory_bandwidth = 4e11;
  for (const auto updates :
       {std::optional(Tier::kDevice), std::optional(Tier::kHost), std::optional<Tier>()}) {
    result.push_back({.updates = updates, .rates = updates ? MachineRates() : fast_cpu});
    result.push_back({.units = 12, .rows = 9000, .width = 768, .updates = updates});
    result.push_back({.rows = 3000, .type = Dtype::kBf16, .clip = false, .updates = updates});
    result.push_back({.units = 1, .rows = 600, .updates = updates});
  }
  result.push_back({.optimizer = "adafactor"});
  result.push_back({.rows = 2000, .updates = Tier::kDevice, .places = {{{}, {}, Tier::kDisk}}});
  result.push_back({.rows = 2000, .updates = Tier::kHost, .places = {{Tier::kHost, {}, {}}}});
  return result;
}

TEST(DeviceRefusal, WhatFitsInMemoryUsesNoDiskAndAdviceIsEnough) {
  constexpr std::uint64_t kAmple = 1024 * kGiB;
  std::size_t in_memory = 0, on_disk = 0, refused = 0;
  for (const Kind& kind : kinds()) {
    const Model model(kind);
    const std::uint64_t least = model.least_device();
    for (const std::uint64_t device : {least, least + 20 * kMiB}) {
      SCOPED_TRACE(fmt::format("{} x {} x {} {}, updates {}, device memory {}", kind.units, kind.rows,
                               kind.width, kind.optimizer,
                               kind.updates ? static_cast<int>(*kind.updates) : -1, format_size(device)));
      Planned all = model.plan(kAmple, 0, device);
      const bool has_all = all.plan.has_value();  // else parts were asked to be on disk
      if (!has_all) all = model.plan(kAmple, kAmple, device);
      ASSERT_TRUE(all.plan) << all.refusal;
      // From less than anything takes to more than all: a plan takes what it says.
      const std::uint64_t most = all.plan->peak_memory;
      std::vector<std::uint64_t> memories = {most - 1, most, most + 1000};
      for (std::uint64_t memory = kMiB; memory < most + 24 * kMiB; memory += std::max(kMiB, most / 16))
        memories.push_back(memory);
      std::ranges::sort(memories);
      bool fitted = false;
      for (const std::uint64_t memory : memories) {
        SCOPED_TRACE(memory);
        const Planned without = model.plan(memory, 0, device), with = model.plan(memory, kAmple, device);
        for (const std::uint64_t disk : {std::uint64_t{0}, 3 * kMiB, kAmple}) {
          const Planned found = model.plan(memory, disk, device);
          if (found.plan) continue;
          ++refused;
          model.follow(found.refusal, memory, disk, device);
        }
        const bool fits = with.plan && !with.plan->uses_disk();
        EXPECT_EQ(without.plan.has_value(), fits) << without.refusal;
        EXPECT_TRUE(fits || !fitted) << "less memory was enough without the disk";
        if (memory >= most) {
          EXPECT_EQ(fits, has_all);
        }
        if (fits && without.plan) {
          EXPECT_EQ(without.plan->units, with.plan->units);
        }
        fitted = fits;
        ++(fits ? in_memory : on_disk);
      }
    }
  }
  EXPECT_GT(in_memory, 100U);
  EXPECT_GT(on_disk, 100U);
  EXPECT_GT(refused, 100U);
}

TEST(DeviceRefusal, SaysInBytesWhatLooksLikeWhatIsGiven) {
  EXPECT_EQ(format_needed(16 * kMiB + 1362, 16 * kMiB), "16778578 B");
  EXPECT_EQ(format_needed(16 * kMiB, 16 * kMiB), "16.0 MiB");
  EXPECT_EQ(format_needed(18 * kMiB, 16 * kMiB), "18.0 MiB");
}

// A large unit's update is a few chunks, as far as slots are a small part of what is stated.
TEST(DevicePlan, ChunksGrowWithUnitsAndMemory) {
  const auto chunk = [](std::size_t rows, std::uint64_t device, std::uint64_t memory) {
    Kind kind{.rows = rows, .width = 1000};
    kind.chunk.reset();
    kind.places[index(Part::kParameters)] = Tier::kHost;
    kind.rates.memory_bandwidth = 50e9;
    kind.rates.cores = 4;
    return Model(kind).plan(memory, 0, device).plan->chunk_elements;
  };
  constexpr std::uint64_t kMuch = 256 * kGiB;
  const std::size_t least = chunk(2'000, kMuch, kMuch);
  EXPECT_LE(least, kMiB);
  EXPECT_EQ(chunk(50'000, kMuch, kMuch), 2 * kMiB);
  EXPECT_EQ(chunk(100'000, kMuch, kMuch), 4 * kMiB);
  EXPECT_EQ(chunk(1'000'000, kMuch, kMuch), 8 * kMiB);
  EXPECT_EQ(chunk(100'000, 3 * kGiB, kMuch), least);
  EXPECT_EQ(chunk(100'000, kMuch, 8 * kGiB), least);
}

// Nothing goes on beside the updates with which backward ends and the next step begins.
TEST(DevicePlan, StateOfTheFirstUnitsIsOnTheGpu) {
  const Kind kind{.units = 8, .rows = 9000, .width = 768, .updates = Tier::kDevice};
  const Model model(kind);
  const std::uint64_t all = model.plan(64 * kGiB, 0, 64 * kGiB).plan->device_bytes;
  std::set<std::ptrdiff_t> counts;
  for (std::uint64_t device = all / 3; device < all; device += all / 24) {
    const Planned found = model.plan(64 * kGiB, 0, device);
    if (!found.plan) continue;
    const std::span blocks = std::span(found.plan->units).subspan(1, kind.units);
    const auto is_there = [](const UnitPlan& unit) { return unit.resident(Part::kState); };
    EXPECT_TRUE(std::ranges::is_partitioned(blocks, is_there)) << format_size(device);
    counts.insert(std::ranges::count_if(blocks, is_there));
  }
  EXPECT_GT(counts.size(), 3u);
}

// It is there also where there would be no room for frames and slots, without which nothing can be elsewhere.
TEST(DevicePlan, WhatFitsOnTheGpuAsAWholeIsThere) {
  for (Kind kind : kinds()) {
    if (kind.places != Kind().places) continue;
    const Model model(kind);
    const Planned whole = model.plan(1024 * kGiB, 0, 1024 * kGiB);
    ASSERT_TRUE(whole.plan) << whole.refusal;
    const Planned found = model.plan(1024 * kGiB, 0, whole.plan->device_bytes);
    ASSERT_TRUE(found.plan) << found.refusal;
    EXPECT_EQ(found.plan->device_bytes, whole.plan->device_bytes);
    EXPECT_EQ(found.plan->step_bytes_in, whole.plan->step_bytes_in);
    EXPECT_EQ(found.plan->step_bytes_out, whole.plan->step_bytes_out);
    const bool by_gpu = std::ranges::none_of(found.plan->units, &UnitPlan::updated_by_cpu);
    EXPECT_EQ(by_gpu, found.plan->step_bytes_in + found.plan->step_bytes_out == 0);
  }
}

}  // namespace sluice::engine::device_refusal_test
