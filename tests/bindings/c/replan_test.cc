#include "tests/bindings/c/support.h"

// Tests of an engine whose plan changes: only the tiers of its bytes become others.
namespace sluice_c_test::replan_test {

constexpr uint64_t kMiB = uint64_t{1} << 20, kMemory = uint64_t{1} << 30, kReserved = 64 * kMiB;

std::string plan_of(sluice_engine* engine) {
  char* text = nullptr;
  EXPECT_OK(sluice_engine_plan(engine, &text));
  return taken(text);
}

uint64_t predicted_peak(sluice_engine* engine) {
  const std::string plan = plan_of(engine), key = "\"predicted_peak\":";
  return std::stoull(plan.substr(plan.find(key) + key.size()));
}

uint64_t held_of(sluice_engine* engine, const std::string& tier, const std::string& purpose) {
  std::array<sluice_ledger_line, 64> lines;
  std::size_t count = 0;
  EXPECT_OK(sluice_engine_ledger(engine, lines.data(), lines.size(), &count));
  for (std::size_t i = 0; i < count; ++i)
    if (lines[i].tier == tier && lines[i].purpose == purpose) return lines[i].current;
  return 0;
}

constexpr uint32_t kMany = 12;  // units of one parameter each
constexpr uint64_t kElements = 600 * 500;

struct Kind {
  const char* name;
  const char* optimizer;
  sluice_dtype dtype = SLUICE_F32;
  bool at_once = false;
  sluice_state_type state = SLUICE_STATE_F32;
  friend void PrintTo(const Kind& kind, std::ostream* out) { *out << kind.name; }
};

class ReplanTest : public ::testing::TestWithParam<Kind> {
 protected:
  EngineHandle make(const char* place = nullptr, uint64_t disk_limit = 0) const {
    const std::array<uint64_t, 2> shape = {600, 500};
    const ModelHandle model = model_of(kMany, [&](uint32_t unit, sluice_parameter& given) {
      given.shape = shape.data();
      given.dimensions = shape.size();
      given.group = unit % 2;
      given.dtype = GetParam().dtype;
    });
    Choice setup;
    setup.place = place;
    setup.optimizer = GetParam().optimizer;
    setup.at_once = GetParam().at_once;
    setup.state = GetParam().state;
    const std::string path = folder_.path();
    const sluice_folder folder = {path.c_str(), disk_limit};
    EngineHandle engine = engine_of(model.get(), options_of(setup, &folder));
    for (uint32_t u = 0; u < kMany; ++u)
      EXPECT_OK(sluice_engine_set_values(engine.get(), u, start_values, nullptr));
    return engine;
  }

  // Returns a reserve that makes so many bytes of the engine leave memory.
  static uint64_t reserve_for(sluice_engine* engine, uint64_t leaving) {
    return kReserved + kMemory - predicted_peak(engine) + leaving;
  }

  static Values values(sluice_engine* engine) {
    Values found(kMany);
    for (uint32_t u = 0; u < kMany; ++u) EXPECT_OK(sluice_engine_get_values(engine, u, collect, &found));
    return found;
  }

  // Adds gradients that depend on the values, for the first `units` units.
  static void add_gradients(sluice_engine* engine, uint32_t units = kMany) {
    for (uint32_t u = units; u-- > 0;) {
      EXPECT_OK(sluice_engine_acquire(engine, u, SLUICE_GRADIENT));
      const void* data = nullptr;
      EXPECT_OK(sluice_engine_parameter(engine, u, &data));
      std::vector<float> gradient(kElements);
      for (uint64_t i = 0; i < kElements; ++i)
        gradient[i] = 0.1f * widen(data, GetParam().dtype, i) + 0.01f * static_cast<float>(u);
      EXPECT_OK(sluice_engine_add_gradient(engine, u, gradient.data(), SLUICE_F32));
      EXPECT_OK(sluice_engine_release(engine, u));
    }
  }

  static void go_on(sluice_engine* engine) {
    const StepSettings given;
    const bool at_once = GetParam().at_once;
    ASSERT_OK(sluice_engine_begin_step(engine, at_once ? &given.settings : nullptr));
    add_gradients(engine);
    ASSERT_OK(sluice_engine_step(engine, at_once ? nullptr : &given.settings, nullptr));
  }

  Folder folder_;
};
INSTANTIATE_TEST_SUITE_P(Kinds, ReplanTest,
                         ::testing::Values(Kind{"at_once", "adamw", SLUICE_BF16, true},
                                           Kind{"codes", "adamw", SLUICE_F32, false, SLUICE_STATE_8BIT},
                                           Kind{"adafactor", "adafactor"}),
                         [](const auto& kind) { return std::string(kind.param.name); });

// The result is compared with an engine that has everything in memory all the time. Replanning comes after
// steps whose updates are pending.
TEST_P(ReplanTest, ValuesStateAndAddressesStay) {
  const EngineHandle engine = make(), other = make("memory");
  std::array<const void*, kMany> before = {}, after = {};
  for (uint32_t u = 0; u < kMany; ++u) ASSERT_OK(sluice_engine_parameter(engine.get(), u, &before[u]));
  const uint64_t roomy = held_of(engine.get(), "host", "total");
  const uint64_t some = reserve_for(engine.get(), 10 * kMiB), more = reserve_for(engine.get(), 16 * kMiB);
  ASSERT_EQ(held_of(engine.get(), "disk", "total"), 0u);
  for (const uint64_t reserved : {some, more, kReserved, some, kReserved}) {
    go_on(engine.get());
    go_on(other.get());
    ASSERT_OK(sluice_engine_replan(engine.get(), reserved));
    EXPECT_EQ(values(engine.get()), values(other.get())) << reserved;
    EXPECT_GT(held_of(engine.get(), "disk", "total"), 0u);
    EXPECT_LE(held_of(engine.get(), "host", "total"), kMemory);
    if (reserved == kReserved) {
      EXPECT_NEAR(static_cast<double>(held_of(engine.get(), "host", "total")), static_cast<double>(roomy),
                  1e5);
    }
  }
  go_on(engine.get());
  go_on(other.get());
  EXPECT_EQ(values(engine.get()), values(other.get()));
  for (uint32_t u = 0; u < kMany; ++u) ASSERT_OK(sluice_engine_parameter(engine.get(), u, &after[u]));
  EXPECT_EQ(before, after);
}

TEST_P(ReplanTest, IsRefusedWithNothingChanged) {
  const EngineHandle engine = make();
  expect_error(sluice_engine_replan(nullptr, kReserved), SLUICE_INVALID_ARGUMENT, {"engine"});
  go_on(engine.get());
  const Values before = values(engine.get());
  const std::string plan = plan_of(engine.get());
  expect_error(sluice_engine_replan(engine.get(), kMemory + 1), SLUICE_BUDGET, {"are reserved"});
  expect_error(sluice_engine_replan(engine.get(), kMemory - kMiB), SLUICE_BUDGET, {"memory is short by"});
  EXPECT_OK(sluice_engine_acquire(engine.get(), 1, SLUICE_READ));
  expect_error(sluice_engine_replan(engine.get(), kReserved), SLUICE_STATE, {"'unit.1' is held; release it"});
  EXPECT_OK(sluice_engine_release(engine.get(), 1));
  EXPECT_EQ(plan, plan_of(engine.get()));
  EXPECT_EQ(before, values(engine.get()));
  go_on(engine.get());
}

// An engine whose disk is too small for the new plan goes on with the old one.
TEST_P(ReplanTest, TheDisksLimit) {
  const EngineHandle engine = make(nullptr, kMiB), other = make();
  go_on(engine.get());
  go_on(other.get());
  const uint64_t reserved = reserve_for(engine.get(), 16 * kMiB);
  expect_error(sluice_engine_replan(engine.get(), reserved), SLUICE_BUDGET, {"disk", "short"});
  EXPECT_OK(sluice_engine_replan(other.get(), reserve_for(other.get(), 16 * kMiB)));
  go_on(engine.get());
  go_on(other.get());
  EXPECT_EQ(values(engine.get()), values(other.get()));
}

TEST(ReplanRefusals, StepsAndGradients) {
  const Folder folder;
  const EngineHandle engine = make_engine(Choice{}, folder.path());
  expect_error(sluice_engine_replan(engine.get(), kReserved), SLUICE_STATE, {"'unit.0' has no values"});
  set_start_values(engine.get());
  ASSERT_OK(sluice_engine_begin_step(engine.get(), nullptr));
  expect_error(sluice_engine_replan(engine.get(), kReserved), SLUICE_STATE, {"in the middle of a step"});
  add_unit_gradients(engine.get(), 1, SLUICE_F32, 1);
  ASSERT_OK(apply(engine.get(), 1.0, nullptr, true));
  expect_error(sluice_engine_replan(engine.get(), kReserved), SLUICE_STATE, {"'unit.1' has gradients"});
  for (uint32_t p = 0; p < parameters().size(); ++p) ASSERT_OK(drop_gradient(engine.get(), p));
  EXPECT_OK(sluice_engine_replan(engine.get(), kReserved));
}

}  // namespace sluice_c_test::replan_test
