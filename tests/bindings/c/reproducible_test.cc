#include "tests/bindings/c/support.h"

// Tests of options.reproducible and of plans for ranks, which need no rank.
namespace sluice_c_test::reproducible_test {

sluice_status created(const sluice_engine_options& options) {
  sluice_engine* engine = nullptr;
  const sluice_status status = sluice_engine_create(make_model().get(), &options, &engine);
  sluice_engine_destroy(engine);
  return status;
}

TEST(MicroBatches, AreCountedWhereTheyAreStated) {
  const EngineHandle engine = make_engine({}, "", [](auto& options) { options.micro_batches = 2; });
  sluice_engine* const made = engine.get();
  set_start_values(made);
  expect_error(sluice_engine_end_gradients(made, 0), SLUICE_STATE, {"outside of a step"});
  ASSERT_OK(sluice_engine_begin_step(made, nullptr));
  for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
    add_unit_gradients(made, 0, SLUICE_F32, 1);
    ASSERT_OK(sluice_engine_end_gradients(made, 0));
    ASSERT_OK(sluice_engine_end_micro_batch(made));
  }
  expect_error(sluice_engine_end_gradients(made, 99), SLUICE_INVALID_ARGUMENT, {"99"});
  EXPECT_OK(apply(made));
}

TEST(Reproducible, OptionsThatCannotBeAreRefused) {
  sluice_engine_options options = options_of({}, nullptr);
  options.micro_batches = 4;
  options.update_in_backward = 1;
  expect_error(created(options), SLUICE_INVALID_ARGUMENT,
               {"options.micro_batches is 4", "update_in_backward"});
  options.reproducible = 1;
  expect_error(created(options), SLUICE_INVALID_ARGUMENT, {"update_in_backward", "reproducible"});
  options.update_in_backward = 0;
  options.micro_batches = 0;
  expect_error(created(options), SLUICE_INVALID_ARGUMENT, {"options.micro_batches is 0"});
}

TEST(SumsInEachBackward, OptionsThatCannotBeAreRefused) {
  sluice_engine_options options = options_of({}, nullptr);
  options.sum_gradients = "never";
  expect_error(created(options), SLUICE_INVALID_ARGUMENT, {"'never'", "'step'", "'each_backward'"});
  options.sum_gradients = "each_backward";
  options.micro_batches = 4;
  expect_error(created(options), SLUICE_INVALID_ARGUMENT, {"left to the plan", "state stage 2 or 3"});
  options.stage = SLUICE_STAGE(1);
  expect_error(created(options), SLUICE_INVALID_ARGUMENT, {"options.stage is 1", "state stage 2 or 3"});
  options.stage = SLUICE_STAGE(2);
  EXPECT_OK(created(options));
  options.reproducible = 1;
  expect_error(created(options), SLUICE_INVALID_ARGUMENT, {"sum_gradients", "reproducible"});
  options.reproducible = options.micro_batches = 0;
  expect_error(created(options), SLUICE_INVALID_ARGUMENT, {"options.micro_batches is 0"});
  // Where GPUs compute, parts of gradients are in memory.
  options.micro_batches = 4;
  options.planned_ranks = 2;
  options.memory = options.device_memory = std::uint64_t{1} << 30;
  options.place_gradients = "disk";
  char* json = nullptr;
  expect_error(sluice_plan(make_model().get(), &options, &json), SLUICE_INVALID_ARGUMENT,
               {"options.place_gradients is 'disk'", "sum_gradients"});
  options.place_gradients = nullptr;
  ASSERT_OK(sluice_plan(make_model().get(), &options, &json));
  EXPECT_NE(taken(json).find("\"sums_in_backward\": true"), std::string::npos);
}

TEST(PlanOfRanks, NeedsNone) {
  sluice_engine_options options = options_of({}, nullptr);
  options.planned_rank = 199;
  options.planned_ranks = 200;
  char* json = nullptr;
  ASSERT_OK(sluice_plan(make_model().get(), &options, &json));
  EXPECT_NE(taken(json).find("\"ranks\": 200"), std::string::npos);
  options.planned_rank = 200;
  expect_error(sluice_plan(make_model().get(), &options, &json), SLUICE_INVALID_ARGUMENT,
               {"options.planned_rank is 200", "options.planned_ranks is 200"});
  options.planned_rank = 0;
  expect_error(created(options), SLUICE_INVALID_ARGUMENT, {"options.planned_ranks is 200"});
}

}  // namespace sluice_c_test::reproducible_test
