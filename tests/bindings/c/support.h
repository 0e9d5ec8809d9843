#pragma once
#include <unistd.h>

#include "bindings/c/sluice.h"
#include "tests/temporary_folder.h"
#include "tests/testing.h"

// A caller of the C ABI: a model of three units whose gradients depend on its values, so that a wrong byte
// shows in all that follows.
namespace sluice_c_test {

#define EXPECT_OK(call) EXPECT_EQ(call, SLUICE_OK) << sluice_last_error()
#define ASSERT_OK(call) ASSERT_EQ(call, SLUICE_OK) << sluice_last_error()

inline void expect_error(sluice_status found, sluice_status wanted, const std::vector<std::string>& parts) {
  EXPECT_EQ(found, wanted) << sluice_last_error();
  for (const std::string& part : parts)
    EXPECT_NE(std::string(sluice_last_error()).find(part), std::string::npos)
        << "'" << part << "' is not in: " << sluice_last_error();
}

inline sluice_status norm_of_gradient(sluice_engine* engine, uint32_t parameter, double* norm) {
  return sluice_engine_gradient_norms(engine, &parameter, 1, norm);
}
inline sluice_status multiply_gradient(sluice_engine* engine, uint32_t parameter, double factor) {
  return sluice_engine_multiply_gradients(engine, &parameter, 1, factor);
}
inline sluice_status drop_gradient(sluice_engine* engine, uint32_t parameter) {
  return sluice_engine_drop_gradients(engine, &parameter, 1);
}

using Folder = sluice::TemporaryFolder;

struct Parameter {
  const char* name;
  std::vector<uint64_t> shape;
  uint32_t unit, group;
  uint64_t elements() const {
    uint64_t n = 1;
    for (const uint64_t d : shape) n *= d;
    return n;
  }
};

inline const std::vector<Parameter>& parameters() {
  static const std::vector<Parameter> all = {{"first.weight", {300, 1000}, 0, 0},
                                             {"first.bias", {1000}, 0, 1},
                                             {"middle.weight", {700, 1000}, 1, 0},
                                             {"scale", {}, 1, 1},
                                             {"last.weight", {600, 1000}, 2, 0}};
  return all;
}
inline constexpr uint32_t kUnits = 3;

// The tier and the type of everything.
struct Case {
  const char* place;
  sluice_dtype dtype;
  friend void PrintTo(const Case& c, std::ostream* out) { *out << c.place << " " << c.dtype; }
};
inline constexpr Case kCases[] = {{"memory", SLUICE_F32}, {"disk", SLUICE_BF16}, {"disk", SLUICE_F16}};

inline std::string case_name(const ::testing::TestParamInfo<Case>& info) {
  constexpr const char* kNames[] = {"_f32", "_bf16", "_f16"};
  return std::string(info.param.place) + kNames[info.param.dtype];
}

using ModelHandle = std::unique_ptr<sluice_model, decltype(&sluice_model_destroy)>;
using EngineHandle = std::unique_ptr<sluice_engine, decltype(&sluice_engine_destroy)>;

// Bit u of `frozen` is set where unit u is frozen.
inline ModelHandle make_model(uint32_t frozen = 0, sluice_dtype dtype = SLUICE_F32) {
  sluice_model* model = nullptr;
  EXPECT_OK(sluice_model_create(&model));
  uint32_t unit = 0, id = 0;
  for (uint32_t u = 0; u < kUnits; ++u) {
    EXPECT_OK(sluice_model_add_unit(model, ("unit." + std::to_string(u)).c_str(), &unit));
    EXPECT_EQ(unit, u);
    for (std::size_t p = 0; p < parameters().size(); ++p) {
      if (parameters()[p].unit != u) continue;
      sluice_parameter given = SLUICE_INIT(sluice_parameter);
      given.name = parameters()[p].name;
      given.shape = parameters()[p].shape.data();
      given.dimensions = parameters()[p].shape.size();
      given.group = parameters()[p].group;
      given.frozen = frozen >> u & 1;
      given.dtype = dtype;
      EXPECT_OK(sluice_model_add_parameter(model, &given, &id));
      EXPECT_EQ(id, p);
    }
  }
  return {model, sluice_model_destroy};
}

// A model of units "unit.0", "unit.1" ... of one parameter each, as describe() says. One that has no name is
// called as its unit.
inline ModelHandle model_of(uint32_t units,
                            const std::function<void(uint32_t, sluice_parameter&)>& describe) {
  sluice_model* model = nullptr;
  EXPECT_OK(sluice_model_create(&model));
  for (uint32_t u = 0; u < units; ++u) {
    const std::string name = "unit." + std::to_string(u);
    sluice_parameter given = SLUICE_INIT(sluice_parameter);
    given.name = name.c_str();
    describe(u, given);
    EXPECT_OK(sluice_model_add_unit(model, name.c_str(), nullptr));
    EXPECT_OK(sluice_model_add_parameter(model, &given, nullptr));
  }
  return {model, sluice_model_destroy};
}

struct Choice {
  const char* place = nullptr;  // the tier of everything
  sluice_dtype dtype = SLUICE_F32;
  uint32_t held = 1, threads = 2;
  uint64_t memory = uint64_t{1} << 30, trace_events = 0;
  uint32_t frozen = 0;  // as in make_model()
  const char* optimizer = nullptr;
  bool at_once = false;  // whether updates come in backward
  bool no_master = false;
  sluice_state_type state = SLUICE_STATE_F32;
  sluice_team team = nullptr;
  uint64_t device_memory = 0;     // of a GPU
  const char* updates = nullptr;  // what updates then
};

// Tests state these facts of the fake GPU: measuring would take a second for each engine, and plans would
// depend on the machine.
inline const sluice_device_facts& facts() {
  static const sluice_device_facts stated = [] {
    sluice_device_facts facts = SLUICE_INIT(sluice_device_facts);
    facts.to_gpu = facts.from_gpu = facts.cpu_memory = 20e9;
    facts.both_ways = 30e9;
    facts.gpu_updates = 0x1p34;
    return facts;
  }();
  return stated;
}

inline sluice_engine_options options_of(const Choice& setup, const sluice_folder* folder) {
  sluice_engine_options options = SLUICE_INIT(sluice_engine_options);
  options.memory = setup.memory;
  options.reserved = 64u << 20;
  options.disk = folder;
  options.disk_folders = folder == nullptr ? 0 : 1;
  options.threads = setup.threads;
  options.held_units = setup.held;
  options.groups = 2;
  options.optimizer = setup.optimizer;
  options.update_in_backward = setup.at_once ? 1 : 0;
  options.no_master = setup.no_master ? 1 : 0;
  options.state = setup.state;
  options.trace_events = setup.trace_events;
  options.team = setup.team;
  options.device_memory = setup.device_memory;
  options.updates = setup.updates;
  if (setup.device_memory > 0) options.device_facts = &facts();
  options.place_parameters = options.place_gradients = options.place_state = setup.place;
  return options;
}

inline float start_value(uint32_t parameter, uint64_t i) {
  return static_cast<float>((i * 2654435761u + parameter * 40503u) % 1000003u) / 1000003.0f - 0.5f;
}
inline int start_values(void*, uint32_t parameter, uint64_t first, float* values, uint64_t elements) {
  for (uint64_t i = 0; i < elements; ++i) values[i] = start_value(parameter, first + i);
  return 0;
}

inline EngineHandle engine_of(const sluice_model* model, const sluice_engine_options& options) {
  sluice_engine* engine = nullptr;
  EXPECT_OK(sluice_engine_create(model, &options, &engine));
  return {engine, sluice_engine_destroy};
}
inline EngineHandle make_engine(const Choice& setup, const std::string& disk,
                                const std::function<void(sluice_engine_options&)>& change = {}) {
  const ModelHandle model = make_model(setup.frozen, setup.dtype);
  const sluice_folder folder = {disk.c_str(), 0};
  sluice_engine_options options = options_of(setup, disk.empty() ? nullptr : &folder);
  if (change) change(options);
  return engine_of(model.get(), options);
}

// A text of the library's, which this destroys.
inline std::string taken(char* text) {
  const std::string copy = text == nullptr ? "" : text;
  sluice_text_destroy(text);
  return copy;
}

inline void set_start_values(sluice_engine* engine) {
  for (uint32_t unit = 0; unit < kUnits; ++unit)
    ASSERT_OK(sluice_engine_set_values(engine, unit, start_values, nullptr));
}

inline float widen(const void* values, sluice_dtype dtype, uint64_t i) {
  if (dtype == SLUICE_F32) return static_cast<const float*>(values)[i];
  if (dtype == SLUICE_F16) return static_cast<float>(static_cast<const _Float16*>(values)[i]);
  const uint32_t bits = static_cast<uint32_t>(static_cast<const uint16_t*>(values)[i]) << 16;
  float value = 0;
  std::memcpy(&value, &bits, 4);
  return value;
}

// Returns a gradient that depends on the parameter's value.
inline std::vector<float> gradient_of(sluice_engine* engine, uint32_t parameter, sluice_dtype dtype,
                                      float pull) {
  const void* data = nullptr;
  EXPECT_OK(sluice_engine_parameter(engine, parameter, &data));
  std::vector<float> gradient(parameters()[parameter].elements());
  for (uint64_t i = 0; i < gradient.size(); ++i) gradient[i] = 0.1f * widen(data, dtype, i) + pull;
  return gradient;
}

inline void add_unit_gradients(sluice_engine* engine, uint32_t unit, sluice_dtype dtype, float pull) {
  EXPECT_OK(sluice_engine_acquire(engine, unit, SLUICE_GRADIENT));
  for (uint32_t p = 0; p < parameters().size(); ++p) {
    if (parameters()[p].unit != unit) continue;
    const std::vector<float> gradient = gradient_of(engine, p, dtype, pull);
    EXPECT_OK(sluice_engine_add_gradient(engine, p, gradient.data(), SLUICE_F32));
  }
  EXPECT_OK(sluice_engine_release(engine, unit));
}

inline std::array<sluice_group_settings, 2> two_groups(const std::vector<sluice_setting>& settings = {}) {
  return {{{sizeof(sluice_group_settings), 0.01, 0.1, settings.data(), settings.size()},
           {sizeof(sluice_group_settings), 0.02, 0, settings.data(), settings.size()}}};
}

// The settings of a step of both groups.
struct StepSettings {
  std::array<sluice_group_settings, 2> groups = two_groups();
  sluice_step_settings settings = SLUICE_INIT(sluice_step_settings);
  StepSettings() {
    settings.groups = groups.data();
    settings.group_count = groups.size();
  }
  StepSettings(const StepSettings&) = delete;  // `settings` points to the groups
  StepSettings& operator=(const StepSettings&) = delete;
};

inline sluice_status apply(sluice_engine* engine, double clip = 1.0, sluice_step_result* result = nullptr,
                           bool keep_gradients = false) {
  StepSettings given;
  given.settings.clip = clip;
  given.settings.keep_gradients = keep_gradients ? 1 : 0;
  return sluice_engine_step(engine, &given.settings, result);
}

// Runs the units forward and backward with gradients; `skip` gets none.
inline void train(sluice_engine* engine, sluice_dtype dtype, int steps, int skip = -1) {
  for (int step = 0; step < steps; ++step) {
    ASSERT_OK(sluice_engine_begin_step(engine, nullptr));
    for (uint32_t unit = 0; unit < kUnits; ++unit) {
      ASSERT_OK(sluice_engine_acquire(engine, unit, SLUICE_READ));
      ASSERT_OK(sluice_engine_release(engine, unit));
    }
    for (uint32_t unit = kUnits; unit-- > 0;)
      if (static_cast<int>(unit) != skip)
        add_unit_gradients(engine, unit, dtype, 0.01f * static_cast<float>(unit));
    ASSERT_OK(apply(engine));
  }
}

using Values = std::vector<std::vector<float>>;
inline int collect(void* context, uint32_t parameter, uint64_t first, const float* values,
                   uint64_t elements) {
  auto& into = (*static_cast<Values*>(context))[parameter];
  if (into.size() != first) return 1;
  into.insert(into.end(), values, values + elements);
  return 0;
}
using State = std::map<std::pair<uint32_t, uint32_t>, std::vector<float>>;  // by parameter and array
inline int collect_state(void* context, uint32_t parameter, uint32_t array, uint64_t first,
                         const float* values, uint64_t elements) {
  auto& into = (*static_cast<State*>(context))[{parameter, array}];
  if (into.size() != first) return 1;
  into.insert(into.end(), values, values + elements);
  return 0;
}
inline Values values_of(sluice_engine* engine) {
  Values values(parameters().size());
  for (uint32_t unit = 0; unit < kUnits; ++unit)
    EXPECT_OK(sluice_engine_get_values(engine, unit, collect, &values));
  return values;
}

}  // namespace sluice_c_test
