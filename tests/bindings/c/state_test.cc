#include "tests/bindings/c/support.h"

// Tests of optimizer state that the caller reads and writes.
namespace sluice_c_test::state_test {

int give_state(void* context, uint32_t parameter, uint32_t array, uint64_t first, float* values,
               uint64_t elements) {
  const auto& from = static_cast<State*>(context)->at({parameter, array});
  std::copy_n(from.begin() + static_cast<std::ptrdiff_t>(first), elements, values);
  return 0;
}
int refuse(void*, uint32_t, uint32_t, uint64_t, float*, uint64_t) { return 7; }

struct Kind {
  const char *place, *optimizer;
  sluice_dtype dtype;
  bool no_master;
  std::string arrays;
  sluice_state_type state = SLUICE_STATE_F32;
};

class StateTest : public ::testing::TestWithParam<Kind> {
 protected:
  EngineHandle fresh() {
    const Kind& kind = GetParam();
    EngineHandle engine = make_engine({.place = kind.place,
                                       .dtype = kind.dtype,
                                       .optimizer = kind.optimizer,
                                       .no_master = kind.no_master,
                                       .state = kind.state},
                                      folder_.path());
    set_start_values(engine.get());
    return engine;
  }
  static State state_of(sluice_engine* engine) {
    State state;
    for (uint32_t unit = 0; unit < kUnits; ++unit)
      EXPECT_OK(sluice_engine_get_state(engine, unit, collect_state, &state));
    return state;
  }
  Folder folder_;
};
INSTANTIATE_TEST_SUITE_P(
    Kinds, StateTest,
    ::testing::Values(Kind{"memory", "adamw", SLUICE_F32, false, R"(["exp_avg","exp_avg_sq"])"},
                      Kind{"disk", "lion", SLUICE_BF16, true, R"(["exp_avg"])"},
                      Kind{"disk", "adamw", SLUICE_BF16, false, R"(["master","exp_avg","exp_avg_sq"])",
                           SLUICE_STATE_8BIT},
                      Kind{"memory", "muon", SLUICE_BF16, false,
                           R"(["master","momentum_buffer","exp_avg","exp_avg_sq"])", SLUICE_STATE_BF16}));

// The library's own functions for whole arrays must move the same bytes as functions of the caller's, run by
// run.
TEST_P(StateTest, MovesAsWholeArrays) {
  const EngineHandle first = fresh(), second = fresh();
  train(first.get(), GetParam().dtype, 2);
  const State expected = state_of(first.get());
  uint32_t arrays = 0;
  for (const auto& [key, values] : expected) arrays = std::max(arrays, key.second + 1);
  for (uint32_t unit = 0; unit < kUnits; ++unit) {
    uint32_t begin = 0, end = 0;
    while (parameters()[begin].unit != unit) ++begin;
    for (end = begin; end < parameters().size() && parameters()[end].unit == unit; ++end) {
    }
    State moved;
    std::vector<sluice_array> rows;
    for (uint32_t p = begin; p < end; ++p)
      for (uint32_t a = 0; a < arrays; ++a) {
        const auto found = expected.find({p, a});
        if (found != expected.end()) moved[{p, a}].resize(found->second.size());
        rows.push_back({found == expected.end() ? nullptr : moved[{p, a}].data(), SLUICE_F32});
      }
    sluice_arrays context = SLUICE_INIT(sluice_arrays);
    context.first_parameter = begin;
    context.parameters = end - begin;
    context.arrays = arrays;
    context.data = rows.data();
    ASSERT_OK(sluice_engine_get_state(first.get(), unit, sluice_write_state_to_arrays, &context));
    for (const auto& [key, values] : moved) EXPECT_TRUE(values == expected.at(key)) << key.first;
    ASSERT_OK(sluice_engine_set_state(second.get(), unit, sluice_read_state_from_arrays, &context));
  }
  EXPECT_TRUE(state_of(second.get()) == expected);
}

TEST_P(StateTest, ARunGoesOnInAnotherEngine) {
  const sluice_dtype dtype = GetParam().dtype;
  const EngineHandle first = fresh(), second = fresh();
  train(first.get(), dtype, 3);
  char* names = nullptr;
  ASSERT_OK(sluice_engine_state_arrays(first.get(), &names));
  EXPECT_EQ(taken(names), GetParam().arrays);

  State state = state_of(first.get());
  EXPECT_EQ(state.at({4, 0}).size(), parameters()[4].elements());
  EXPECT_EQ(state.contains({0, 3}), false) << "Muon keeps no averages of a matrix";
  Values values = values_of(first.get());
  for (uint32_t unit = 0; unit < kUnits; ++unit) {
    ASSERT_OK(sluice_engine_set_values(
        second.get(), unit,
        [](void* context, uint32_t parameter, uint64_t at, float* to, uint64_t elements) {
          const auto& from = (*static_cast<Values*>(context))[parameter];
          std::copy_n(from.begin() + static_cast<std::ptrdiff_t>(at), elements, to);
          return 0;
        },
        &values));
    ASSERT_OK(sluice_engine_set_state(second.get(), unit, give_state, &state));
  }
  for (uint32_t p = 0; p < parameters().size(); ++p) {
    uint64_t updates = 0;
    ASSERT_OK(sluice_engine_updates(first.get(), p, &updates));
    EXPECT_EQ(updates, 3u);
    ASSERT_OK(sluice_engine_set_updates(second.get(), p, updates));
  }
  EXPECT_EQ(state_of(second.get()), state);
  train(first.get(), dtype, 2);
  train(second.get(), dtype, 2);
  EXPECT_EQ(values_of(second.get()), values_of(first.get()));
  EXPECT_EQ(state_of(second.get()), state_of(first.get()));
}

TEST(StateThatIsRefused, MustBeGivenAnew) {
  const Folder folder;
  const EngineHandle engine = make_engine({"disk"}, folder.path());
  expect_error(sluice_engine_set_state(engine.get(), 0, refuse, nullptr), SLUICE_STATE, {"no values yet"});
  set_start_values(engine.get());
  expect_error(sluice_engine_set_state(engine.get(), 1, refuse, nullptr), SLUICE_CALLBACK, {"stopped"});
  expect_error(sluice_engine_acquire(engine.get(), 1, SLUICE_READ), SLUICE_STATE, {"'unit.1'", "values"});
  EXPECT_OK(sluice_engine_set_values(engine.get(), 1, start_values, nullptr));
  EXPECT_OK(sluice_engine_acquire(engine.get(), 1, SLUICE_READ));
}

TEST(StateOfFrozenUnits, IsRefused) {
  Choice setup;
  setup.frozen = 2;
  const EngineHandle engine = make_engine(setup, "");
  set_start_values(engine.get());
  State state;
  expect_error(sluice_engine_get_state(engine.get(), 1, collect_state, &state), SLUICE_INVALID_ARGUMENT,
               {"'unit.1'", "frozen"});
  expect_error(sluice_engine_set_state(engine.get(), 1, give_state, &state), SLUICE_INVALID_ARGUMENT,
               {"frozen"});
  expect_error(sluice_engine_get_state(engine.get(), 0, nullptr, nullptr), SLUICE_INVALID_ARGUMENT,
               {"'state'"});
}

}  // namespace sluice_c_test::state_test
