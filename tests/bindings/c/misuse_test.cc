#include "tests/bindings/c/support.h"

// Tests that misuse and bad input are errors that name what is wrong, after which the engine goes on.
namespace sluice_c_test::misuse_test {

class MisuseTest : public ::testing::Test {
 protected:
  MisuseTest() { set_start_values(engine_.get()); }
  sluice_engine* engine() { return engine_.get(); }
  // The engine can still train.
  void TearDown() override {
    if (!in_step_) {
      EXPECT_OK(sluice_engine_begin_step(engine(), nullptr));
    }
    add_unit_gradients(engine(), 0, SLUICE_F32, 1.0f);
    EXPECT_OK(apply(engine()));
  }
  Folder folder_;
  EngineHandle engine_ = make_engine({"disk"}, folder_.path());
  bool in_step_ = false;
};

TEST_F(MisuseTest, AccessesThatAreNotAllowed) {
  expect_error(sluice_engine_acquire(engine(), 9, SLUICE_READ), SLUICE_INVALID_ARGUMENT, {"unit 9", "has 3"});
  expect_error(sluice_engine_acquire(engine(), 0, SLUICE_GRADIENT), SLUICE_STATE,
               {"'unit.0'", "outside of a step"});
  expect_error(sluice_engine_release(engine(), 0), SLUICE_STATE, {"'unit.0'", "not acquired"});
  expect_error(sluice_engine_acquire(engine(), 0, static_cast<sluice_access>(7)), SLUICE_INVALID_ARGUMENT,
               {"7"});
  EXPECT_OK(sluice_engine_acquire(engine(), 0, SLUICE_READ));
  expect_error(sluice_engine_acquire(engine(), 1, SLUICE_READ), SLUICE_STATE,
               {"'unit.1'", "'unit.0'", "made for 1"});
  EXPECT_OK(sluice_engine_acquire(engine(), 0, SLUICE_READ));
  EXPECT_OK(sluice_engine_release(engine(), 0));
  EXPECT_OK(sluice_engine_release(engine(), 0));
  expect_error(sluice_engine_release(engine(), 0), SLUICE_STATE, {"'unit.0'"});
}

TEST_F(MisuseTest, GradientsThatAreNotAllowed) {
  const std::vector<float> gradient(parameters()[0].elements(), 1.0f);
  expect_error(sluice_engine_add_gradient(engine(), 0, gradient.data(), SLUICE_F32), SLUICE_STATE,
               {"'first.weight'", "'unit.0'"});
  expect_error(sluice_engine_add_gradient(engine(), 0, nullptr, SLUICE_F32), SLUICE_INVALID_ARGUMENT,
               {"'gradient'"});
  expect_error(sluice_engine_add_gradient(engine(), 99, gradient.data(), SLUICE_F32), SLUICE_INVALID_ARGUMENT,
               {"parameter 99"});
  EXPECT_OK(sluice_engine_begin_step(engine(), nullptr));
  in_step_ = true;
  EXPECT_OK(sluice_engine_acquire(engine(), 0, SLUICE_READ));
  expect_error(sluice_engine_add_gradient(engine(), 0, gradient.data(), SLUICE_F32), SLUICE_STATE,
               {"'first.weight'"});
  EXPECT_OK(sluice_engine_release(engine(), 0));
}

TEST_F(MisuseTest, StepsThatAreNotAllowed) {
  expect_error(apply(engine()), SLUICE_STATE, {"begin_step"});
  EXPECT_OK(sluice_engine_begin_step(engine(), nullptr));
  in_step_ = true;
  expect_error(sluice_engine_begin_step(engine(), nullptr), SLUICE_STATE, {"twice"});
  EXPECT_OK(sluice_engine_acquire(engine(), 1, SLUICE_READ));
  expect_error(apply(engine()), SLUICE_STATE, {"'unit.1'", "held"});
  EXPECT_OK(sluice_engine_release(engine(), 1));
  sluice_step_settings settings = SLUICE_INIT(sluice_step_settings);
  expect_error(sluice_engine_step(engine(), &settings, nullptr), SLUICE_INVALID_ARGUMENT, {"0 groups", "2"});
  const sluice_group_settings one = SLUICE_INIT(sluice_group_settings);
  settings.groups = &one;
  settings.group_count = std::size_t{1} << 60;
  expect_error(sluice_engine_step(engine(), &settings, nullptr), SLUICE_INVALID_ARGUMENT, {"groups", "2"});
  settings.size = 0;
  expect_error(sluice_engine_step(engine(), &settings, nullptr), SLUICE_INVALID_ARGUMENT, {"SLUICE_INIT"});
  expect_error(sluice_engine_save(engine(), folder_.path("out").c_str(), 1, nullptr), SLUICE_STATE,
               {"in the middle of a step"});
}

TEST_F(MisuseTest, SettingsThatAreNoNumbersChangeNothing) {
  const Values before = values_of(engine());
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_OK(sluice_engine_begin_step(engine(), nullptr));
  in_step_ = true;
  add_unit_gradients(engine(), 0, SLUICE_F32, 1e15f);
  std::vector<sluice_setting> of_optimizer = {{"beta2", 0.999, nullptr}};
  auto groups = two_groups(of_optimizer);
  const auto step = [&](double rate, double clip, double factor) {
    for (sluice_group_settings& group : groups) group.learning_rate = rate;
    sluice_step_settings settings = SLUICE_INIT(sluice_step_settings);
    settings.groups = groups.data();
    settings.group_count = groups.size();
    settings.clip = clip;
    settings.gradient_factor = factor;
    return sluice_engine_step(engine(), &settings, nullptr);
  };
  expect_error(step(nan, 0, 1), SLUICE_INVALID_ARGUMENT, {"learning rate of nan"});
  expect_error(step(-1, 0, 1), SLUICE_INVALID_ARGUMENT, {"learning rate of -1"});
  expect_error(step(1, -3, 1), SLUICE_INVALID_ARGUMENT, {"clip of -3"});
  expect_error(step(1, 0, nan), SLUICE_INVALID_ARGUMENT, {"factor of nan"});
  expect_error(step(1e39, 0, 1), SLUICE_INVALID_ARGUMENT, {"learning rate of 1e+39", "32 bits"});
  expect_error(step(1, 0, 1e39), SLUICE_INVALID_ARGUMENT, {"factor of 1e+39", "32 bits"});
  of_optimizer[0].number = 1;
  expect_error(step(1, 0, 1), SLUICE_INVALID_ARGUMENT, {"adamw", "beta2 is 1"});
  of_optimizer[0].name = "nesterov";
  expect_error(step(1, 0, 1), SLUICE_INVALID_ARGUMENT, {"nesterov", "adamw has none"});
  of_optimizer[0] = {"beta2", 0.999, nullptr};
  groups[0].size = 0;
  expect_error(step(1, 0, 1), SLUICE_INVALID_ARGUMENT, {"'settings.groups'", "SLUICE_INIT"});
  groups[0].size = sizeof groups[0];
  groups[1].size -= sizeof(void*);
  expect_error(step(1, 0, 1), SLUICE_INVALID_ARGUMENT, {"group 1", "of the first", "SLUICE_INIT"});
  groups[1].size = sizeof groups[1];
  expect_error(step(1, 0, 1e30), SLUICE_NOT_FINITE, {"norm", "1e+30"});
  in_step_ = false;
  EXPECT_TRUE(values_of(engine()) == before);
}

TEST_F(MisuseTest, ARefusedLoadLeavesTheEngineWhole) {
  char* path = nullptr;
  EXPECT_OK(sluice_engine_save(engine(), folder_.path("out").c_str(), 0, &path));
  EXPECT_OK(sluice_engine_begin_step(engine(), nullptr));
  in_step_ = true;
  expect_error(sluice_engine_load(engine(), path), SLUICE_STATE, {"in the middle of a step"});
  sluice_text_destroy(path);
}

TEST_F(MisuseTest, FoldersOfOtherRunsAreLeftAlone) {
  const std::string out = folder_.path("out");
  train(engine(), SLUICE_F32, 2);
  EXPECT_OK(sluice_engine_save(engine(), out.c_str(), 1, nullptr));
  const EngineHandle other = make_engine({}, folder_.path());
  set_start_values(other.get());
  train(other.get(), SLUICE_F32, 1);
  expect_error(sluice_engine_save(other.get(), out.c_str(), 1, nullptr), SLUICE_INVALID_ARGUMENT,
               {"step 2", "step 1"});
  EXPECT_TRUE(std::filesystem::exists(out + "/step-00000002/manifest.json"));
  std::filesystem::create_directory(folder_.path("train"));
  std::ofstream(folder_.path("train/.run")) << R"({"version": 1, "run": "0011223344556677"})";
  expect_error(sluice_engine_save(other.get(), folder_.path("train").c_str(), 1, nullptr),
               SLUICE_INVALID_ARGUMENT, {"sluice train"});
  expect_error(sluice_engine_save(other.get(), "", 1, nullptr), SLUICE_INVALID_ARGUMENT, {"'out'"});
}

TEST_F(MisuseTest, ADiskMayBeAFolderWithItsSize) {
  const auto plan = [&](const char* name, uint64_t limit, std::string* text) {
    const ModelHandle model = make_model();
    const std::string path = folder_.path(name);
    const sluice_folder disk = {path.c_str(), limit};
    const sluice_engine_options options = options_of({}, &disk);
    char* made = nullptr;
    const sluice_status status = sluice_plan(model.get(), &options, &made);
    *text = taken(made);
    return status;
  };
  // The bytes that the process has taken already stand in between, and are more each time.
  const auto stated = [](const std::string& made) {
    const std::size_t budget = made.find("\"budget\""), after = made.find("\"bytes\"");
    return made.substr(budget, after - budget) + made.substr(made.find("\"units\""));
  };
  std::string as_text, as_number, named;
  for (const char* name : {"lent", "lent:8MiB"}) std::filesystem::create_directory(folder_.path(name));
  ASSERT_OK(plan("lent:8MiB", 0, &as_text));
  ASSERT_OK(plan("lent", 8 << 20, &as_number));
  EXPECT_NE(as_text.find("8388608"), std::string::npos) << as_text;
  EXPECT_EQ(stated(as_text), stated(as_number));
  ASSERT_OK(plan("lent:8MiB", 9 << 20, &named));  // a limit of its own: it is the folder's name
  EXPECT_NE(named.find("9437184"), std::string::npos) << named;
  expect_error(plan("lent:8XB", 0, &named), SLUICE_INVALID_ARGUMENT, {"lent:8XB", "512MiB"});
}

TEST_F(MisuseTest, FilesOfTheCallersAreChecked) {
  const std::string out = folder_.path("out");
  const auto save = [&](const sluice_file* files, size_t count) {
    return sluice_engine_save_with_files(engine(), out.c_str(), 0, files, count, nullptr);
  };
  const sluice_piece piece = {nullptr, 1};
  const sluice_file without_name = {nullptr, nullptr, 0}, without_pieces = {"own", nullptr, 1},
                    without_data = {"own", &piece, 1}, of_the_engine = {"model.safetensors", nullptr, 0};
  expect_error(save(nullptr, 1), SLUICE_INVALID_ARGUMENT, {"'files'"});
  expect_error(save(&without_name, 1), SLUICE_INVALID_ARGUMENT, {"a file's name"});
  expect_error(save(&without_pieces, 1), SLUICE_INVALID_ARGUMENT, {"a file's pieces"});
  expect_error(save(&without_data, 1), SLUICE_INVALID_ARGUMENT, {"a piece's data"});
  expect_error(save(&of_the_engine, 1), SLUICE_INVALID_ARGUMENT, {"'model.safetensors'"});
  EXPECT_FALSE(std::filesystem::exists(out + "/step-00000000"));
  char* file = nullptr;
  expect_error(sluice_engine_checkpoint_file(engine(), out.c_str(), "own", &file), SLUICE_NOT_FOUND, {out});
  EXPECT_EQ(file, nullptr);
  expect_error(sluice_engine_find_checkpoint(engine(), out.c_str(), &file), SLUICE_NOT_FOUND, {out});
  ASSERT_EQ(sluice_engine_save(engine(), out.c_str(), 0, nullptr), SLUICE_OK);
  ASSERT_EQ(sluice_engine_find_checkpoint(engine(), out.c_str(), &file), SLUICE_OK);
  EXPECT_EQ(file, out + "/step-00000000");
  sluice_text_destroy(file);
}

TEST_F(MisuseTest, AFunctionOfTheCallersStopsTheCall) {
  const auto stop = [](void*, uint32_t, uint64_t, float*, uint64_t) { return 5; };
  expect_error(sluice_engine_set_values(engine(), 1, stop, nullptr), SLUICE_CALLBACK, {"stopped"});
  const auto stop_writing = [](void*, uint32_t, uint64_t, const float*, uint64_t) { return 5; };
  EXPECT_OK(sluice_engine_set_values(engine(), 1, start_values, nullptr));
  expect_error(sluice_engine_get_values(engine(), 1, stop_writing, nullptr), SLUICE_CALLBACK, {"stopped"});
  expect_error(sluice_engine_set_values(engine(), 1, nullptr, nullptr), SLUICE_INVALID_ARGUMENT,
               {"'values'"});
}

TEST_F(MisuseTest, AFunctionOfTheCallersStopsPlanningAndMakingAnEngine) {
  const ModelHandle model = make_model();
  sluice_engine_options options = options_of({}, nullptr);
  int asked = 0;
  options.stop_context = &asked;
  options.stop = [](void* context) { return ++*static_cast<int*>(context); };
  char* json = nullptr;
  expect_error(sluice_plan(model.get(), &options, &json), SLUICE_CALLBACK, {"stopped"});
  sluice_engine* made = nullptr;
  expect_error(sluice_engine_create(model.get(), &options, &made), SLUICE_CALLBACK, {"stopped"});
  EXPECT_EQ(asked, 2);
  EXPECT_EQ(made, nullptr);
}

TEST_F(MisuseTest, AFunctionOfTheCallersMayNotCallTheEngine) {
  struct Context {
    sluice_engine* engine;
    sluice_status inner;
  } context = {engine(), SLUICE_OK};
  const auto fill = [](void* given, uint32_t p, uint64_t first, float* values, uint64_t elements) {
    auto& c = *static_cast<Context*>(given);
    c.inner = sluice_engine_acquire(c.engine, 0, SLUICE_READ);
    return start_values(nullptr, p, first, values, elements);
  };
  EXPECT_OK(sluice_engine_set_values(engine(), 1, fill, &context));
  expect_error(context.inner, SLUICE_STATE, {"that the engine has called calls the engine"});
  context.inner = SLUICE_OK;
  const auto look = [](void* given, uint32_t, uint32_t, uint64_t, const float*, uint64_t) {
    auto& c = *static_cast<Context*>(given);
    c.inner = sluice_engine_settle(c.engine);  // runs on a thread of the engine
    return 0;
  };
  EXPECT_OK(sluice_engine_get_state(engine(), 1, look, &context));
  EXPECT_EQ(context.inner, SLUICE_STATE);
  EXPECT_OK(sluice_engine_settle(engine()));
}

// After an error of any kind in the library's own functions the next call works.
TEST_F(MisuseTest, ArraysThatCannotBeReadEndTheirCallAlone) {
  const Values before = values_of(engine());
  std::vector<float> values(parameters()[0].elements());
  sluice_array array = {values.data(), static_cast<sluice_dtype>(9)};
  sluice_arrays arrays = SLUICE_INIT(sluice_arrays);
  arrays.parameters = arrays.arrays = 1;
  arrays.data = &array;
  expect_error(sluice_engine_get_values(engine(), 0, sluice_write_values_to_arrays, &arrays),
               SLUICE_INVALID_ARGUMENT, {"9 is no sluice_dtype"});
  arrays.size = 3;
  expect_error(sluice_engine_get_values(engine(), 0, sluice_write_values_to_arrays, &arrays),
               SLUICE_INVALID_ARGUMENT, {"SLUICE_INIT"});
  EXPECT_TRUE(values_of(engine()) == before);
}

TEST_F(MisuseTest, ResultsWithoutASize) {
  sluice_counters counters = {};
  expect_error(sluice_engine_counters(engine(), &counters), SLUICE_INVALID_ARGUMENT,
               {"'counters'", "SLUICE_INIT"});
  EXPECT_OK(sluice_engine_begin_step(engine(), nullptr));
  sluice_step_result result = {};
  expect_error(apply(engine(), 1.0, &result), SLUICE_INVALID_ARGUMENT, {"'result'", "SLUICE_INIT"});
  EXPECT_OK(apply(engine()));
}

TEST_F(MisuseTest, MoreUpdatesThanCanBeCounted) {
  ASSERT_OK(sluice_engine_set_updates(engine(), 0, 5));
  for (const uint64_t updates : {UINT64_MAX, UINT64_MAX - 1, (uint64_t{1} << 53) + 1})
    expect_error(sluice_engine_set_updates(engine(), 0, updates), SLUICE_INVALID_ARGUMENT,
                 {std::to_string(updates) + " updates", "at most"});
  uint64_t found = 0;
  ASSERT_OK(sluice_engine_updates(engine(), 0, &found));
  EXPECT_EQ(found, 5u);
  ASSERT_OK(sluice_engine_set_updates(engine(), 0, uint64_t{1} << 53));
}

TEST_F(MisuseTest, PointersThatAreMissing) {
  expect_error(sluice_engine_begin_step(nullptr, nullptr), SLUICE_INVALID_ARGUMENT, {"'engine'"});
  expect_error(sluice_model_create(nullptr), SLUICE_INVALID_ARGUMENT, {"'model'"});
  expect_error(sluice_engine_parameter(engine(), 0, nullptr), SLUICE_INVALID_ARGUMENT, {"'data'"});
  sluice_engine_destroy(nullptr);
  sluice_model_destroy(nullptr);
  sluice_text_destroy(nullptr);
}

TEST_F(MisuseTest, TheTextOfAnErrorIsTheThreadsOwn) {
  expect_error(sluice_engine_release(engine(), 0), SLUICE_STATE, {"'unit.0'"});
  const std::string here = sluice_last_error();
  std::thread([&] {
    EXPECT_STREQ(sluice_last_error(), "");
    EXPECT_EQ(sluice_engine_acquire(engine(), 9, SLUICE_READ), SLUICE_INVALID_ARGUMENT);
  }).join();
  EXPECT_EQ(sluice_last_error(), here);
}

TEST(PlanTest, HasBounds) {
  const ModelHandle model = make_model();
  char* json = nullptr;
  for (const uint32_t prefetch : {65u, UINT32_MAX}) {
    sluice_engine_options options = options_of({}, nullptr);
    options.prefetch = prefetch;
    expect_error(sluice_plan(model.get(), &options, &json), SLUICE_INVALID_ARGUMENT,
                 {"a prefetch depth of " + std::to_string(prefetch), "64"});
  }
  sluice_engine_options options = options_of({}, nullptr);
  options.micro_batches = 1'000'000'000;
  expect_error(sluice_plan(model.get(), &options, &json), SLUICE_INVALID_ARGUMENT,
               {"1000000000 micro-batches"});
  options.micro_batches = 1'000'000;
  EXPECT_OK(sluice_plan(model.get(), &options, &json));
  sluice_text_destroy(json);
}

TEST(PlanTest, SaysWhatIsShort) {
  using Options = sluice_engine_options;
  const sluice_folder missing = {"/no/such/folder", 0};
  const sluice_setting setting = {"beta1", 1, nullptr};
  const struct {
    sluice_status status;
    std::vector<std::string> parts;
    std::function<void(Options&)> change;
  } all[] = {{SLUICE_BUDGET, {"memory", "short"}, [](Options& o) { o.memory = 1 << 20, o.reserved = 0; }},
             {SLUICE_INVALID_ARGUMENT, {"options.memory"}, [](Options& o) { o.memory = 0; }},
             {SLUICE_INVALID_ARGUMENT, {"'first.bias'", "group 1"}, [](Options& o) { o.groups = 1; }},
             {SLUICE_NOT_FOUND, {missing.path}, [&](Options& o) { o.disk = &missing, o.disk_folders = 1; }},
             {SLUICE_INVALID_ARGUMENT, {"'elsewhere'"}, [](Options& o) { o.place_parameters = "elsewhere"; }},
             {SLUICE_BUDGET, {"reserved"}, [](Options& o) { o.reserved = UINT64_MAX; }},
             {SLUICE_BUDGET, {"traced"}, [](Options& o) { o.trace_events = uint64_t{1} << 62; }},
             {SLUICE_INVALID_ARGUMENT,
              {"adamw", "beta1 is 1"},
              [&](Options& o) { o.settings = &setting, o.setting_count = 1; }},
             {SLUICE_INVALID_ARGUMENT, {"'options.settings'"}, [](Options& o) { o.setting_count = 1; }}};
  const ModelHandle model = make_model();
  char* json = nullptr;
  Options options = options_of({}, nullptr);
  for (const auto& [status, parts, change] : all) {
    Options changed = options;
    change(changed);
    expect_error(sluice_plan(model.get(), &changed, &json), status, parts);
    EXPECT_EQ(json, nullptr);
  }
  EXPECT_OK(sluice_plan(model.get(), &options, &json));
  EXPECT_NE(std::string(json).find("peak"), std::string::npos);
  sluice_text_destroy(json);
}

TEST(ModelTest, RefusesWhatIsNoModel) {
  sluice_model* made = nullptr;
  ASSERT_OK(sluice_model_create(&made));
  const ModelHandle model(made, sluice_model_destroy);
  sluice_parameter parameter = SLUICE_INIT(sluice_parameter);
  parameter.name = "a";
  expect_error(sluice_model_add_parameter(made, &parameter, nullptr), SLUICE_INVALID_ARGUMENT,
               {"first unit"});
  ASSERT_OK(sluice_model_add_unit(made, "u", nullptr));
  EXPECT_OK(sluice_model_add_parameter(made, &parameter, nullptr));
  parameter.dtype = SLUICE_BF16;
  expect_error(sluice_model_add_parameter(made, &parameter, nullptr), SLUICE_INVALID_ARGUMENT,
               {"'a' is bf16", "'u'", "f32"});
  parameter.dtype = static_cast<sluice_dtype>(77);
  expect_error(sluice_model_add_parameter(made, &parameter, nullptr), SLUICE_INVALID_ARGUMENT,
               {"77 is no sluice_dtype"});
  parameter.dtype = SLUICE_F32;
  EXPECT_OK(sluice_model_add_parameter(made, &parameter, nullptr));
  const sluice_engine_options options = options_of({}, nullptr);
  sluice_engine* engine = nullptr;
  expect_error(sluice_engine_create(made, &options, &engine), SLUICE_INVALID_ARGUMENT, {"'a'"});
  EXPECT_EQ(engine, nullptr);

  ASSERT_OK(sluice_model_create(&made));
  const ModelHandle huge(made, sluice_model_destroy);
  const uint64_t shape[] = {uint64_t{1} << 30, uint64_t{1} << 32};
  parameter.shape = shape;
  parameter.dimensions = 2;
  ASSERT_OK(sluice_model_add_unit(made, "u", nullptr));
  ASSERT_OK(sluice_model_add_parameter(made, &parameter, nullptr));
  expect_error(sluice_engine_create(made, &options, &engine), SLUICE_INVALID_ARGUMENT, {"'a'", "elements"});
}

}  // namespace sluice_c_test::misuse_test
