// Training over disks that do wrong: a run ends with the bits of a run without faults, or with an error that
// names the file and after which the engine refuses everything but its end.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <iostream>
#include <mutex>
#include <thread>

#include "core/error.h"
#include "engine/toy.h"

namespace sluice::engine {
namespace {

using offload::Faults;
using testing::HasSubstr;

struct Options {
  Dtype dtype = Dtype::kF32;
  bool clip = true;
  const char* parameters = "disk";
  const char* gradients = "disk";
  const char* state = "disk";
  std::size_t prefetch = 2;
  std::size_t slots = 3;
};

// Units small enough for hundreds of runs; the embedding's update has two chunks where all types allow it.
constexpr std::size_t kChunk = std::size_t{256} << 10;

Profile small_profile(Dtype dtype) {
  Profile profile = toy::profile(2, dtype, 2);
  profile.units[0].parameters[0].shape = {132, 2048};
  for (std::size_t block = 1; block <= 2; ++block) profile.units[block].parameters[0].shape = {20, 1000};
  return profile;
}

struct Model {
  explicit Model(const Options& setup)
      : profile(small_profile(setup.dtype)), optimizer(optim::make_adamw({})) {
    PlanRequest request;
    request.clip = setup.clip;
    request.group = 1;
    request.prefetch = setup.prefetch;
    request.parameters = setup.parameters;
    request.gradients = setup.gradients;
    request.state = setup.state;
    plan = make_plan(profile, *optimizer, {kGiB, kGiB, 0}, request, {});
    if (setup.dtype == Dtype::kF32) plan.chunk_elements = kChunk;
    if (plan.staging_slots > 0) plan.staging_slots = setup.slots;
  }
  Profile profile;
  std::unique_ptr<optim::Optimizer> optimizer;
  Plan plan;
};

// Two files that do wrong, each in its own way.
struct Disks {
  explicit Disks(Faults faults) {
    for (int i = 0; i < 2; ++i) {
      inner.push_back(offload::make_memory_file("disk " + std::to_string(i)));
      faults.seed = faults.seed * 2 + static_cast<std::uint64_t>(i);
      faulty.push_back(offload::make_faulty_file(*inner.back(), faults));
    }
  }
  std::vector<std::unique_ptr<offload::File>> inner, faulty;
};

toy::Outcome train(const Model& model, Engine& engine) {
  toy::Outcome outcome;
  for (UnitId u = 0; u < model.profile.units.size(); ++u) engine.load(u, toy::start_values());
  toy::Trainer trainer(model.profile, model.plan, engine);
  for (int step = 0; step < 2; ++step) {
    double norm = 0;
    outcome.losses.push_back(trainer.step(toy::settings(0.01, 0.1, model.plan.clip ? 5.0 : 0.0), &norm));
    outcome.norms.push_back(norm);
  }
  for (UnitId u = 0; u < model.profile.units.size(); ++u) engine.save(u, toy::collect(outcome));
  return outcome;
}

template <class Call>
void expect_refused(const char* name, const std::string& cause, Call&& call) {
  try {
    call();
    ADD_FAILURE() << name << " is not refused by an engine that failed: " << cause;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kState) << name;
    EXPECT_THAT(error.what(), HasSubstr(cause)) << name;
  }
}

void expect_failed(Engine& engine, const Profile& profile, const std::string& cause) {
  const Access access = profile.schedule.front();
  expect_refused("load", cause, [&] { engine.load(0, toy::start_values()); });
  expect_refused("save", cause, [&] { engine.save(0, {}); });
  expect_refused("set_steps", cause, [&] { engine.set_steps(1); });
  expect_refused("begin_step", cause, [&] { engine.begin_step({}); });
  expect_refused("acquire", cause, [&] { engine.acquire(access); });
  expect_refused("release", cause, [&] { engine.release(access); });
  expect_refused("parameter", cause, [&] { engine.parameter(0); });
  expect_refused("gradient", cause, [&] { engine.gradient(0, 0, 0); });
  expect_refused("step", cause, [&] { engine.step(); });
  expect_refused("acquire_for_reading", cause, [&] { engine.acquire_for_reading(0); });
  expect_refused("release_from_reading", cause, [&] { engine.release_from_reading(0); });
  expect_refused("progress", cause, [&] { engine.progress(); });
  expect_refused("settle", cause, [&] { engine.settle(); });
}

// Ends the process with a message where its life takes too long: a hang is a failure, and says of what.
class Watchdog {
 public:
  explicit Watchdog(std::string what) : what_(std::move(what)), thread_([this] { watch(); }) {}
  ~Watchdog() {
    {
      const std::lock_guard lock(mutex_);
      over_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

 private:
  void watch() {
    std::unique_lock lock(mutex_);
    if (changed_.wait_for(lock, std::chrono::seconds(120), [&] { return over_; })) return;
    std::cerr << "hangs: " << what_ << std::endl;
    std::abort();
  }
  const std::string what_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool over_ = false;
  std::thread thread_;
};

// Whether the run ended well; then with the bits of `base`.
bool ends_well(const Options& setup, const Faults& faults, const toy::Outcome& base) {
  const Model model(setup);
  Threads threads(1);
  allocator::Ledger ledger;
  Disks disks(faults);
  offload::RecordStore store(std::move(disks.faulty), ledger);
  Engine engine(model.profile, model.plan, *model.optimizer, {threads, ledger, &store, nullptr});
  try {
    EXPECT_TRUE(train(model, engine) == base) << "other bits, and no error";
    return true;
  } catch (const Error& error) {
    EXPECT_TRUE(error.code() == ErrorCode::kIo || error.code() == ErrorCode::kCorrupt) << error.what();
    EXPECT_THAT(error.what(), testing::AnyOf(HasSubstr("disk 0: "), HasSubstr("disk 1: ")));
    expect_failed(engine, model.profile, error.what());
    return false;
  }
}

toy::Outcome without_faults(Options setup) {
  setup.parameters = setup.gradients = setup.state = "memory";
  const Model model(setup);
  Threads threads(1);
  allocator::Ledger ledger;
  Engine engine(model.profile, model.plan, *model.optimizer, {threads, ledger, nullptr, nullptr});
  return train(model, engine);
}

const toy::Outcome& base_of(const Options& setup) {
  static const std::vector<toy::Outcome> all = [] {
    std::vector<toy::Outcome> made;
    for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16})
      for (const bool clip : {false, true}) made.push_back(without_faults({.dtype = dtype, .clip = clip}));
    return made;
  }();
  return all[(setup.dtype == Dtype::kBf16 ? 2u : 0u) + (setup.clip ? 1u : 0u)];
}

// Every kind of run in turn: by the bits of the seed.
Options setup_of(std::uint64_t seed) {
  static constexpr const char* kPlaces[][3] = {{"disk", "disk", "disk"},
                                               {"disk", "disk", "disk"},
                                               {"memory", "memory", "disk"},
                                               {"disk", "disk", "memory"}};
  Options setup;
  setup.clip = seed % 2 == 0;
  setup.dtype = seed / 2 % 2 == 0 ? Dtype::kF32 : Dtype::kBf16;
  const auto& places = kPlaces[seed / 4 % 4];
  setup.parameters = places[0];
  setup.gradients = places[1];
  setup.state = places[2];
  setup.prefetch = seed / 16 % 2 == 0 ? 1 : 5;
  setup.slots = seed / 3 % 2 == 0 ? 3 : 8;
  return setup;
}

std::string describe(const Options& setup, std::uint64_t seed) {
  return fmt::format("seed {}: {} clip {} parameters {} gradients {} state {} prefetch {} slots {}", seed,
                     name_of(setup.dtype), setup.clip, setup.parameters, setup.gradients, setup.state,
                     setup.prefetch, setup.slots);
}

constexpr unsigned kDelays[] = {0, 30, 300};  // microseconds; 0: transfers run on the caller's thread

using MakeFaults = Faults (*)(std::uint64_t random);
struct Kind {
  const char* name;
  MakeFaults make;
};

// From one fault in several runs to several in one.
double rate(std::uint64_t random) { return random % 2 == 0 ? 0.002 : 0.03; }

constexpr Kind kKinds[] = {
    {"ReadErrors", [](std::uint64_t r) { return Faults{.read_error = rate(r)}; }},
    {"WriteErrors", [](std::uint64_t r) { return Faults{.write_error = rate(r)}; }},
    {"ReadFlips", [](std::uint64_t r) { return Faults{.read_flip = rate(r)}; }},
    {"WriteFlips", [](std::uint64_t r) { return Faults{.write_flip = rate(r)}; }},
    {"LostWrites", [](std::uint64_t r) { return Faults{.lost_write = rate(r)}; }},
    {"AFullDisk", [](std::uint64_t r) { return Faults{.fail_after = r % 150}; }},
};

class FaultsTest : public testing::TestWithParam<Kind> {};

TEST_P(FaultsTest, ARunEndsWithTheSameBitsOrFails) {
  constexpr std::uint64_t kRuns = 48;
  std::uint64_t well = 0;
  for (std::uint64_t seed = 0; seed < kRuns; ++seed) {
    const Options setup = setup_of(seed);
    const std::string what = describe(setup, seed);
    SCOPED_TRACE(what);
    const Watchdog watchdog(what);
    Faults faults = GetParam().make(philox({static_cast<std::uint32_t>(seed), 1, 2, 3}, {4, 5})[0]);
    faults.seed = seed + 1;
    faults.delay_microseconds = kDelays[seed % 3];
    well += ends_well(setup, faults, base_of(setup)) ? 1 : 0;
  }
  EXPECT_GT(well, 0u) << "no run came through";
  EXPECT_LT(well, kRuns) << "nothing went wrong";
}

INSTANTIATE_TEST_SUITE_P(Kinds, FaultsTest, testing::ValuesIn(kKinds),
                         [](const auto& test) { return std::string(test.param.name); });

TEST(SlowDiskTest, DelaysNeverChangeBits) {
  for (std::uint64_t seed = 0; seed < 32; ++seed) {
    Options setup = setup_of(seed);
    const std::string what = describe(setup, seed);
    SCOPED_TRACE(what);
    const Watchdog watchdog(what);
    const unsigned delay = seed % 2 == 0 ? 100 : 1000;
    EXPECT_TRUE(ends_well(setup, {.delay_microseconds = delay}, base_of(setup)));
  }
}

TEST(EngineFailureTest, ASourceThatThrowsLeavesTheEngineWhole) {
  const Model model(Options{});
  Threads threads(1);
  allocator::Ledger ledger;
  Disks disks(Faults{});
  offload::RecordStore store(std::move(disks.faulty), ledger);
  Engine engine(model.profile, model.plan, *model.optimizer, {threads, ledger, &store, nullptr});
  UnitSource source;
  source.values = [](ParameterId, std::size_t, std::span<float>) {
    throw std::runtime_error("no such tensor");
  };
  EXPECT_THROW(engine.load(0, source), std::runtime_error);
  for (UnitId unit = 0; unit < model.profile.units.size(); ++unit) engine.load(unit, toy::start_values());
  toy::Trainer trainer(model.profile, model.plan, engine);
  EXPECT_GT(trainer.step(toy::settings(0.01, 0.1, 0)), 0);
}

TEST(EngineFailureTest, AnEngineThatDoesNotFitIsNotMade) {
  const Model model(Options{});
  Threads threads(1);
  std::uint64_t needed = 0;  // by the engine alone: the plan's peak is also the model's and the process's
  {
    allocator::Ledger ledger;
    Disks disks(Faults{});
    offload::RecordStore store(std::move(disks.faulty), ledger);
    const Engine engine(model.profile, model.plan, *model.optimizer, {threads, ledger, &store, nullptr});
    needed = ledger.snapshot().total[0].peak;
  }
  for (std::uint64_t budget = 0; budget < needed; budget += needed / 8 + 1) {
    allocator::Ledger ledger;
    Disks disks(Faults{});
    offload::RecordStore store(std::move(disks.faulty), ledger);
    ledger.set_budget(allocator::Tier::kHost, budget);
    try {
      Engine engine(model.profile, model.plan, *model.optimizer, {threads, ledger, &store, nullptr});
      ADD_FAILURE() << budget << " bytes were enough";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kBudget) << error.what();
    }
  }
}

}  // namespace
}  // namespace sluice::engine
