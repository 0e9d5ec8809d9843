#pragma once
#include <unistd.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "allocator/memory.h"
#include "bindings/c/ranks_handle.h"
#include "bindings/c/status.h"
#include "core/device.h"
#include "core/threads.h"
#include "engine/layout/section.h"
#include "engine/machine/between_gpus.h"
#include "engine/steps/any_order_engine.h"
#include "engine/steps/assembly.h"
#include "engine/steps/state_server.h"
#include "offload/file.h"
#include "optim/optimizer.h"

// The structs behind the ABI's opaque pointers. Private to this room.
struct sluice_model {
  std::vector<sluice::engine::UnitSpec> units;
  std::vector<bool> frozen;  // by parameter
};

namespace sluice::c {

// A plan, with the objects that its engine needs.
struct Planned : engine::Planned {
  std::unique_ptr<optim::Optimizer> optimizer;
  std::unique_ptr<kernels::F32Products> products;  // null where the optimizer has no matrix products
  std::unique_ptr<offload::IoService> io;
  std::uint64_t reserved = 0;  // counted in the budget's base
  std::uint32_t groups = 1;
  int threads = 1;
  sluice_team team = nullptr;
  std::size_t trace_events = 0;
  bool serve_touches = false;
  sluice_ranks* ranks = nullptr;  // the ranks that create engines together; null: it trains alone
  // As in engine::Resources.
  comm::Communicator* data = nullptr;
  comm::Communicator* sections = nullptr;
  // Where each rank has a section of a model: the layout of the whole model, and this rank's section.
  std::unique_ptr<engine::Layout> model;
  std::unique_ptr<engine::Section> section;
  std::unique_ptr<Device> gpu;       // null: the CPU computes, or there is only a plan
  std::unique_ptr<comm::Nccl> nccl;  // null: ranks do not exchange by NCCL
  std::uint64_t context = 0;         // sluice_device_facts.base, counted in budget.device_base
  bool shares_gpu = false;           // whether another rank computes on the same GPU

  std::string to_text() const;  // JSON
  const std::vector<engine::UnitSpec>& model_units() const {
    return section == nullptr ? profile.units : model->units();
  }
};
// Returns all ranks that create their engines together, whichever section each has; null: there are none.
inline sluice_ranks* ranks_of(const sluice_engine_options& options) {
  return options.sections == nullptr ? options.ranks : &options.sections->all;
}
// For an Interruptible: asks the caller, and throws CallbackStopped where that stops the call.
std::function<void()> look_of(const sluice_engine_options& options);
enum class For : std::uint8_t { kPlan, kEngine };  // the plan of an engine opens and measures the GPU
// Facts that ranks have exchanged before they plan.
struct KnownByRanks {
  std::optional<engine::Link> link = {};   // the connection between them; nothing: unknown
  std::unique_ptr<Device> gpu = {};        // this rank's GPU; null: not opened
  bool shares_gpu = false;                 // whether another rank has it, too
  engine::BetweenGpus between_gpus = {};   // how they exchange data
  std::function<void()> begin_phase = {};  // as in engine::GpuWork
};
Planned make_plan(const sluice_model& model, const sluice_engine_options& options, For purpose,
                  KnownByRanks known = {});
// Makes an engine. With ranks it is collective, and all of them get an engine or none does.
std::unique_ptr<sluice_engine> make_engine(const sluice_model& model, const sluice_engine_options& options);

// Throws for invalid GPU options.
void check_device(const sluice_engine_options& options);
// Returns the tier of updates that the options request for a GPU; nothing: the plan chooses. Throws for an
// impossible request.
std::optional<allocator::Tier> updates_of(const sluice_engine_options& options);
// Opens the GPU that computes, if any. Throws as open_device(), Error(kInvalidArgument) where LOCAL_RANK is
// to choose it and this process sees too few, and Error(kBudget) for a GPU that is too small.
std::unique_ptr<Device> open_fitting(const sluice_engine_options& options);
// Collective: finds how fast all ranks' GPUs exchange data, by reads of each other's memory if they can, or
// else by NCCL where that is faster than `link`, as far as options.links allows it.
engine::BetweenGpus know_links(const sluice_engine_options& options, comm::Communicator& communicator,
                               Device& gpu, const std::optional<engine::Link>& link);
// Throws Error(kIo) where options.links requires what the GPUs lack.
void check_links(const sluice_engine_options& options, const engine::BetweenGpus& found);
// Opens the GPU that computes, if any, for an engine (unless the ranks have opened it), and sets the facts
// for the plan. Throws as open_fitting(), and Error(kInvalidArgument) for impossible facts.
void know_device(const sluice_engine_options& options, For purpose, KnownByRanks known, Planned& made);

}  // namespace sluice::c

struct sluice_home {
  sluice::allocator::FormerHome home;
  const pid_t process = ::getpid();
};

struct sluice_engine {
  explicit sluice_engine(sluice::c::Planned made);

  const pid_t process = ::getpid();  // the process that made it, which has its threads
  sluice::c::Planned planned;
  sluice::c::RanksOfEngine ranks;
  sluice::Device* const device = planned.gpu.get();  // null: the CPU computes
  sluice::Threads threads;
  sluice::engine::Assembly<sluice::engine::AnyOrderEngine> assembly;
  sluice::allocator::Ledger& ledger = assembly.ledger();
  sluice::Trace* const trace = assembly.trace();
  sluice::engine::AnyOrderEngine* const engine = &assembly.engine();

  std::mutex mutex;  // serializes calls
  // The thread inside a call, or on which the call runs a function of its caller.
  std::atomic<pid_t> caller{0};
  // Last, because their threads use the other members.
  std::optional<sluice::engine::StateServer> states;
  std::optional<sluice::allocator::TouchServer> touches;

  // Serves a page fault: brings in the unit of the address. Returns why it cannot, or "".
  std::string bring_in(const sluice::allocator::TouchServer::Touch& touch);
  std::string bring_in_now(const sluice::allocator::TouchServer::Touch& touch);
};

namespace sluice::c {

// The engine that is running a function of its caller on this thread, or null.
inline thread_local const sluice_engine* in_function_of = nullptr;

// Runs a function of the caller, which may stop the call by a result that is not 0, or throw (only this
// library's own functions for arrays do). The thread may be one of the engine's. REQUIRES: no other
// call_back() of the engine runs.
template <class Function, class... Arguments>
void call_back(sluice_engine& engine, Function function, Arguments... arguments) {
  struct Inside {
    explicit Inside(sluice_engine& e)
        : of(e), before(std::exchange(in_function_of, &e)), caller(e.caller.exchange(::gettid())) {}
    ~Inside() {
      of.caller = caller;
      in_function_of = before;
    }
    sluice_engine& of;
    const sluice_engine* const before;
    const pid_t caller;
  };
  const int result = [&] {
    const Inside inside(engine);
    return function(arguments...);
  }();
  stop_unless_zero(result);
}

inline std::mutex& mutex_of(sluice_engine& engine) {
  if (engine.process != ::getpid())
    fail(ErrorCode::kState,
         "the engine was made in process {} and is used in {}, which was forked from it; use it where it was "
         "made",
         engine.process, ::getpid());
  if (in_function_of == &engine)
    fail(ErrorCode::kState,
         "a function that the engine has called calls the engine; call it when the function has returned");
  return engine.mutex;
}

// Holds the engine's mutex for the calling thread.
class Turn {
 public:
  explicit Turn(sluice_engine& engine) : engine_(engine), lock_(mutex_of(engine)) {
    engine.caller = ::gettid();
  }
  ~Turn() { engine_.caller = 0; }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  sluice_engine& engine_;
  std::lock_guard<std::mutex> lock_;
};

// Runs `question`, which changes nothing, while it holds the engine's mutex.
template <class Question>
sluice_status ask(const sluice_engine* handle, Question&& question) noexcept {
  return guarded([&] {
    sluice_engine& engine = const_cast<sluice_engine&>(required(handle, "engine"));
    const Turn turn(engine);
    question(std::as_const(engine));
  });
}

// Runs `action` while it holds the engine's mutex. First releases the units that page faults have brought in,
// since they may have been written; if they are still in use, they fault again.
template <class Action>
sluice_status with_engine(sluice_engine* handle, Action&& action) noexcept {
  return guarded([&] {
    sluice_engine& engine = required(handle, "engine");
    const Turn turn(engine);
    engine.engine->release_touched();
    action(engine);
  });
}

inline Dtype dtype_of(sluice_dtype dtype) {
  if (dtype == SLUICE_F32) return Dtype::kF32;
  if (dtype == SLUICE_BF16) return Dtype::kBf16;
  if (dtype == SLUICE_F16) return Dtype::kF16;
  fail(ErrorCode::kInvalidArgument, "{} is no sluice_dtype", static_cast<int>(dtype));
}

// `what` names the array in error messages. Throws Error(kInvalidArgument) for an invalid array.
Json settings_of(const sluice_setting* settings, std::size_t count, const char* what);

inline Dtype state_type_of(sluice_state_type type) {
  if (type == SLUICE_STATE_F32) return Dtype::kF32;
  if (type == SLUICE_STATE_BF16) return Dtype::kBf16;
  if (type == SLUICE_STATE_8BIT) return Dtype::kU8;
  fail(ErrorCode::kInvalidArgument, "{} is no sluice_state_type", static_cast<int>(type));
}

inline engine::UnitId unit_of(const sluice_engine& engine, uint32_t unit) {
  const std::size_t count = engine.planned.profile.units.size();
  if (unit >= count) fail(ErrorCode::kInvalidArgument, "there is no unit {}; the model has {}", unit, count);
  return unit;
}

inline engine::ParameterId parameter_of(const sluice_engine& engine, uint32_t parameter) {
  const std::size_t count = engine.engine->layout().parameters();
  if (parameter >= count)
    fail(ErrorCode::kInvalidArgument, "there is no parameter {}; the model has {}", parameter, count);
  return parameter;
}

inline std::vector<engine::ParameterId> parameters_of(const sluice_engine& engine, const uint32_t* parameters,
                                                      std::size_t count) {
  std::vector<engine::ParameterId> all;
  for (std::size_t i = 0; i < count; ++i)
    all.push_back(parameter_of(engine, (&required(parameters, "parameters"))[i]));
  return all;
}

}  // namespace sluice::c
