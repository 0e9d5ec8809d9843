#include "core/error.h"
#include "engine/planner/planner.h"
#include "engine/spans_client.h"
#include "testing.h"
#include "thrown.h"

// Compares a parameter that spans units with the same one in a single unit, mostly under optimizers that need
// all of it before any element is updated.
namespace sluice::engine::spans_test {

using namespace sluice::engine::spans;  // NOLINT: this file is of these runs

const Case kKinds[] = {
    {.optimizer = {.name = "adafactor"}},
    {.optimizer = {.name = "adafactor", .settings = {{"beta1", 0.9}, {"relative_step", true}}},
     .shape = {3, 500'003}},
    {.optimizer = {.name = "adafactor", .storage = {Dtype::kF32, false}}, .dtype = Dtype::kBf16},
    {.optimizer = {.name = "adafactor", .settings = {{"beta1", 0.9}}, .storage = {Dtype::kU8}},
     .shape = {200'003, 7},
     .dtype = Dtype::kBf16},
    {.optimizer = {.name = "adafactor",
                   .settings = {{"beta1", 0.5}, {"scale_parameter", false}},
                   .storage = {Dtype::kBf16}},
     .shape = {5, 401, 801},
     .dtype = Dtype::kF16},
    {.optimizer = {.name = "adafactor"}, .shape = {1'300'001}},
    {.optimizer = {.name = "adafactor"}, .shape = {150'000, 3, 3}, .dtype = Dtype::kBf16},
    {.optimizer = {.name = "muon"}, .shape = {20, 70'003}},
    {.optimizer = {.name = "muon", .storage = {Dtype::kU8, false}},
     .shape = {70'003, 20},
     .dtype = Dtype::kBf16},
    {.optimizer = {.name = "muon", .storage = {Dtype::kBf16}}, .shape = {80'003, 17}, .dtype = Dtype::kF16},
};

class SpansTest : public testing::TestWithParam<Case> {};
std::string name_of_case(const testing::TestParamInfo<Case>& test) {
  return fmt::format("{}{}{}", test.index, test.param.optimizer.name, name_of(test.param.dtype));
}
// One that needs no other elements, with words at random that are those of the whole parameter.
const Case kByElements = {.optimizer = {.name = "adamw", .storage = {Dtype::kF32, false, 3}},
                          .dtype = Dtype::kBf16};
INSTANTIATE_TEST_SUITE_P(Kinds, SpansTest,
                         testing::Values(kKinds[1], kKinds[3], kKinds[4], kKinds[5], kKinds[8], kByElements),
                         name_of_case);
INSTANTIATE_TEST_SUITE_P(Long, SpansTest,
                         testing::Values(kKinds[0], kKinds[2], kKinds[6], kKinds[7], kKinds[9]),
                         name_of_case);

TEST_P(SpansTest, HaveTheBitsOfOneUnitWhereverTheyLie) {
  Case setup = GetParam();
  const Outcome expected = in_one_unit(setup);
  expect_same(train(setup), expected);
  expect_same(train(on_disk(setup)), expected);
  Case mixed = setup;
  mixed.gradients = "disk";
  mixed.chunk = 2 * kChunkGrain;
  expect_same(train(mixed), expected);
  mixed = on_disk(setup);
  mixed.gradients = "memory";
  mixed.prefetch = 3;
  expect_same(train(mixed), expected);
}

TEST(Spans, HaveTheSameBitsInTheOrderOfASchedule) {
  for (const std::size_t kind : {3, 7}) {
    Case setup = kKinds[kind];
    setup.any_order = false;
    setup.micro_batches = 2;
    setup.clip = kind != 3;
    const Outcome expected = in_one_unit(setup);
    expect_same(train(on_disk(setup)), expected);
  }
}

TEST(Spans, HaveTheSameBitsWithAllThatIsDoneToGradients) {
  for (Case setup : {kKinds[1], kKinds[7]}) {
    setup.micro_batches = 2;
    setup.factor = 0.125;
    setup.norm = 20;
    setup.clip_value = 0.01;
    setup.skipped = 1;
    const Outcome expected = in_one_unit(setup, 3);
    expect_same(train(on_disk(setup), 3), expected);
    setup.skipped = -1;
    EXPECT_FALSE(train(setup, 3) == expected) << "the skipped step would change nothing";
  }
}

TEST(Spans, StayAsTheyAreWhereTheyAreFrozen) {
  Case setup = on_disk(kKinds[0]);
  setup.frozen = true;
  const Outcome found = train(setup);
  expect_same(found, in_one_unit(setup));
  EXPECT_EQ(found.values.at("table")[5], noise(2, 5, -1, 0));
  EXPECT_EQ(found.wholes.count("table"), 0u);
}

TEST(Spans, OfMuonTakeTheMemoryOfTheWholeMatrixOnceAndAreRefusedWithWhatWouldDo) {
  Case spans = on_disk(kKinds[7]);
  spans.shape = {20, 130'003};
  Case whole = spans;
  whole.spans = false;
  const auto workspace = [](const Case& setup) {
    const Made made(setup);
    const auto& host = made.plan.bytes[static_cast<std::size_t>(allocator::Tier::kHost)];
    return host[static_cast<std::size_t>(allocator::Purpose::kWorkspace)];
  };
  EXPECT_EQ(workspace(spans), workspace(whole));
  EXPECT_GE(workspace(spans), 20u * 130'003 * sizeof(float));
  expect_error(ErrorCode::kBudget, {"muon", "'table' (20 x 130003)", "as a whole", "memory="}, [&] {
    make_plan(profile_of(spans), *optim::make_optimizer(spans.optimizer), {40 * kMiB, kGiB, 0},
              request_of(spans), {});
  });
}

TEST(Spans, GetGradientsAllTogetherOrNotAtAll) {
  for (const bool clip : {true, false}) {
    Case setup = on_disk(kKinds[0]);
    setup.clip = clip;
    Made made(setup);
    Client client(setup, *made.engine);
    client.load();
    const Outcome before = client.save();
    const std::vector<float> gradient(kGrain, 0.5f);
    made.any_order().begin_step(client.settings_of(0));
    client.add(2, {gradient.data(), Dtype::kF32});
    expect_error(
        ErrorCode::kState,
        {"'table[0:]' has no gradient", "'table[1048576:]' has one", "'table'", "adafactor", "or none"},
        [&] { made.any_order().step(client.settings_of(0)); });
    made.any_order().abandon_step();
    EXPECT_TRUE(client.save() == before);
    client.step(0);
    EXPECT_FALSE(client.save() == before);
  }
}

TEST(Spans, AreLeftAsTheyAreByAGradientThatIsNotFinite) {
  for (const char* place : {"memory", "disk"}) {
    Case setup = kKinds[0];
    setup.clip = false;
    setup.parameters = setup.gradients = setup.state = place;
    Made made(setup);
    Client client(setup, *made.engine);
    client.load();
    const Outcome before = client.save();
    std::vector<float> gradient(kGrain, 0.5f);
    made.any_order().begin_step(client.settings_of(0));
    gradient[7] = std::numeric_limits<float>::infinity();
    client.add(1, {gradient.data(), Dtype::kF32});
    gradient[7] = 0.5f;
    client.add(2, {gradient.data(), Dtype::kF32});
    expect_error(ErrorCode::kNotFinite, {"'table'"}, [&] { client.add(3, {gradient.data(), Dtype::kF32}); });
    made.any_order().step({});
    EXPECT_TRUE(client.save() == before);
    client.step(1);
    EXPECT_FALSE(client.save() == before);
  }
}

// Acquiring any unit of a joint update completes the update of all.
TEST(Spans, AreCurrentWhenOneIsAcquired) {
  const Case setup = on_disk(kKinds[0]);
  const Outcome expected = train(setup, 1);
  for (const UnitId wanted : {3u, 1u, 4u}) {
    Made made(setup);
    Client client(setup, *made.engine);
    client.load();
    client.step(0);
    made.any_order().acquire(wanted, Hold::kRead);
    const ParameterId p = made.engine->layout().first_parameter(wanted);
    const ParameterSpec& spec = made.engine->layout().spec(p);
    for (std::size_t i = 0; i < spec.elements(); i += 1001)
      ASSERT_EQ(test::value_at(made.engine->parameter(p), i),
                expected.values.at(spec.name)[spec.span_first + i]);
    made.any_order().release(wanted);
    EXPECT_TRUE(client.save().values == expected.values);
  }
}

TEST(Spans, AFaultInTheMiddleFailsTheEngine) {
  Case setup = on_disk(kKinds[0]);
  setup.optimizer.settings["beta1"] = 0.9;
  const Outcome expected = train(setup, 2);
  int well = 0, failed = 0;
  for (std::uint64_t seed = 0; seed < 6; ++seed) {
    offload::Faults faults = {.seed = seed + 1, .delay_microseconds = seed % 2 == 0 ? 0u : 50u};
    (seed % 3 == 0   ? faults.read_error
     : seed % 3 == 1 ? faults.write_error
                     : faults.read_flip) = seed % 4 == 0 ? 0.0005 : 0.004;
    Made made(setup, faults);
    Client client(setup, *made.engine);
    try {
      client.load();
      for (int step = 0; step < 2; ++step) client.step(step);
      Outcome found = client.save();
      found.losses = expected.losses;
      EXPECT_TRUE(found == expected) << "other bits, and no error, with seed " << seed;
      ++well;
    } catch (const Error& error) {
      EXPECT_TRUE(error.code() == ErrorCode::kIo || error.code() == ErrorCode::kCorrupt) << error.what();
      expect_error(ErrorCode::kState, {"the engine has failed", error.what()},
                   [&] { made.engine->settle(); });
      ++failed;
    }
  }
  EXPECT_GT(well, 0);
  EXPECT_GT(failed, 0);
}

TEST(Spans, OfWhichAScheduleAsksForSomeGradientsAloneAreRefused) {
  Case setup = kKinds[0];
  setup.any_order = false;
  Profile profile = profile_of(setup);
  for (Access& access : profile.schedule)
    if (access.unit == 2) access.gradient_use = -1, access.final = false;
  expect_error(ErrorCode::kInvalidArgument, {"'table'", "'table[1048576:]'", "as a whole"}, [&] {
    make_plan(profile, *optim::make_optimizer(setup.optimizer), {kGiB, 0, 0}, {}, {});
  });
}

}  // namespace sluice::engine::spans_test
