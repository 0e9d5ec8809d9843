#include <mutex>

#include "bindings/c/handles.h"
#include "bindings/c/status.h"
#include "core/json.h"
#include "kernels/elementwise.h"

namespace sluice::c {
namespace {

using engine::ParameterId;

bool has_master(const sluice_engine& e, engine::UnitId unit) {
  return e.planned.optimizer->keeps_master() && e.engine->layout().dtype(unit) != Dtype::kF32;
}

// Returns 1 where any unit has masters, which are then array 0.
uint32_t masters_of(const sluice_engine& e) {
  for (engine::UnitId unit = 0; unit < e.engine->layout().units().size(); ++unit)
    if (e.engine->layout().trainable(unit) && has_master(e, unit)) return 1;
  return 0;
}

// Returns the index of the first array of a parameter as a whole.
uint32_t first_whole(const sluice_engine& e) {
  return masters_of(e) + static_cast<uint32_t>(e.planned.optimizer->state().size());
}

engine::UnitId trainable_unit(const sluice_engine& e, uint32_t unit) {
  if (!e.engine->layout().trainable(unit_of(e, unit)))
    fail(ErrorCode::kInvalidArgument, "unit '{}' is frozen, and has no state",
         e.planned.profile.units[unit].name);
  return unit;
}

// Passes state to the caller's function in f32, some elements at a time, and never from two threads at once.
class StateReader {
 public:
  StateReader(sluice_engine& engine, sluice_write_state function, void* context)
      : engine_(engine), function_(function), context_(context) {}

  // map and scales are only for codes.
  void operator()(ParameterId parameter, uint32_t array, std::size_t first, std::size_t count,
                  ConstArray values, optim::CodeMap map = {}, const float* scales = nullptr) {
    const std::lock_guard lock(mutex_);
    for (std::size_t at = 0; at < count; at += kAtOnce) {
      const std::size_t n = std::min(count - at, kAtOnce);
      const float* wide = values.f32() + at;  // read where the values are f32
      if (values.type == Dtype::kU8) {
        const auto* const codes = static_cast<const std::uint8_t*>(values.data) + at;
        optim::decode(n, map, codes, scales + at / optim::kScaleBlock, wide_.data());
        wide = wide_.data();
      } else if (values.type != Dtype::kF32) {
        kernels::convert(one_, n, values.at(at), {wide_.data(), Dtype::kF32});
        wide = wide_.data();
      }
      call_back(engine_, function_, context_, parameter, array, first + at, wide, n);
    }
  }

 private:
  static constexpr std::size_t kAtOnce = 64 * optim::kScaleBlock;
  sluice_engine& engine_;
  sluice_write_state function_;
  void* context_;
  std::mutex mutex_;
  Threads one_{1};
  std::array<float, kAtOnce> wide_;
};

enum class By : std::uint8_t { kAllRanks, kRank0 };

sluice_status get_state(sluice_engine* handle, uint32_t unit, sluice_write_state state, void* context,
                        By by) {
  return with_engine(handle, [&](sluice_engine& e) {
    if (state == nullptr) fail(ErrorCode::kInvalidArgument, "'state' is NULL");
    if (by == By::kRank0 && e.device != nullptr)
      fail(ErrorCode::kState, "a GPU computes, so that all ranks call sluice_engine_get_state()");
    StateReader reader(e, state, context);
    engine::UnitSink sink;
    sink.master = [&](ParameterId p, std::size_t first, std::span<const float> values) {
      reader(p, 0, first, values.size(), {values.data(), Dtype::kF32});
    };
    sink.state = [&](ParameterId p, std::size_t array, std::size_t first, std::size_t count,
                     ConstArray values, const float* scales) {
      const optim::CodeMap map = e.planned.optimizer->state()[array].map;
      reader(p, masters_of(e) + static_cast<uint32_t>(array), first, count, values, map, scales);
    };
    sink.whole = [&](ParameterId p, std::size_t array, std::span<const float> values) {
      reader(p, first_whole(e) + static_cast<uint32_t>(array), 0, values.size(),
             {values.data(), Dtype::kF32});
    };
    if (by == By::kRank0)
      e.engine->save_alone(trainable_unit(e, unit), sink);
    else
      e.engine->save(trainable_unit(e, unit), sink);
  });
}

}  // namespace
}  // namespace sluice::c

using namespace sluice::c;  // NOLINT: what follows is of this room
namespace engine = sluice::engine;

sluice_status sluice_engine_state_arrays(const sluice_engine* handle, char** json) {
  return ask(handle, [&](const sluice_engine& e) {
    sluice::Json names = sluice::Json::array();
    if (masters_of(e) > 0) names.push_back("master");
    for (const auto& array : e.planned.optimizer->state()) names.push_back(array.name);
    for (const auto& name : e.planned.optimizer->whole_names()) names.push_back(name);
    required(json, "json") = new_text(names.dump());
  });
}

sluice_status sluice_engine_get_state(sluice_engine* handle, uint32_t unit, sluice_write_state state,
                                      void* context) {
  return get_state(handle, unit, state, context, By::kAllRanks);
}

sluice_status sluice_engine_get_state_alone(sluice_engine* handle, uint32_t unit, sluice_write_state state,
                                            void* context) {
  return get_state(handle, unit, state, context, By::kRank0);
}

sluice_status sluice_engine_state_is_taken(sluice_engine* handle, const char* error) {
  return with_engine(handle, [&](sluice_engine& e) {
    if (e.device != nullptr)
      sluice::fail(sluice::ErrorCode::kState,
                   "a GPU computes, so that all ranks call sluice_engine_get_state()");
    e.engine->state_is_taken(error == nullptr ? "" : error);
  });
}

sluice_status sluice_engine_set_state(sluice_engine* handle, uint32_t unit, sluice_read_state state,
                                      void* context) {
  return with_engine(handle, [&](sluice_engine& e) {
    if (state == nullptr) sluice::fail(sluice::ErrorCode::kInvalidArgument, "'state' is NULL");
    engine::UnitSource source;
    if (has_master(e, unit_of(e, unit)))
      source.values = [&](engine::ParameterId p, std::size_t first, std::span<float> out) {
        call_back(e, state, context, p, 0, first, out.data(), out.size());
      };
    source.state = [&](engine::ParameterId p, std::size_t array, std::size_t first, std::span<float> out) {
      const uint32_t number = masters_of(e) + static_cast<uint32_t>(array);
      call_back(e, state, context, p, number, first, out.data(), out.size());
    };
    source.whole = [&](engine::ParameterId p, std::size_t array, std::span<float> out) {
      const uint32_t number = first_whole(e) + static_cast<uint32_t>(array);
      call_back(e, state, context, p, number, 0, out.data(), out.size());
    };
    e.engine->load(trainable_unit(e, unit), source);
  });
}

sluice_status sluice_engine_updates(const sluice_engine* handle, uint32_t parameter, uint64_t* updates) {
  return ask(handle, [&](const sluice_engine& e) {
    required(updates, "updates") = e.engine->steps(parameter_of(e, parameter));
  });
}

sluice_status sluice_engine_set_updates(sluice_engine* handle, uint32_t parameter, uint64_t updates) {
  return with_engine(handle,
                     [&](sluice_engine& e) { e.engine->set_steps(parameter_of(e, parameter), updates); });
}
