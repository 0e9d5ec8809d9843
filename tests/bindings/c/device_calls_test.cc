#include <regex>

#include "tests/bindings/c/fake_gpu.h"
#include "tests/source_folder.h"

// Each call of the C ABI on an engine, while its caller captures the stream on which it computes.
namespace sluice_c_test::device_calls_test {

class DeviceCallsTest : public FakeGpuEngineTest {
 protected:
  sluice_status while_captured(const std::function<sluice_status()>& call) {
    fake().capture_default(true);
    const sluice_status status = call();
    fake().capture_default(false);  // a misuse where something has ended it
    EXPECT_EQ(fake().take_misuses(), std::vector<std::string>{});
    return status;
  }
  // The functions that take an engine, but for those that make and end it.
  static std::set<std::string> all_calls() {
    std::set<std::string> names;
    for (const char* header : {"sluice.h", "sluice_arrays.h", "sluice_device.h", "sluice_files.h",
                               "sluice_pipeline.h", "sluice_ranks.h"}) {
      std::ifstream file(std::string(sluice::test::kSourceFolder) + "/bindings/c/" + header);
      const std::string text(std::istreambuf_iterator<char>(file), {});
      const std::regex call("SLUICE_API sluice_status sluice_engine_(\\w+)\\((const )?sluice_engine\\* ");
      for (std::sregex_iterator at(text.begin(), text.end(), call), end; at != end; ++at)
        names.insert((*at)[1].str());
    }
    return names;
  }
};

// A file of tensors for all parameters.
void write_zeros(const std::string& path) {
  std::string header, data;
  for (const Parameter& parameter : parameters()) {
    std::string shape;
    for (const uint64_t d : parameter.shape) shape += (shape.empty() ? "" : ",") + std::to_string(d);
    const std::string begin = std::to_string(data.size());
    data.append(parameter.elements() * sizeof(float), '\0');
    header += std::string(header.empty() ? "{" : ",") + "\"" + parameter.name +
              "\":{\"dtype\":\"F32\",\"shape\":[" + shape + "],\"data_offsets\":[" + begin + "," +
              std::to_string(data.size()) + "]}";
  }
  header += "}";
  const uint64_t length = header.size();
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(&length), sizeof length);
  file << header << data;
}

TEST_F(DeviceCallsTest, EachIsRefusedOrHarmlessWhileTheCallerCaptures) {
  fake().begin({.schedule = fake_cuda::Schedule::kLate, .shares_memory = true});
  const EngineHandle made = make_engine(
      {.place = "memory", .trace_events = 16, .device_memory = uint64_t{128} << 20}, folder_.path());
  sluice_engine* const engine = made.get();
  set_start_values(engine);
  train(engine, SLUICE_F32, 1);
  const std::string saved = folder_.path("saved"), values = folder_.path("values");
  write_zeros(values);
  ASSERT_OK(sluice_engine_save(engine, saved.c_str(), 0, nullptr));
  ASSERT_OK(sluice_engine_begin_step(engine, nullptr));
  add_unit_gradients(engine, 0, SLUICE_F32, 0.5f);
  ASSERT_OK(sluice_engine_acquire(engine, 1, SLUICE_GRADIENT));

  std::vector<float> room(parameters()[0].elements());
  uint32_t number = 0;
  uint64_t count = 0;
  size_t size = 0;
  double norm = 0;
  char* text = nullptr;
  const void* data = nullptr;
  sluice_home* homes[kUnits] = {};
  sluice_counters counters = SLUICE_INIT(sluice_counters);
  const auto read = [](void*, uint32_t, uint64_t, float*, uint64_t) { return 1; };
  const auto write = [](void*, uint32_t, uint64_t, const float*, uint64_t) { return 1; };
  const auto read_state = [](void*, uint32_t, uint32_t, uint64_t, float*, uint64_t) { return 1; };
  const auto write_state = [](void*, uint32_t, uint32_t, uint64_t, const float*, uint64_t) { return 1; };
  const auto freed = [&](sluice_status status) {
    sluice_text_destroy(text);
    text = nullptr;
    return status;
  };
  using Calls = std::map<std::string, std::function<sluice_status()>>;
  const Calls harmless = {
      {"add_event", [&] { return sluice_engine_add_event(engine, "compute", "a pass", 0, 1, 0); }},
      {"checkpoint_file",
       [&] { return freed(sluice_engine_checkpoint_file(engine, saved.c_str(), "none", &text)); }},
      {"counters", [&] { return sluice_engine_counters(engine, &counters); }},
      {"device", [&] { return freed(sluice_engine_device(engine, &text)); }},
      {"failure", [&] { return freed(sluice_engine_failure(engine, &text)); }},
      {"find_checkpoint", [&] { return freed(sluice_engine_find_checkpoint(engine, saved.c_str(), &text)); }},
      {"has_gradient", [&] { return sluice_engine_has_gradient(engine, 0, &number); }},
      {"held", [&] { return sluice_engine_held(engine, 0, nullptr, nullptr); }},
      {"held_units", [&] { return sluice_engine_held_units(engine, nullptr, 0, &size); }},
      {"in_step", [&] { return sluice_engine_in_step(engine, &number); }},
      {"ledger", [&] { return sluice_engine_ledger(engine, nullptr, 0, &size); }},
      {"multiply_gradients", [&] { return multiply_gradient(engine, 0, 1); }},
      {"parameter", [&] { return sluice_engine_parameter(engine, 0, &data); }},
      {"plan", [&] { return freed(sluice_engine_plan(engine, &text)); }},
      {"predict", [&] { return freed(sluice_engine_predict(engine, 1, &text)); }},
      {"save_trace", [&] { return sluice_engine_save_trace(engine, folder_.path("trace").c_str()); }},
      {"set_updates", [&] { return sluice_engine_set_updates(engine, 0, 1); }},
      {"state_arrays", [&] { return freed(sluice_engine_state_arrays(engine, &text)); }},
      {"steps", [&] { return sluice_engine_steps(engine, &count); }},
      {"updates", [&] { return sluice_engine_updates(engine, 0, &count); }},
  };
  const Calls in_a_step = {
      {"abandon_step", [&] { return sluice_engine_abandon_step(engine); }},
      {"acquire", [&] { return sluice_engine_acquire(engine, 1, SLUICE_READ); }},
      {"add_gradient", [&] { return sluice_engine_add_gradient(engine, 2, room.data(), SLUICE_F32); }},
      {"drop_gradients", [&] { return drop_gradient(engine, 0); }},
      {"get_gradient", [&] { return sluice_engine_get_gradient(engine, 0, room.data(), SLUICE_F32); }},
      {"gradient_norms", [&] { return norm_of_gradient(engine, 0, &norm); }},
      {"release", [&] { return sluice_engine_release(engine, 1); }},
      {"use_stream", [&] { return sluice_engine_use_stream(engine, nullptr); }},
  };
  const Calls outside_of_a_step = {
      {"get_state", [&] { return sluice_engine_get_state(engine, 0, write_state, nullptr); }},
      {"get_values", [&] { return sluice_engine_get_values(engine, 0, write, nullptr); }},
      {"load", [&] { return sluice_engine_load(engine, saved.c_str()); }},
      {"load_values", [&] { return sluice_engine_load_values(engine, values.c_str()); }},
      {"save", [&] { return sluice_engine_save(engine, saved.c_str(), 0, nullptr); }},
      {"save_with_files",
       [&] { return sluice_engine_save_with_files(engine, saved.c_str(), 0, nullptr, 0, nullptr); }},
      {"set_state", [&] { return sluice_engine_set_state(engine, 0, read_state, nullptr); }},
      {"set_values", [&] { return sluice_engine_set_values(engine, 0, read, nullptr); }},
      {"settle", [&] { return sluice_engine_settle(engine); }},
  };
  // A GPU, or an engine without ranks, refuses these calls in any case.
  const Calls never = {
      {"end_gradients", [&] { return sluice_engine_end_gradients(engine, 0); }},
      {"end_micro_batch", [&] { return sluice_engine_end_micro_batch(engine); }},
      {"set_micro_batch", [&] { return sluice_engine_set_micro_batch(engine, 0); }},
      {"get_state_alone", [&] { return sluice_engine_get_state_alone(engine, 0, write_state, nullptr); }},
      {"state_is_taken", [&] { return sluice_engine_state_is_taken(engine, nullptr); }},
      {"leave", [&] { return sluice_engine_leave(engine, 1, 0, homes); }},
      {"replan", [&] { return sluice_engine_replan(engine, 0); }},
  };
  std::set<std::string> called;
  const auto call_all = [&](const Calls& calls, sluice_status expected, const char* why) {
    for (const auto& [name, call] : calls) {
      SCOPED_TRACE(name);
      called.insert(name);
      const sluice_status status = while_captured(call);
      if (expected == SLUICE_OK) {
        EXPECT_OK(status);
      } else {
        expect_error(status, expected, {why});
      }
    }
  };
  call_all(harmless, SLUICE_OK, "");
  call_all(in_a_step, SLUICE_STATE, "captured into a graph");
  ASSERT_OK(sluice_engine_release(engine, 1));
  call_all({{"step", [&] { return apply(engine); }}}, SLUICE_STATE, "captured into a graph");
  ASSERT_OK(apply(engine));
  call_all(outside_of_a_step, SLUICE_STATE, "captured into a graph");
  call_all({{"begin_step", [&] { return sluice_engine_begin_step(engine, nullptr); }}}, SLUICE_OK, "");
  ASSERT_OK(sluice_engine_abandon_step(engine));
  call_all(never, SLUICE_STATE, "");
  EXPECT_EQ(called, all_calls());
}

}  // namespace sluice_c_test::device_calls_test
