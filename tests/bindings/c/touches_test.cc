#include "tests/bindings/c/support.h"

// Tests of reads and writes at a parameter's address while its unit is not held.
namespace sluice_c_test::touches_test {

class TouchesTest : public ::testing::TestWithParam<Case> {
 protected:
  EngineHandle make(bool serve) const {
    const Choice setup{.place = GetParam().place, .dtype = GetParam().dtype};
    EngineHandle engine = make_engine(setup, folder_.path(), [&](sluice_engine_options& options) {
      options.serve_touches = serve ? 1 : 0;
    });
    set_start_values(engine.get());
    return engine;
  }
  static const void* address(sluice_engine* engine, uint32_t parameter) {
    const void* data = nullptr;
    EXPECT_OK(sluice_engine_parameter(engine, parameter, &data));
    return data;
  }
  static void write(sluice_engine* engine, uint32_t parameter, uint64_t i, float value) {
    void* data =
        const_cast<void*>(address(engine, parameter));  // NOLINT: a framework's tensor writes there, too
    uint32_t bits = 0;
    std::memcpy(&bits, &value, 4);
    const auto upper = static_cast<uint16_t>(bits >> 16);
    if (GetParam().dtype == SLUICE_F32)
      std::memcpy(static_cast<std::byte*>(data) + 4 * i, &value, 4);
    else if (GetParam().dtype == SLUICE_F16)
      static_cast<_Float16*>(data)[i] = static_cast<_Float16>(value);
    else
      std::memcpy(static_cast<std::byte*>(data) + 2 * i, &upper, 2);
  }
  static uint64_t touches(sluice_engine* engine) {
    sluice_counters counters = SLUICE_INIT(sluice_counters);
    EXPECT_OK(sluice_engine_counters(engine, &counters));
    return counters.touches;
  }
  Folder folder_;
};
INSTANTIATE_TEST_SUITE_P(Places, TouchesTest, ::testing::ValuesIn(kCases), case_name);

TEST_P(TouchesTest, ReadsSeeTheLatestValues) {
  const EngineHandle engine = make(true), other = make(true);
  for (const EngineHandle* e : {&engine, &other}) train(e->get(), GetParam().dtype, 2);
  const uint64_t before = touches(engine.get());
  std::vector<std::thread> readers;  // they read right after step(), whose updates are pending
  std::vector<std::vector<float>> seen(parameters().size());
  for (uint32_t p = 0; p < parameters().size(); ++p)
    readers.emplace_back([&, p, data = address(engine.get(), p)] {
      for (uint64_t i = 0; i < parameters()[p].elements(); i += 97)
        seen[p].push_back(widen(data, GetParam().dtype, i));
    });
  for (std::thread& reader : readers) reader.join();
  EXPECT_GE(touches(engine.get()), before + kUnits);
  for (uint32_t p = 0; p < parameters().size(); ++p) {
    EXPECT_OK(sluice_engine_acquire(other.get(), parameters()[p].unit, SLUICE_READ));
    for (uint64_t k = 0; k < seen[p].size(); ++k)
      ASSERT_EQ(seen[p][k], widen(address(other.get(), p), GetParam().dtype, 97 * k)) << p << " " << k;
    EXPECT_OK(sluice_engine_release(other.get(), parameters()[p].unit));
  }
}

// Unforeseen writes, writes to a unit that is held for reading, and writes under SLUICE_EDIT all become
// values, also of the masters. Elements that were not written keep their bits.
TEST_P(TouchesTest, WritesAreValues) {
  const EngineHandle touched = make(true), edited = make(false);
  for (const EngineHandle* e : {&touched, &edited}) train(e->get(), GetParam().dtype, 2);
  const Values before = values_of(touched.get());
  write(touched.get(), 0, 5, 2.5f);
  write(touched.get(), 4, 77, -3);
  EXPECT_OK(sluice_engine_acquire(touched.get(), 1, SLUICE_READ));
  write(touched.get(), 2, 9, 0.75f);
  EXPECT_OK(sluice_engine_release(touched.get(), 1));
  const std::vector<std::pair<uint32_t, std::pair<uint64_t, float>>> edits = {
      {0, {5, 2.5f}}, {4, {77, -3}}, {2, {9, 0.75f}}};
  for (const auto& [p, edit] : edits) {
    EXPECT_OK(sluice_engine_acquire(edited.get(), parameters()[p].unit, SLUICE_EDIT));
    write(edited.get(), p, edit.first, edit.second);
    EXPECT_OK(sluice_engine_release(edited.get(), parameters()[p].unit));
  }
  Values expected = before;
  for (const auto& [p, edit] : edits) expected[p][edit.first] = edit.second;
  for (const EngineHandle* e : {&touched, &edited}) {
    EXPECT_TRUE(values_of(e->get()) == expected);
    train(e->get(), GetParam().dtype, 2);
  }
  EXPECT_TRUE(values_of(touched.get()) == values_of(edited.get()));
}

using TouchesDeathTest = TouchesTest;
INSTANTIATE_TEST_SUITE_P(Places, TouchesDeathTest,
                         ::testing::Values(Case{"memory", SLUICE_F32}, Case{"disk", SLUICE_F32}), case_name);

TEST_P(TouchesDeathTest, AreToldWhereTheyAreNotServed) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const EngineHandle engine = make(false);
  EXPECT_DEATH(write(engine.get(), 0, 5, 1), "parameters of unit.0' was touched while absent");
}

// These functions touch a unit which the call around them has not brought yet.
TEST_P(TouchesDeathTest, AreToldInsideOfACall) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const EngineHandle engine = make(true);
  const auto read = [](void* context, uint32_t, uint64_t, float*, uint64_t) {
    return static_cast<int>(*static_cast<volatile const float*>(context));
  };
  void* absent = const_cast<void*>(address(engine.get(), 0));  // NOLINT: it is passed on as a context
  const auto see = [](void* context, uint32_t, uint32_t, uint64_t, const float*, uint64_t) {
    return static_cast<int>(*static_cast<volatile const float*>(context));
  };
  const char* const told = "cannot be brought in: a function that the engine has called touches it";
  EXPECT_DEATH((void)sluice_engine_set_values(engine.get(), 1, read, absent), told);
  EXPECT_DEATH((void)sluice_engine_get_state(engine.get(), 1, see, absent), told);  // on any of its threads
}

}  // namespace sluice_c_test::touches_test
