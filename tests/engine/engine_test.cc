#include "engine/steps/scheduled_engine.h"

#include "core/error.h"
#include "engine/planner/planner.h"
#include "engine/toy.h"
#include "offload/test_files.h"
#include "testing.h"
#include "thrown.h"

namespace sluice::engine::engine_test {

struct Options {
  std::size_t micro_batches = 3;
  toy::Types types = {Dtype::kF32};
  PlanRequest request = {};
  std::uint64_t memory = kGiB;
  int threads = 2;
  std::size_t blocks = 3;
  std::size_t lent = 0;     // bytes of its own memory that the trainer lends
  unsigned disk_delay = 0;  // microseconds by which each transfer ends late, on another thread
  optim::OptimizerSettings optimizer = {};
  double clip_norm = 5, clip_value = 0;
  int section = -1;  // of `pipeline`, in whose order the whole model is trained; -1: one group after another
  Pipeline pipeline = {};
};

struct Trained {
  toy::Outcome outcome;
  Plan plan;
  offload::RecordStore::Counters traffic;
};

std::vector<std::unique_ptr<offload::File>> memory_disk(int files) {
  std::vector<std::unique_ptr<offload::File>> disk;
  for (int i = 0; i < files; ++i) disk.push_back(offload::make_memory_file("disk " + std::to_string(i)));
  return disk;
}

std::vector<std::unique_ptr<offload::File>> slow_disk(const std::vector<std::unique_ptr<offload::File>>& disk,
                                                      unsigned delay) {
  std::vector<std::unique_ptr<offload::File>> slow;
  for (const auto& file : disk)
    slow.push_back(offload::make_faulty_file(*file, {.seed = 1, .delay_microseconds = delay}));
  return slow;
}

StepSettings settings_of(const Options& setup, int step) {
  StepSettings settings = toy::settings(0.01 / (step + 1), 0.1, setup.request.clip ? setup.clip_norm : 0.0);
  settings.clip_value = setup.clip_value;
  return settings;
}

Trained train(const Options& setup, int steps = 3) {
  const auto made = optim::make_optimizer(setup.optimizer);
  const optim::Optimizer& optimizer = *made;
  Profile profile = toy::profile(setup.micro_batches, setup.types, setup.blocks);
  profile.schedule[setup.blocks + 2].joined = true;  // the trainer holds the head beside the final unit
  if (setup.section >= 0)
    profile = in_pipeline(profile, setup.pipeline, setup.section,
                          divide_up(setup.micro_batches, setup.pipeline.items));
  Trained result;
  result.plan = make_plan(profile, optimizer, {setup.memory, kGiB, 0}, setup.request, {});
  Threads threads(setup.threads);
  const auto library = kernels::load_matrix_library(2);
  allocator::Ledger ledger, unlimited;
  ledger.set_budget(allocator::Tier::kHost, setup.memory);
  const allocator::Region activations(unlimited, allocator::Purpose::kActivation, setup.lent);
  auto files = memory_disk(2);
  offload::RecordStore disk(setup.disk_delay > 0 ? slow_disk(files, setup.disk_delay) : std::move(files),
                            ledger);
  {
    ScheduledEngine engine(profile, result.plan, optimizer, {threads, ledger, &disk, nullptr, library.get()});
    for (UnitId u = 0; u < profile.units.size(); ++u) engine.load(u, toy::start_values());
    toy::Trainer trainer(profile, result.plan, engine, activations.bytes());
    for (int s = 0; s < steps; ++s) {
      double norm = 0;
      result.outcome.losses.push_back(trainer.step(settings_of(setup, s), &norm));
      result.outcome.norms.push_back(norm);
    }
    engine.settle();
    result.traffic = disk.counters();
    for (UnitId u = 0; u < profile.units.size(); ++u)
      engine.save(u, toy::collect(result.outcome, optimizer.state()));
  }
  const auto snapshot = ledger.snapshot();
  const auto host = static_cast<std::size_t>(allocator::Tier::kHost);
  EXPECT_EQ(snapshot.total[host].current,
            snapshot.lines[host][static_cast<std::size_t>(allocator::Purpose::kBase)].current);
  EXPECT_LE(snapshot.total[host].peak, result.plan.peak_memory);
  return result;
}

void expect_same(const Trained& a, const Trained& b) {
  EXPECT_EQ(a.outcome.losses, b.outcome.losses);
  EXPECT_EQ(a.outcome.norms, b.outcome.norms);
  EXPECT_TRUE(a.outcome == b.outcome) << "parameters or optimizer state differ";
}

Options with(bool clip, const toy::Types& types, const char* parameters, const char* gradients,
             const char* state) {
  Options setup;
  setup.types = types;
  setup.request.clip = clip;
  setup.request.places = toy::places(parameters, gradients, state);
  return setup;
}

const optim::OptimizerSettings kOptimizers[] = {
    {.name = "adam"},
    {.name = "lion"},
    {.name = "sgd"},
    {.name = "sgd", .settings = {{"momentum", 0.9}}},
    {.name = "sgd", .settings = {{"momentum", 0.9}, {"nesterov", true}}},
    {.name = "adamw", .storage = {Dtype::kBf16}},
    {.name = "lion", .storage = {Dtype::kBf16}},
    {.name = "adamw", .storage = {Dtype::kU8}},
    {.name = "lion", .storage = {Dtype::kU8}},
    {.name = "sgd", .settings = {{"momentum", 0.9}}, .storage = {Dtype::kU8}},
    {.name = "adafactor"},
    {.name = "adafactor", .settings = {{"beta1", 0.9}}, .storage = {Dtype::kU8}},
    {.name = "muon"},
    {.name = "muon", .settings = {{"nesterov", false}}, .storage = {Dtype::kU8}},
    {.name = "muon", .storage = {Dtype::kBf16}}};

// Of the optimizer's state on disk.
std::uint64_t kept_bytes(const Plan& plan) {
  return plan.bytes[static_cast<std::size_t>(allocator::Tier::kDisk)]
                   [static_cast<std::size_t>(allocator::Purpose::kOptimizerState)];
}

class Twins : public testing::TestWithParam<std::tuple<bool, toy::Types>> {};

TEST_P(Twins, PlacementNeverChangesBits) {
  const auto& [clip, types] = GetParam();
  const Trained memory = train(with(clip, types, "memory", "memory", "memory"));
  EXPECT_EQ(memory.traffic.bytes_read + memory.traffic.bytes_written, 0u);
  EXPECT_GT(memory.outcome.losses.front(), 0);
  for (const auto& [parameters, gradients, state] :
       std::vector<std::tuple<const char*, const char*, const char*>>{{"memory", "memory", "disk"},
                                                                      {"disk", "memory", "memory"},
                                                                      {"memory", "disk", "memory"},
                                                                      {"disk", "disk", "disk"}}) {
    SCOPED_TRACE(std::string(parameters) + " " + gradients + " " + state);
    const Trained other = train(with(clip, types, parameters, gradients, state));
    expect_same(memory, other);
    // A gradient that is applied before others need its frames is never written.
    const bool none_written = !clip && *parameters == 'm' && *state == 'm';
    EXPECT_EQ(other.traffic.bytes_written == 0, none_written) << other.traffic.bytes_written;
  }
}

TEST_P(Twins, GroupsPrefetchChunksAndThreadsNeverChangeBits) {
  const auto& [clip, types] = GetParam();
  const Trained base = train(with(clip, types, "memory", "memory", "memory"));
  struct Way {
    std::optional<std::size_t> group;
    std::size_t prefetch, chunks;
  };
  for (const auto& [group, prefetch, chunks] : {Way{1, 5, 1}, Way{2, 1, 1}, Way{std::nullopt, 2, 2}}) {
    Options setup = with(clip, types, "disk", "disk", "disk");
    setup.request.group = group;
    setup.request.prefetch = prefetch;
    setup.threads = static_cast<int>(prefetch);
    setup.request.chunk_elements = chunks * kChunkGrain;
    SCOPED_TRACE("prefetch " + std::to_string(prefetch));
    expect_same(base, train(setup));
  }
}

TEST_P(Twins, LentMemoryNeverChangesBits) {
  const auto& [clip, types] = GetParam();
  const Trained base = train(with(clip, types, "memory", "memory", "memory"));
  const Trained alone = train(with(clip, types, "memory", "memory", "disk"));
  const auto lending = [&](const char* elsewhere, unsigned delay, std::size_t lent) {
    Options setup = with(clip, types, elsewhere, elsewhere, "disk");
    setup.disk_delay = delay;
    setup.lent = lent;
    setup.request.group = 2;
    SCOPED_TRACE(fmt::format("the rest in {}, delay {}, {} MiB lent", elsewhere, delay, lent / kMiB));
    const Trained other = train(setup);
    expect_same(base, other);
    const bool same_traffic = other.traffic.bytes_read == alone.traffic.bytes_read;
    EXPECT_TRUE(same_traffic || *elsewhere == 'd') << "what was read ahead was read again";
  };
  lending("memory", 3000, 20 * kMiB);
  lending("disk", 500, 64 * kMiB);
}

TEST_P(Twins, BudgetsBetween) {
  const auto& [clip, types] = GetParam();
  Options large = with(clip, types, "memory", "memory", "memory");
  large.blocks = 8;
  const Trained base = train(large, 2);
  Options least = large;
  least.request.places = toy::places("disk");
  const std::uint64_t low = train(least, 1).plan.peak_memory, high = base.plan.peak_memory;
  ASSERT_LT(low, high);
  for (const std::uint64_t memory : {low + (high - low) / 4, low + (high - low) * 3 / 4}) {
    Options setup{.types = types, .blocks = large.blocks};
    setup.request.clip = clip;
    setup.memory = memory;
    SCOPED_TRACE(format_size(memory));
    const Trained other = train(setup, 2);
    if (memory < (low + high) / 2) {
      EXPECT_GT(other.traffic.bytes_written, 0u);
    }
    expect_same(base, other);
  }
}

struct SectionOf {
  Pipeline pipeline;
  int section;
};

// Items that overlap have the bits of groups that follow each other: gradients are added in the same order.
TEST(PipelineTwins, HaveTheBitsOfGroupsThatFollowEachOther) {
  for (const bool clip : {true, false})
    for (const bool reproducible : {false, true}) {
      Options setup = with(clip, {Dtype::kF32, Dtype::kBf16}, "memory", "memory", "memory");
      setup.blocks = 1;
      setup.micro_batches = 5;
      setup.request.reproducible = reproducible;
      const Trained base = train(setup, 2);
      const char* const place = clip == reproducible ? "memory" : "disk";
      for (const auto& [pipeline, section] :
           {SectionOf{{PipelineOrder::kGPipe, 3, 5}, 0}, SectionOf{{PipelineOrder::k1F1B, 3, 3}, 0},
            SectionOf{{PipelineOrder::k1F1B, 3, 5}, 1}}) {
        SCOPED_TRACE(fmt::format("{}, {} of {} items, section {}", place, name_of(pipeline.order),
                                 pipeline.items, section));
        Options other = setup;
        other.request.places = toy::places(place);
        other.pipeline = pipeline;
        other.section = section;
        other.lent = 1 << 20;
        expect_same(base, train(other, 2));
      }
    }
}

// Units that are still there when they are needed again are not moved.
TEST(PipelinePlan, MovesNoMoreThanIsPlannedAndNotMuchLess) {
  for (const auto& [pipeline, section] :
       {SectionOf{{PipelineOrder::kGPipe, 3, 4}, 0}, SectionOf{{PipelineOrder::k1F1B, 3, 4}, 0}}) {
    SCOPED_TRACE(fmt::format("{} of section {}", name_of(pipeline.order), section));
    Options setup = with(true, {Dtype::kF32}, "disk", "disk", "disk");
    setup.micro_batches = 4;
    setup.request.prefetch = 1;
    setup.pipeline = pipeline;
    setup.section = section;
    const Trained one = train(setup, 1), two = train(setup, 2);
    const auto expect_near = [](std::uint64_t moved, std::uint64_t planned) {
      EXPECT_LE(moved, planned);
      EXPECT_GT(static_cast<double>(moved), 0.7 * static_cast<double>(planned));
    };
    expect_near(two.traffic.bytes_read - one.traffic.bytes_read, two.plan.step_bytes_read);
    expect_near(two.traffic.bytes_written - one.traffic.bytes_written, two.plan.step_bytes_written);
  }
}

TEST(PipelinePlan, HoldsWhatTheOrderHolds) {
  const auto optimizer = optim::make_optimizer({});
  const Profile profile = toy::profile(8);
  const auto activations = [&](PipelineOrder order, int section, std::size_t group) {
    const Pipeline pipeline{order, 3, 8 / group};
    PlanRequest request;
    request.recompute = "none";
    return make_plan(in_pipeline(profile, pipeline, section, group), *optimizer, {kGiB, 0, 0}, request, {})
        .activation_bytes;
  };
  const std::size_t micro_batch = profile.units.size() * (4096 + 8192);
  for (const std::size_t group : {1u, 2u}) {
    for (int section = 0; section < 3; ++section) {
      EXPECT_EQ(activations(PipelineOrder::k1F1B, section, group),
                group * (3u - static_cast<unsigned>(section)) * micro_batch);
      EXPECT_EQ(activations(PipelineOrder::kGPipe, section, group), 8 * micro_batch);
    }
  }
}

TEST(PipelinePlan, IsOfTheGroupOfItsItems) {
  const auto optimizer = optim::make_optimizer({});
  const Profile profile = in_pipeline(toy::profile(8), {PipelineOrder::k1F1B, 2, 3}, 0, 3);
  EXPECT_EQ(make_plan(profile, *optimizer, {kGiB, 0, 0}, {}, {}).group, 3u);
  PlanRequest request;
  request.group = 4;
  expect_error(ErrorCode::kInvalidArgument, {"a group of 4 micro-batches", "the step has groups of 3"}, [&] {
    make_plan(profile, *optimizer, {kGiB, 0, 0}, request, {});
  });
  expect_error(ErrorCode::kInvalidArgument, {"5000 micro-batches", "5000 groups; at most 4096"}, [&] {
    in_pipeline(toy::profile(5000), {PipelineOrder::k1F1B, 2, 5000}, 0, 1);
  });
}

// One of three steps has gradients that are not finite, or that the type cannot hold. It changes nothing, not
// even step counts, so that the two others do what they do without it.
Trained train_with_a_skipped_step(Dtype dtype, const char* place, std::size_t group,
                                  std::optional<float> scale) {
  Options setup = with(true, {dtype}, place, place, place);
  setup.request.group = group;
  const Profile profile = toy::profile(setup.micro_batches, {dtype}, 1);
  const auto optimizer = optim::make_optimizer({});
  Trained result;
  result.plan = make_plan(profile, *optimizer, {kGiB, kGiB, 0}, setup.request, {});
  Threads threads(2);
  allocator::Ledger ledger;
  const allocator::Region activations(ledger, allocator::Purpose::kActivation, 20 * kMiB);  // lent
  offload::RecordStore disk(memory_disk(2), ledger);
  ScheduledEngine engine(profile, result.plan, *optimizer, {threads, ledger, &disk, nullptr});
  for (UnitId u = 0; u < profile.units.size(); ++u) engine.load(u, toy::start_values());
  toy::Trainer trainer(profile, result.plan, engine, activations.bytes());
  for (const bool skipped : {false, true, false}) {
    if (skipped && !scale) continue;
    trainer.gradient_scale = skipped ? *scale : 1.0f;
    try {
      result.outcome.losses.push_back(trainer.step(toy::settings(0.01, 0.1, 5.0)));
      EXPECT_FALSE(skipped);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kNotFinite);
      EXPECT_TRUE(skipped);
      EXPECT_NE(std::string(error.what()).find("no parameter was changed"), std::string::npos)
          << error.what();
    }
  }
  EXPECT_EQ(engine.steps(), 2u);
  for (ParameterId p = 0; p < engine.layout().parameters(); ++p) EXPECT_EQ(engine.steps(p), 2u);
  for (UnitId u = 0; u < profile.units.size(); ++u) engine.save(u, toy::collect(result.outcome));
  return result;
}

TEST(SkippedSteps, LeaveEverythingAsItWas) {
  for (const Dtype dtype : {Dtype::kF32, Dtype::kBf16, Dtype::kF16}) {
    const Trained without = train_with_a_skipped_step(dtype, "memory", 3, std::nullopt);
    for (const auto& [place, group] :
         std::vector<std::pair<const char*, std::size_t>>{{"memory", 1}, {"disk", 3}})
      for (const float scale : {std::numeric_limits<float>::infinity(), 1e9f}) {
        if (scale == 1e9f && dtype != Dtype::kF16) continue;  // wider types hold such gradients
        SCOPED_TRACE(
            fmt::format("{}, {}, group {}, gradients times {}", name_of(dtype), place, group, scale));
        expect_same(without, train_with_a_skipped_step(dtype, place, group, scale));
      }
  }
}

TEST(ClipByValue, HasTheSameBitsEverywhereAndWithUpdatesAtOnce) {
  const auto run = [](bool clip, const char* place, std::size_t group, double clip_value, double clip_norm) {
    Options setup = with(clip, {Dtype::kF32}, place, place, place);
    setup.blocks = 2;
    setup.request.group = group;
    setup.clip_value = clip_value;
    setup.clip_norm = clip_norm;
    return train(setup);
  };
  const Trained at_once = run(false, "memory", 3, 0.3, 0);
  EXPECT_FALSE(at_once.outcome == run(false, "memory", 3, 0, 0).outcome) << "the bound bounds nothing";
  expect_same(at_once, run(false, "disk", 1, 0.3, 0));
  expect_same(at_once, run(true, "memory", 3, 0.3, 0));
  expect_same(at_once, run(true, "disk", 1, 0.3, 0));
  // Comes after clipping by norm; a bound that no element reaches changes nothing.
  EXPECT_TRUE(run(true, "memory", 3, 100, 5).outcome == run(true, "disk", 1, 0, 5).outcome);
}

TEST(Adafactor, IsBroughtFromDiskWhatAPassLooksAt) {
  const auto bytes_read = [](const char* optimizer, Dtype type, bool scaled) {
    Options setup = with(false, {type}, "memory", "memory", "disk");
    if (optimizer == std::string("sgd"))
      setup.optimizer = {.name = optimizer, .settings = {{"momentum", 0.9}}};
    else
      setup.optimizer = {.name = optimizer, .settings = {{"beta1", 0.9}, {"scale_parameter", scaled}}};
    return train(setup).traffic.bytes_read;
  };
  for (const Dtype type : {Dtype::kF32, Dtype::kBf16}) {
    const std::uint64_t once = bytes_read("sgd", type, true);  // has as many arrays
    EXPECT_GT(once, 0u);
    EXPECT_EQ(bytes_read("adafactor", type, true), type == Dtype::kF32 ? once : 2 * once);
    EXPECT_EQ(bytes_read("adafactor", type, false), once);
  }
}

TEST(ClipByValue, OfNoUseIsRefused) {
  const Profile profile = toy::profile(1, {Dtype::kF32}, 1);
  const auto optimizer = optim::make_optimizer({});
  Threads threads(1);
  allocator::Ledger ledger;
  ScheduledEngine engine(profile, make_plan(profile, *optimizer, {kGiB, 0, 0}, {}, {}), *optimizer,
                         {threads, ledger, nullptr, nullptr});
  for (const double bound : {-1.0, 1e-50, std::numeric_limits<double>::infinity(), std::nan("")}) {
    StepSettings settings = toy::settings(0.1, 0, 0);
    settings.clip_value = bound;
    EXPECT_THROW(engine.begin_step(settings), Error) << bound;
  }
}

const toy::Types kF32 = {Dtype::kF32}, kBf16 = {Dtype::kBf16}, kF16 = {Dtype::kF16},
                 kMixed = {Dtype::kF32, Dtype::kBf16, Dtype::kF16};
std::string name_of_twins(const testing::TestParamInfo<std::tuple<bool, toy::Types>>& test) {
  std::string name = std::get<0>(test.param) ? "clip" : "at_once";
  for (const Dtype type : std::get<1>(test.param)) name += "_" + std::string(name_of(type));
  return name;
}
INSTANTIATE_TEST_SUITE_P(ClipAndType, Twins,
                         testing::Values(std::tuple(true, kF32), std::tuple(true, kF16),
                                         std::tuple(false, kMixed)),
                         name_of_twins);
INSTANTIATE_TEST_SUITE_P(Long, Twins,
                         testing::Values(std::tuple(false, kF32), std::tuple(true, kBf16),
                                         std::tuple(false, kBf16), std::tuple(false, kF16),
                                         std::tuple(true, kMixed)),
                         name_of_twins);

// Each optimizer has one of the types, with or without clipping; all of these among the long tests.
struct OptimizerCase {
  optim::OptimizerSettings optimizer;
  bool clip;
  toy::Types types;
};
std::vector<OptimizerCase> optimizer_cases(bool few) {
  std::vector<OptimizerCase> cases;
  for (std::size_t i = 0; i < std::size(kOptimizers); ++i)
    for (std::size_t way = 0; way < 8; ++way)
      if ((way == 3 * i % 8) == few)
        cases.push_back({kOptimizers[i], way % 2 == 1, std::array{kF32, kBf16, kF16, kMixed}[way / 2]});
  // Without masters.
  if (few)
    for (const auto& [name, state, clip] : {std::tuple("adamw", Dtype::kBf16, true),
                                            {"sgd", Dtype::kF32, false},
                                            {"adamw", Dtype::kU8, false},
                                            {"adafactor", Dtype::kF32, true},
                                            {"muon", Dtype::kU8, false}})
      cases.push_back({{.name = name, .storage = {state, false, 3}}, clip, kBf16});
  return cases;
}

class TwinsOfOptimizers : public testing::TestWithParam<OptimizerCase> {};
std::string name_of_optimizer(const testing::TestParamInfo<OptimizerCase>& test) {
  std::string name = fmt::format("{}_{}", test.index, test.param.optimizer.name);
  if (test.param.clip) name += "_clip";
  for (const Dtype type : test.param.types) name += fmt::format("_{}", name_of(type));
  return name;
}
INSTANTIATE_TEST_SUITE_P(Optimizers, TwinsOfOptimizers, testing::ValuesIn(optimizer_cases(true)),
                         name_of_optimizer);
INSTANTIATE_TEST_SUITE_P(Long, TwinsOfOptimizers, testing::ValuesIn(optimizer_cases(false)),
                         name_of_optimizer);

TEST_P(TwinsOfOptimizers, HaveTheSameBitsEverywhere) {
  const optim::OptimizerSettings& optimizer = GetParam().optimizer;
  const auto run = [&](const char* place, const char* state, std::size_t group,
                       std::size_t chunk = kChunkGrain) {
    Options setup = with(GetParam().clip, GetParam().types, place, place, state);
    setup.optimizer = optimizer;
    setup.blocks = 1;
    setup.request.group = group;
    setup.request.chunk_elements = chunk;
    return train(setup);
  };
  const Trained memory = run("memory", "memory", 3);
  EXPECT_EQ(memory.outcome.states[0].empty(), optim::make_optimizer(optimizer)->state().empty());
  EXPECT_EQ(memory.outcome.wholes.empty(), optim::make_optimizer(optimizer)->whole_names().empty());
  EXPECT_TRUE(optimizer.storage.master || memory.outcome.masters.empty());
  expect_same(memory, run("disk", "disk", 1, 2 * kChunkGrain));
  const Trained state = run("memory", "disk", 3);
  expect_same(memory, state);
  EXPECT_EQ(state.traffic.bytes_written > 0, kept_bytes(state.plan) > 0);
}

}  // namespace sluice::engine::engine_test
