#include "tests/bindings/c/support.h"

// Tests of what parameters' addresses show after the engine has gone.
namespace sluice_c_test::leaving_test {

std::vector<const void*> addresses(sluice_engine* engine) {
  std::vector<const void*> found(parameters().size());
  for (uint32_t p = 0; p < found.size(); ++p) EXPECT_OK(sluice_engine_parameter(engine, p, &found[p]));
  return found;
}

class LeavingTest : public ::testing::TestWithParam<Case> {
 protected:
  EngineHandle make(uint64_t memory = uint64_t{1} << 30) const {
    Choice setup{.place = GetParam().place, .dtype = GetParam().dtype, .memory = memory};
    EngineHandle engine = make_engine(setup, folder_.path());
    set_start_values(engine.get());
    return engine;
  }
  Folder folder_;
};
INSTANTIATE_TEST_SUITE_P(Places, LeavingTest, ::testing::ValuesIn(kCases), case_name);

// The engine is left right after step(), whose updates are pending, and compared with the same run that goes
// on.
TEST_P(LeavingTest, ValuesStayWhereTheyWere) {
  EngineHandle engine = make(), other = make();
  for (EngineHandle* e : {&engine, &other}) train(e->get(), GetParam().dtype, 2);
  const std::vector<const void*> expected = addresses(other.get()), found = addresses(engine.get());
  sluice_home* homes[kUnits] = {};
  EXPECT_OK(sluice_engine_leave(engine.get(), 1, 0, nullptr));
  ASSERT_OK(sluice_engine_leave(engine.get(), 1, 0, homes));
  expect_error(sluice_engine_begin_step(engine.get(), nullptr), SLUICE_STATE, {"have left it"});
  for (const uint32_t with_values : {0u, 1u})
    expect_error(sluice_engine_leave(engine.get(), with_values, 0, homes), SLUICE_STATE, {"have left"});
  engine.reset();
  for (uint32_t p = 0; p < parameters().size(); ++p) {
    EXPECT_OK(sluice_engine_acquire(other.get(), parameters()[p].unit, SLUICE_READ));
    const std::size_t bytes = parameters()[p].elements() * (GetParam().dtype == SLUICE_F32 ? 4 : 2);
    EXPECT_EQ(std::memcmp(found[p], expected[p], bytes), 0) << parameters()[p].name;
    EXPECT_OK(sluice_engine_release(other.get(), parameters()[p].unit));
    std::memset(const_cast<void*>(found[p]), 1, bytes);  // NOLINT: the memory is the caller's
  }
  for (sluice_home* home : homes) sluice_home_destroy(home);
  sluice_home_destroy(nullptr);
}

TEST_P(LeavingTest, IsRefusedWithNothingChanged) {
  const EngineHandle engine = make();
  train(engine.get(), GetParam().dtype, 1);
  const Values before = values_of(engine.get());
  sluice_home* homes[kUnits] = {};
  expect_error(sluice_engine_leave(engine.get(), 1, uint64_t{1100} << 20, homes), SLUICE_BUDGET,
               {"takes 1.", "GiB more", "of its budget of 1.00 GiB"});
  expect_error(sluice_engine_leave(engine.get(), 1, UINT64_MAX, homes), SLUICE_BUDGET, {"of its budget"});
  EXPECT_OK(sluice_engine_acquire(engine.get(), 1, SLUICE_READ));
  expect_error(sluice_engine_leave(engine.get(), 1, 0, homes), SLUICE_STATE, {"'unit.1' is held"});
  EXPECT_OK(sluice_engine_release(engine.get(), 1));
  EXPECT_EQ(homes[0], nullptr);
  EXPECT_TRUE(values_of(engine.get()) == before);
  train(engine.get(), GetParam().dtype, 1);
}

TEST_P(LeavingTest, WithoutValuesATouchIsTold) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto touch_after = [&] {
    EngineHandle engine = make();
    train(engine.get(), GetParam().dtype, 1);
    const std::vector<const void*> found = addresses(engine.get());
    sluice_home* homes[kUnits] = {};
    EXPECT_OK(sluice_engine_leave(engine.get(), 0, 0, homes));
    engine.reset();
    static_cast<void>(*static_cast<const volatile char*>(found[2]));
  };
  EXPECT_DEATH(touch_after(),
               "'parameters of unit.1' was touched after its engine was closed without keeping");
}

}  // namespace sluice_c_test::leaving_test
