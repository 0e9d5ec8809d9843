#include <algorithm>
#include <array>
#include <string>

#include "bindings/c/handles.h"
#include "bindings/c/status.h"
#include "core/json.h"

using sluice::ConstArray;
using sluice::Dtype;
using sluice::ErrorCode;
using sluice::fail;
using sluice::engine::Hold;
using namespace sluice::c;  // NOLINT: the whole file is of this room

namespace {

// An entry of `groups` has the size of the struct in the caller's version.
sluice::engine::GroupSettings group_of(const sluice_engine& e, const sluice_group_settings* groups,
                                       std::size_t index) {
  const auto* const group = reinterpret_cast<const sluice_group_settings*>(
      reinterpret_cast<const std::byte*>(groups) + index * groups->size);
  const sluice_group_settings given = known_part(group, "settings.groups");
  if (given.size != groups->size)
    fail(ErrorCode::kInvalidArgument,
         "the size of group {} of the settings is {}, and of the first {}; set each with SLUICE_INIT", index,
         given.size, groups->size);
  sluice::engine::GroupSettings settings = {given.learning_rate, given.weight_decay};
  if (given.setting_count == 0) return settings;
  settings.settings = e.planned.optimizer->for_step(
      sluice::c::settings_of(given.settings, given.setting_count, "settings.groups.settings"));
  return settings;
}

sluice::engine::StepSettings settings_of(const sluice_engine& e, const sluice_step_settings* settings) {
  const sluice_step_settings given = known_part(settings, "settings");
  sluice::engine::StepSettings step;
  step.clip = given.clip;
  step.clip_value = given.clip_value;
  if (given.gradient_factor != 0) step.gradient_factor = given.gradient_factor;
  step.keep_gradients = given.keep_gradients != 0;
  if (given.group_count != e.planned.groups)
    fail(ErrorCode::kInvalidArgument, "settings of {} groups are given, and the engine was made for {}",
         given.group_count, e.planned.groups);
  for (std::size_t i = 0; i < given.group_count; ++i)
    step.groups.push_back(group_of(e, &required(given.groups, "settings.groups"), i));
  return step;
}

void require_none(const sluice_step_settings* settings, const char* where) {
  if (settings != nullptr)
    fail(ErrorCode::kInvalidArgument, "settings are given here, and this engine takes them in {}; give NULL",
         where);
}

// An array that the engine reads or writes may be part of its own parameters only where these are present.
void require_present(const sluice_engine& e, const void* data, std::size_t bytes, bool write,
                     const char* name) {
  if (data == nullptr) fail(ErrorCode::kInvalidArgument, "'{}' is NULL", name);
  const auto* const begin = static_cast<const std::byte*>(data);
  for (const std::byte* at : {begin, begin + std::max<std::size_t>(bytes, 1) - 1}) {
    const auto unit = e.engine->unit_at(at);
    if (!unit) continue;
    const auto is_there = [&](Hold hold) {
      return write ? hold == Hold::kEdit : sluice::engine::with_parameters(hold);
    };
    if (std::ranges::none_of(e.engine->holds(*unit), is_there))
      fail(ErrorCode::kInvalidArgument,
           "'{}' lies in the memory of the parameters of unit '{}', which is not acquired{}; give a copy",
           name, e.planned.profile.units[*unit].name, write ? " for editing" : "");
  }
}

std::size_t bytes_of(const sluice_engine& e, std::uint32_t parameter, Dtype dtype) {
  return e.engine->layout().spec(parameter_of(e, parameter)).elements() * size_of(dtype);
}

static_assert(static_cast<int>(Hold::kRead) == SLUICE_READ &&
              static_cast<int>(Hold::kGradient) == SLUICE_GRADIENT &&
              static_cast<int>(Hold::kGradientOnly) == SLUICE_GRADIENT_ONLY &&
              static_cast<int>(Hold::kEdit) == SLUICE_EDIT);

}  // namespace

sluice_status sluice_engine_begin_step(sluice_engine* engine, const sluice_step_settings* settings) {
  return with_engine(engine, [&](sluice_engine& e) {
    if (e.planned.plan.clip) require_none(settings, "sluice_engine_step()");
    e.engine->begin_step(e.planned.plan.clip ? sluice::engine::StepSettings{} : settings_of(e, settings));
  });
}

sluice_status sluice_engine_acquire(sluice_engine* engine, uint32_t unit, sluice_access access) {
  return with_engine(engine, [&](sluice_engine& e) {
    if (access < SLUICE_READ || access > SLUICE_EDIT)
      fail(ErrorCode::kInvalidArgument, "{} is no sluice_access", static_cast<int>(access));
    sluice::allocator::install_touch_reporter();
    e.engine->acquire(unit_of(e, unit), static_cast<Hold>(access));
  });
}

sluice_status sluice_catch_touches() {
  return guarded([] { sluice::allocator::install_touch_reporter(); });
}

sluice_status sluice_engine_release(sluice_engine* engine, uint32_t unit) {
  return with_engine(engine, [&](sluice_engine& e) { e.engine->release(unit_of(e, unit)); });
}

sluice_status sluice_engine_held(const sluice_engine* engine, uint32_t unit, uint32_t* accesses,
                                 uint32_t* times) {
  return ask(engine, [&](const sluice_engine& e) {
    const std::vector<Hold> holds = e.engine->holds(unit_of(e, unit));
    uint32_t all = 0;
    for (const Hold hold : holds) all |= 1u << static_cast<unsigned>(hold);
    if (accesses != nullptr) *accesses = all;
    if (times != nullptr) *times = static_cast<uint32_t>(holds.size());
  });
}

sluice_status sluice_engine_held_units(const sluice_engine* engine, uint32_t* units, size_t capacity,
                                       size_t* count) {
  return ask(engine, [&](const sluice_engine& e) {
    const std::vector<sluice::engine::UnitId> all = e.engine->held_units();
    size_t& found = required(count, "count");
    if (capacity > 0) std::copy_n(all.begin(), std::min(capacity, all.size()), &required(units, "units"));
    found = all.size();
  });
}

sluice_status sluice_engine_parameter(sluice_engine* engine, uint32_t parameter, const void** data) {
  return with_engine(engine, [&](sluice_engine& e) {
    required(data, "data") = e.engine->parameter(parameter_of(e, parameter)).data;
  });
}

sluice_status sluice_engine_add_gradient(sluice_engine* engine, uint32_t parameter, const void* gradient,
                                         sluice_dtype dtype) {
  return with_engine(engine, [&](sluice_engine& e) {
    require_present(e, gradient, bytes_of(e, parameter, dtype_of(dtype)), false, "gradient");
    e.engine->add_gradient(parameter_of(e, parameter), {gradient, dtype_of(dtype)});
  });
}

sluice_status sluice_engine_get_gradient(sluice_engine* engine, uint32_t parameter, void* data,
                                         sluice_dtype dtype) {
  return with_engine(engine, [&](sluice_engine& e) {
    require_present(e, data, bytes_of(e, parameter, dtype_of(dtype)), true, "data");
    e.engine->read_gradient(parameter_of(e, parameter), {data, dtype_of(dtype)});
  });
}

sluice_status sluice_engine_has_gradient(const sluice_engine* engine, uint32_t parameter, uint32_t* has) {
  return ask(engine, [&](const sluice_engine& e) {
    required(has, "has") = e.engine->has_gradient(parameter_of(e, parameter)) ? 1 : 0;
  });
}

sluice_status sluice_engine_gradient_norms(sluice_engine* engine, const uint32_t* parameters, size_t count,
                                           double* norms) {
  return with_engine(engine, [&](sluice_engine& e) {
    const std::vector<sluice::engine::ParameterId> all = parameters_of(e, parameters, count);
    if (count > 0) (void)required(norms, "norms");
    for (size_t i = 0; i < count; ++i) norms[i] = e.engine->gradient_norm(all[i]);
  });
}

sluice_status sluice_engine_multiply_gradients(sluice_engine* engine, const uint32_t* parameters,
                                               size_t count, double factor) {
  return with_engine(engine, [&](sluice_engine& e) {
    for (const sluice::engine::ParameterId parameter : parameters_of(e, parameters, count))
      e.engine->multiply_gradient(parameter, factor);
  });
}

sluice_status sluice_engine_drop_gradients(sluice_engine* engine, const uint32_t* parameters, size_t count) {
  return with_engine(engine, [&](sluice_engine& e) {
    for (const sluice::engine::ParameterId parameter : parameters_of(e, parameters, count))
      e.engine->drop_gradient(parameter);
  });
}

sluice_status sluice_engine_end_gradients(sluice_engine* engine, uint32_t unit) {
  return with_engine(engine, [&](sluice_engine& e) { e.engine->end_gradients(unit_of(e, unit)); });
}

sluice_status sluice_engine_end_micro_batch(sluice_engine* engine) {
  return with_engine(engine, [](sluice_engine& e) { e.engine->end_micro_batch(); });
}

sluice_status sluice_engine_set_micro_batch(sluice_engine* engine, uint32_t number) {
  return with_engine(engine, [&](sluice_engine& e) { e.engine->set_micro_batch(number); });
}

sluice_status sluice_engine_abandon_step(sluice_engine* engine) {
  return with_engine(engine, [](sluice_engine& e) { e.engine->abandon_step(); });
}

sluice_status sluice_engine_step(sluice_engine* engine, const sluice_step_settings* settings,
                                 sluice_step_result* result) {
  return with_engine(engine, [&](sluice_engine& e) {
    const Result given(result, "result");
    if (!e.planned.plan.clip) require_none(settings, "sluice_engine_begin_step()");
    const sluice::engine::StepResult done =
        e.engine->step(e.planned.plan.clip ? settings_of(e, settings) : sluice::engine::StepSettings{});
    given.give({0, done.gradient_norm, done.clip_factor});
  });
}

sluice_status sluice_engine_settle(sluice_engine* engine) {
  return with_engine(engine, [](sluice_engine& e) { e.engine->settle(); });
}

sluice_status sluice_engine_steps(const sluice_engine* engine, uint64_t* steps) {
  return ask(engine, [&](const sluice_engine& e) { required(steps, "steps") = e.engine->steps(); });
}

sluice_status sluice_engine_in_step(const sluice_engine* engine, uint32_t* in_step) {
  return ask(engine,
             [&](const sluice_engine& e) { required(in_step, "in_step") = e.engine->in_step() ? 1 : 0; });
}

sluice_status sluice_engine_failure(const sluice_engine* engine, char** text) {
  return ask(engine, [&](const sluice_engine& e) {
    char*& out = required(text, "text");
    out = e.engine->failure().empty() ? nullptr : new_text(e.engine->failure());
  });
}

namespace {

// The names of ledger lines are string literals.
void add_lines(const sluice::allocator::Ledger::Snapshot& snapshot, bool on_gpu,
               std::vector<sluice_ledger_line>& lines) {
  using namespace sluice::allocator;  // NOLINT: a few names
  for (const Tier of : {Tier::kDevice, Tier::kHost, Tier::kDisk}) {
    if (of == Tier::kDevice && !on_gpu) continue;
    const auto t = static_cast<std::size_t>(of);
    const char* tier = name_of(of).data();
    for (std::size_t p = 0; p < kPurposes; ++p)
      lines.push_back({tier, name_of(static_cast<Purpose>(p)).data(), snapshot.lines[t][p].current,
                       snapshot.lines[t][p].peak});
    lines.push_back({tier, "total", snapshot.total[t].current, snapshot.total[t].peak});
  }
}

}  // namespace

sluice_status sluice_engine_ledger(const sluice_engine* engine, sluice_ledger_line* lines, size_t capacity,
                                   size_t* count) {
  return guarded([&] {
    std::vector<sluice_ledger_line> all;
    const sluice_engine& e = required(engine, "engine");
    add_lines(e.ledger.snapshot(), e.device != nullptr, all);
    size_t& found = required(count, "count");
    if (capacity > 0) std::copy_n(all.begin(), std::min(capacity, all.size()), &required(lines, "lines"));
    found = all.size();
  });
}

sluice_status sluice_engine_counters(const sluice_engine* engine, sluice_counters* counters) {
  return ask(engine, [&](const sluice_engine& e) {
    const Result given(&required(counters, "counters"), "counters");
    const auto counted = e.engine->counters();
    given.give({0, counted.read_wait_seconds + counted.write_wait_seconds, counted.optimizer_seconds,
                e.touches ? e.touches->served() : 0});
  });
}

sluice_status sluice_engine_add_event(sluice_engine* engine, const char* lane, const char* name,
                                      uint64_t begin, uint64_t end, uint64_t bytes) {
  return guarded([&] {
    using sluice::Trace;
    const sluice_engine& e = required(engine, "engine");
    const std::string given = &required(lane, "lane"), named = &required(name, "name");
    if (begin > end) fail(ErrorCode::kInvalidArgument, "an event begins at {} and ends at {}", begin, end);
    try {
      (void)sluice::Json(named).dump();
    } catch (const sluice::Json::exception&) {
      fail(ErrorCode::kInvalidArgument, "the name of an event is no UTF-8");
    }
    const auto at = [](uint64_t time) { return Trace::Clock::time_point(std::chrono::nanoseconds(time)); };
    for (const Trace::Lane known : {Trace::Lane::kCompute, Trace::Lane::kRankWait, Trace::Lane::kMessage})
      if (given == Trace::name_of(known)) {
        if (e.trace) e.trace->add(known, named, at(begin), at(end), bytes);
        return;
      }
    fail(ErrorCode::kInvalidArgument, "the lane is '{}'; it is compute, rank wait or message", given);
  });
}

sluice_status sluice_engine_save_trace(const sluice_engine* engine, const char* path) {
  return guarded([&] {
    const sluice_engine& e = required(engine, "engine");
    if (!e.trace) fail(ErrorCode::kState, "the engine keeps no trace; state options.trace_events");
    e.trace->save(&required(path, "path"));
  });
}
