#pragma once
// Trains a toy model over faulty disks. A run ends with the bits of a run without faults, or with an error
// that names the file, after which the engine refuses everything but its end.

#include "core/error.h"
#include "engine/planner/planner.h"
#include "engine/toy.h"
#include "offload/test_files.h"
#include "testing.h"
#include "watchdog.h"

namespace sluice::engine::faulty {

using offload::Faults;

inline constexpr Dtype kTypes[] = {Dtype::kF32, Dtype::kBf16, Dtype::kF16};

// One optimizer for each way in which state is on disk: in f32, in codes with scales, and with arrays of
// whole parameters, which are summed in rounds.
inline const std::vector<optim::OptimizerSettings>& optimizers() {
  static const std::vector<optim::OptimizerSettings> all = {
      {.name = "adamw"},
      {.name = "adamw", .storage = {Dtype::kU8}},
      {.name = "adafactor", .settings = {{"beta1", 0.9}}, .storage = {Dtype::kBf16}},
      {.name = "lion", .storage = {Dtype::kU8, false}}};
  return all;
}

struct Options {
  std::size_t optimizer = 0;  // an index into optimizers(); masters are kept where the type needs them
  Dtype dtype = Dtype::kF32;
  bool clip = true;
  const char* parameters = "disk";
  const char* gradients = "disk";
  const char* state = "disk";
  std::size_t prefetch = 2;
  std::size_t slots = 3;
};

// Units small enough for hundreds of runs; the embedding's update has two chunks where all types allow it.
inline constexpr std::size_t kChunk = std::size_t{256} << 10;

inline Profile small_profile(Dtype dtype) {
  Profile profile = toy::profile(2, {dtype}, 2);
  profile.units[0].parameters[0].shape = {132, 2048};
  for (std::size_t block = 1; block <= 2; ++block) profile.units[block].parameters[0].shape = {20, 1000};
  return profile;
}

inline std::unique_ptr<optim::Optimizer> optimizer_of(const Options& setup) {
  optim::OptimizerSettings settings = optimizers()[setup.optimizer];
  if (setup.dtype != Dtype::kBf16) settings.storage.master = true;
  return optim::make_optimizer(settings);
}

struct Model {
  explicit Model(const Options& setup) : profile(small_profile(setup.dtype)), optimizer(optimizer_of(setup)) {
    PlanRequest request;
    request.clip = setup.clip;
    request.group = 1;
    request.prefetch = setup.prefetch;
    request.places = toy::places(setup.parameters, setup.gradients, setup.state);
    plan = make_plan(profile, *optimizer, {kGiB, kGiB, 0}, request, {});
    if (setup.dtype == Dtype::kF32) plan.chunk_elements = kChunk;
    if (plan.staging_slots > 0) plan.staging_slots = setup.slots;
  }
  Profile profile;
  std::unique_ptr<optim::Optimizer> optimizer;
  Plan plan;
};

// Two faulty files, each with its own faults.
struct Disks {
  explicit Disks(Faults faults, std::atomic<std::uint64_t>* injected = nullptr) {
    for (int i = 0; i < 2; ++i) {
      inner.push_back(offload::make_memory_file("disk " + std::to_string(i)));
      faults.seed = faults.seed * 2 + static_cast<std::uint64_t>(i);
      faulty.push_back(offload::make_faulty_file(*inner.back(), faults, injected));
    }
  }
  std::vector<std::unique_ptr<offload::File>> inner, faulty;
};

inline toy::Outcome train(const Model& model, ScheduledEngine& engine) {
  toy::Outcome outcome;
  for (UnitId u = 0; u < model.profile.units.size(); ++u) engine.load(u, toy::start_values());
  toy::Trainer trainer(model.profile, model.plan, engine);
  StepSettings settings = toy::settings(0.01, 0.1, model.plan.clip ? 5.0 : 0.0);
  if (model.profile.units[0].dtype == Dtype::kF16) {  // with a loss scale, as f16 is trained
    trainer.gradient_scale = 256;
    settings.gradient_factor = 1.0 / 256;
  }
  for (int step = 0; step < 2; ++step) {
    double norm = 0;
    outcome.losses.push_back(trainer.step(settings, &norm));
    outcome.norms.push_back(norm);
  }
  for (UnitId u = 0; u < model.profile.units.size(); ++u) engine.save(u, toy::collect(outcome));
  return outcome;
}

// Returns what an engine that failed with `cause` does not refuse; empty: it refuses everything.
inline std::string not_refused(ScheduledEngine& engine, const Profile& profile, const std::string& cause) {
  std::string found;
  const auto expect = [&](const char* name, auto&& call) {
    try {
      call();
      found += fmt::format("{} is not refused by an engine that failed: {}\n", name, cause);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kState || std::string(error.what()).find(cause) == std::string::npos)
        found += fmt::format("{} fails otherwise: {}\n", name, error.what());
    }
  };
  const Access access = profile.schedule.front();
  if (engine.failure() != cause) found += "the engine says that it failed: " + engine.failure() + "\n";
  expect("load", [&] { engine.load(0, toy::start_values()); });
  expect("save", [&] { engine.save(0, {}); });
  expect("set_steps", [&] { engine.set_steps(1); });
  expect("begin_step", [&] { engine.begin_step({}); });
  expect("acquire", [&] { engine.acquire(access); });
  expect("release", [&] { engine.release(access); });
  expect("parameter", [&] { engine.parameter(0); });
  expect("gradient", [&] { engine.gradient(0, 0, 0); });
  expect("step", [&] { engine.step(); });
  expect("acquire_for_reading", [&] { engine.acquire_for_reading(0); });
  expect("release_from_reading", [&] { engine.release_from_reading(0); });
  expect("progress", [&] { engine.progress(); });
  expect("settle", [&] { engine.settle(); });
  return found;
}

// How a run ended: with the bits of a run without faults, or with an error. Otherwise `defect` says what went
// wrong silently.
struct Ending {
  bool well = false;
  std::string error, defect;
};

inline Ending run_with(const Options& setup, const Faults& faults, const toy::Outcome& base,
                       std::atomic<std::uint64_t>* injected = nullptr) {
  const Model model(setup);
  Threads threads(1);
  allocator::Ledger ledger;
  Disks disks(faults, injected);
  offload::RecordStore store(std::move(disks.faulty), ledger);
  ScheduledEngine engine(model.profile, model.plan, *model.optimizer, {threads, ledger, &store, nullptr});
  Ending ending;
  try {
    ending.well = train(model, engine) == base;
    if (!ending.well) ending.defect = "other bits, and no error";
  } catch (const Error& error) {
    ending.error = error.what();
    if (error.code() != ErrorCode::kIo && error.code() != ErrorCode::kCorrupt)
      ending.defect = fmt::format("an error of the kind {}: {}", name_of(error.code()), error.what());
    else if (ending.error.find("disk 0: ") == std::string::npos &&
             ending.error.find("disk 1: ") == std::string::npos)
      ending.defect = "the error does not name the file: " + ending.error;
    else
      ending.defect = not_refused(engine, model.profile, ending.error);
  }
  return ending;
}

inline toy::Outcome without_faults(Options setup) {
  setup.parameters = setup.gradients = setup.state = "memory";
  const Model model(setup);
  Threads threads(1);
  allocator::Ledger ledger;
  ScheduledEngine engine(model.profile, model.plan, *model.optimizer, {threads, ledger, nullptr, nullptr});
  return train(model, engine);
}

inline const toy::Outcome& base_of(const Options& setup) {
  using Kind = std::tuple<std::size_t, Dtype, bool>;
  static const std::map<Kind, toy::Outcome> all = [] {
    std::map<Kind, toy::Outcome> made;
    for (std::size_t o = 0; o < optimizers().size(); ++o)
      for (const Dtype dtype : kTypes)
        for (const bool clip : {false, true})
          made[{o, dtype, clip}] = without_faults({.optimizer = o, .dtype = dtype, .clip = clip});
    return made;
  }();
  return all.at({setup.optimizer, setup.dtype, setup.clip});
}

// Takes every kind of run in turn, by the bits of the seed.
inline Options setup_of(std::uint64_t seed) {
  static constexpr const char* kPlaces[][3] = {{"disk", "disk", "disk"},
                                               {"disk", "disk", "disk"},
                                               {"memory", "memory", "disk"},
                                               {"disk", "disk", "memory"}};
  Options setup{.dtype = kTypes[seed / 2 % std::size(kTypes)], .clip = seed % 2 == 0};
  const auto& places = kPlaces[seed / 4 % 4];
  setup.parameters = places[0];
  setup.gradients = places[1];
  setup.state = places[2];
  setup.prefetch = seed / 16 % 2 == 0 ? 1 : 5;
  setup.slots = seed / 3 % 2 == 0 ? 3 : 8;
  setup.optimizer = seed / 7 % optimizers().size();
  return setup;
}

inline std::string describe(const Options& setup, std::uint64_t seed) {
  const optim::OptimizerSettings& optimizer = optimizers()[setup.optimizer];
  return fmt::format("seed {}: {} in {}, {} clip {} parameters {} gradients {} state {} prefetch {} slots {}",
                     seed, optimizer.name, optim::state_type_name(optimizer.storage.state),
                     name_of(setup.dtype), setup.clip, setup.parameters, setup.gradients, setup.state,
                     setup.prefetch, setup.slots);
}

inline constexpr unsigned kDelays[] = {0, 30, 300};  // microseconds; 0: transfers run on the caller's thread

using MakeFaults = Faults (*)(std::uint64_t random);
struct Kind {
  const char* name;
  MakeFaults make;
};

// Rates from one fault in several runs to several faults in one.
inline double rate(std::uint64_t random) { return random % 2 == 0 ? 0.002 : 0.03; }

inline constexpr Kind kKinds[] = {
    {"ReadErrors", [](std::uint64_t r) { return Faults{.read_error = rate(r)}; }},
    {"WriteErrors", [](std::uint64_t r) { return Faults{.write_error = rate(r)}; }},
    {"ReadFlips", [](std::uint64_t r) { return Faults{.read_flip = rate(r)}; }},
    {"WriteFlips", [](std::uint64_t r) { return Faults{.write_flip = rate(r)}; }},
    {"LostWrites", [](std::uint64_t r) { return Faults{.lost_write = rate(r)}; }},
    {"ATruncatedFile", [](std::uint64_t r) { return Faults{.truncate_after = r % 150}; }},
    {"AFullDisk", [](std::uint64_t r) { return Faults{.fail_after = r % 150}; }},
};

// How much of a campaign is asked for (by tests/campaigns/run.py), and its first seed.
struct Asked {
  std::uint64_t count, seed;
};
inline Asked asked_or(std::uint64_t count) {
  const char* const stated = std::getenv("SLUICE_CAMPAIGN_COUNT");
  const char* const seed = std::getenv("SLUICE_CAMPAIGN_SEED");
  return {stated == nullptr ? count : std::stoull(stated), seed == nullptr ? 0 : std::stoull(seed)};
}

}  // namespace sluice::engine::faulty
