#include "tests/bindings/c/support.h"

// Tests that the C ABI gives the same bits on every tier, and in whatever order units come.
namespace sluice_c_test::training_test {

class TrainingTest : public ::testing::Test {
 protected:
  Values trained(const Choice& setup, int skip = -1) {
    const EngineHandle engine = make_engine(setup, folder_.path());
    set_start_values(engine.get());
    train(engine.get(), setup.dtype, 4, skip);
    return values_of(engine.get());
  }
  Folder folder_;
};

std::atomic<int> team_calls = 0;

void team_of_two(void (*work)(void*), void* data, unsigned threads, unsigned flags) {
  EXPECT_EQ(threads, 2u);
  EXPECT_EQ(flags, 0u);
  ++team_calls;
  std::thread other(work, data);
  work(data);
  other.join();
}

TEST_F(TrainingTest, TheSameBitsOnThreadsOfTheCallers) {
  for (const char* place : {"memory", "disk"}) {
    Choice own, given;
    own.place = given.place = place;
    own.threads = given.threads = 2;
    given.team = team_of_two;
    team_calls = 0;
    EXPECT_TRUE(trained(own) == trained(given)) << place;
    EXPECT_GT(team_calls, 0) << place;
  }
}

// They are the same also where a gradient was read, for which its unit's update came earlier.
TEST_F(TrainingTest, ValuesMayBeSetAndLoadedRightAfterAStep) {
  for (const Case& c : {Case{"memory", SLUICE_F32}, Case{"disk", SLUICE_BF16}}) {
    Choice setup{.place = c.place, .dtype = c.dtype};
    const EngineHandle engine = make_engine(setup, folder_.path());
    set_start_values(engine.get());
    const Values start = values_of(engine.get());
    char* checkpoint = nullptr;
    ASSERT_OK(sluice_engine_save(engine.get(), folder_.path(c.place).c_str(), 1, &checkpoint));
    for (const bool load : {false, true, false, true}) {
      ASSERT_OK(sluice_engine_begin_step(engine.get(), nullptr));
      for (uint32_t unit = kUnits; unit-- > 0;) add_unit_gradients(engine.get(), unit, c.dtype, 0.5f);
      ASSERT_OK(apply(engine.get(), 1.0, nullptr, true));
      std::vector<float> gradient(parameters()[0].elements());
      ASSERT_OK(sluice_engine_get_gradient(engine.get(), 0, gradient.data(), SLUICE_F32));
      for (uint32_t p = 0; p < parameters().size(); ++p) ASSERT_OK(drop_gradient(engine.get(), p));
      if (load)
        ASSERT_OK(sluice_engine_load(engine.get(), checkpoint));
      else
        set_start_values(engine.get());
      ASSERT_TRUE(values_of(engine.get()) == start) << c.place << (load ? ", loaded" : ", set");
    }
    sluice_text_destroy(checkpoint);
  }
}

// The caller was compiled with a later version, whose settings have more fields.
TEST_F(TrainingTest, SettingsOfAStepAreThoseOfAnEngineMadeWithThem) {
  struct Later {
    sluice_group_settings known;
    double more = 7;
  };
  const std::vector<sluice_setting> settings = {
      {"beta1", 0.8, nullptr}, {"betas[1]", 0.95, nullptr}, {"epsilon", 1e-3, nullptr}};
  const auto run = [&](const char* place, bool made_with, bool by_step) {
    Choice setup;
    setup.place = place;
    const EngineHandle engine = make_engine(setup, folder_.path(), [&](sluice_engine_options& options) {
      options.settings = settings.data();
      options.setting_count = made_with ? settings.size() : 0;
    });
    set_start_values(engine.get());
    std::array<Later, 2> groups;
    for (std::size_t g = 0; g < groups.size(); ++g) {
      groups[g].known = (by_step ? two_groups(settings) : two_groups())[g];
      groups[g].known.size = sizeof(Later);
    }
    sluice_step_settings step_settings = SLUICE_INIT(sluice_step_settings);
    step_settings.groups = &groups[0].known;
    step_settings.group_count = groups.size();
    for (int step = 0; step < 3; ++step) {
      EXPECT_OK(sluice_engine_begin_step(engine.get(), nullptr));
      for (uint32_t unit = kUnits; unit-- > 0;) add_unit_gradients(engine.get(), unit, SLUICE_F32, 0.3f);
      EXPECT_OK(sluice_engine_step(engine.get(), &step_settings, nullptr));
    }
    return values_of(engine.get());
  };
  const Values expected = run("memory", true, false);
  EXPECT_TRUE(run("memory", false, true) == expected);
  EXPECT_TRUE(run("disk", false, true) == expected);
  EXPECT_FALSE(run("disk", false, false) == expected);
}

TEST_F(TrainingTest, AParameterWithoutAGradientIsLeftAsItIs) {
  Choice disk;
  disk.place = "disk";
  const Values values = trained(disk, 1), all = trained(disk);
  for (uint64_t i = 0; i < values[2].size(); ++i) ASSERT_EQ(values[2][i], start_value(2, i));
  EXPECT_NE(values[0][0], start_value(0, 0));
  EXPECT_NE(values[0][0], all[0][0]);  // the norm leaves out a unit
  Choice memory;
  memory.place = "memory";
  EXPECT_TRUE(trained(memory, 1) == values);
}

// Several units are held at once, one of them twice, in another order in each step.
TEST_F(TrainingTest, AnyOrderGivesTheSameBits) {
  const auto run = [&](const char* place) {
    Choice setup{.place = place, .held = 2};
    const EngineHandle engine = make_engine(setup, folder_.path());
    set_start_values(engine.get());
    constexpr uint32_t kOrders[][3] = {{0, 1, 2}, {2, 0, 1}, {1, 2, 0}};
    for (const auto& order : kOrders) {
      EXPECT_OK(sluice_engine_begin_step(engine.get(), nullptr));
      for (const uint32_t unit : order) {
        EXPECT_OK(sluice_engine_acquire(engine.get(), order[0], SLUICE_READ));
        add_unit_gradients(engine.get(), unit, SLUICE_F32, 0.5f);
        add_unit_gradients(engine.get(), unit, SLUICE_F32, 0.25f);
        EXPECT_OK(sluice_engine_release(engine.get(), order[0]));
      }
      EXPECT_OK(apply(engine.get()));
    }
    return values_of(engine.get());
  };
  const Values expected = run("memory");
  EXPECT_TRUE(run("disk") == expected);
  EXPECT_TRUE(run(nullptr) == expected);
}

TEST_F(TrainingTest, AnEngineIsUsedFromSeveralThreads) {
  const EngineHandle engine = make_engine({}, folder_.path());
  set_start_values(engine.get());
  ASSERT_OK(sluice_engine_begin_step(engine.get(), nullptr));
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&] {
      for (int i = 0; i < 20; ++i)
        if (sluice_engine_acquire(engine.get(), 1, SLUICE_READ) == SLUICE_OK) {
          EXPECT_OK(sluice_engine_release(engine.get(), 1));
        }
    });
  for (std::thread& thread : threads) thread.join();
  add_unit_gradients(engine.get(), 0, SLUICE_F32, 1.0f);
  EXPECT_OK(apply(engine.get()));
}

}  // namespace sluice_c_test::training_test
