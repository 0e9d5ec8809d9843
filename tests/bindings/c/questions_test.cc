#include "tests/bindings/c/support.h"

// Tests of questions, so that a caller need not keep count itself.
namespace sluice_c_test::questions_test {

constexpr uint32_t kLast = 4, kLastUnit = 2;

class QuestionsTest : public ::testing::Test {
 protected:
  QuestionsTest() { set_start_values(engine()); }
  sluice_engine* engine() { return engine_.get(); }
  uint32_t accesses(uint32_t unit) {
    uint32_t found = 99;
    EXPECT_OK(sluice_engine_held(engine(), unit, &found, nullptr));
    return found;
  }
  uint32_t times(uint32_t unit) {
    uint32_t found = 99;
    EXPECT_OK(sluice_engine_held(engine(), unit, nullptr, &found));
    return found;
  }
  std::vector<uint32_t> held_units() {
    std::vector<uint32_t> units(3);
    size_t count = 0;
    EXPECT_OK(sluice_engine_held_units(engine(), units.data(), units.size(), &count));
    units.resize(count);
    return units;
  }
  bool in_step() {
    uint32_t found = 9;
    EXPECT_OK(sluice_engine_in_step(engine(), &found));
    return found == 1;
  }

  EngineHandle engine_ = make_engine({.held = 2}, "", [](auto& options) { options.serve_touches = 1; });
};

TEST_F(QuestionsTest, WhatIsHeldAndHowOften) {
  EXPECT_EQ(held_units(), std::vector<uint32_t>{});
  EXPECT_OK(sluice_engine_begin_step(engine(), nullptr));
  EXPECT_TRUE(in_step());
  EXPECT_OK(sluice_engine_acquire(engine(), kLastUnit, SLUICE_READ));
  EXPECT_OK(sluice_engine_acquire(engine(), 1, SLUICE_READ));
  EXPECT_OK(sluice_engine_acquire(engine(), kLastUnit, SLUICE_GRADIENT_ONLY));
  EXPECT_EQ(held_units(), (std::vector<uint32_t>{kLastUnit, 1}));
  EXPECT_EQ(accesses(kLastUnit), 1u << SLUICE_READ | 1u << SLUICE_GRADIENT_ONLY);
  EXPECT_EQ(times(kLastUnit), 2u);
  EXPECT_EQ(times(0), 0u);
  EXPECT_OK(sluice_engine_release(engine(), kLastUnit));
  EXPECT_EQ(accesses(kLastUnit), 1u << SLUICE_READ);
  size_t count = 0;
  EXPECT_OK(sluice_engine_held_units(engine(), nullptr, 0, &count));
  EXPECT_EQ(count, 2u);
  EXPECT_OK(sluice_engine_abandon_step(engine()));
  EXPECT_EQ(held_units(), std::vector<uint32_t>{});
  EXPECT_EQ(accesses(kLastUnit), 0u);
  expect_error(sluice_engine_held(engine(), 99, nullptr, nullptr), SLUICE_INVALID_ARGUMENT, {"no unit 99"});
}

// An edited unit is released like any other, so that it can be acquired for anything again.
TEST_F(QuestionsTest, AnEditEndsWithTheStepThatIsAbandoned) {
  EXPECT_OK(sluice_engine_begin_step(engine(), nullptr));
  EXPECT_OK(sluice_engine_acquire(engine(), 1, SLUICE_EDIT));
  EXPECT_EQ(accesses(1), 1u << SLUICE_EDIT);
  EXPECT_OK(sluice_engine_abandon_step(engine()));
  EXPECT_EQ(accesses(1), 0u);
  set_start_values(engine());
  EXPECT_OK(sluice_engine_acquire(engine(), 1, SLUICE_EDIT));
  EXPECT_OK(sluice_engine_release(engine(), 1));
}

TEST_F(QuestionsTest, WhatATouchBringsInIsNobodysAndStaysWhileQuestionsAreAsked) {
  const void* data = nullptr;
  EXPECT_OK(sluice_engine_parameter(engine(), kLast, &data));
  const auto touches = [&] {
    sluice_counters counters = SLUICE_INIT(sluice_counters);
    EXPECT_OK(sluice_engine_counters(engine(), &counters));
    return counters.touches;
  };
  const volatile auto* const values = static_cast<const volatile float*>(data);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(values[i], values[i]);
    EXPECT_EQ(held_units(), std::vector<uint32_t>{});
    EXPECT_EQ(touches(), 1u);
  }
  EXPECT_OK(sluice_engine_settle(engine()));
  EXPECT_EQ(values[0], values[0]);
  EXPECT_EQ(touches(), 2u);
}

TEST_F(QuestionsTest, WhyAnEngineHasFailed) {
  char* text = nullptr;
  EXPECT_OK(sluice_engine_failure(engine(), &text));
  EXPECT_EQ(text, nullptr);
  sluice_home* homes[3] = {};
  EXPECT_OK(sluice_engine_leave(engine(), 0, 0, homes));
  EXPECT_OK(sluice_engine_failure(engine(), &text));
  ASSERT_NE(text, nullptr);
  expect_error(sluice_engine_settle(engine()), SLUICE_STATE, {text});
  sluice_text_destroy(text);
  EXPECT_FALSE(in_step());
  for (sluice_home* home : homes) sluice_home_destroy(home);
}

}  // namespace sluice_c_test::questions_test
