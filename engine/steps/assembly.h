#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "allocator/ledger.h"
#include "core/threads.h"
#include "core/trace.h"
#include "engine/plan/plan.h"
#include "engine/steps/engine.h"
#include "offload/records.h"
#include "optim/optimizer.h"

namespace sluice::engine {

// A plan and its inputs.
struct Planned {
  Profile profile;
  Budget budget;
  PlanRequest request;
  MachineRates rates;
  Plan plan;
  std::vector<offload::DiskFolder> disk;  // folders that share budget.disk
  // The part of budget.base for the buffers with which checkpoints are read and written. A buffer is charged
  // when it is taken.
  std::uint64_t checkpoint_buffers = 0;
};

// The environment of an engine: the ledger, with its budgets and what the process already holds, the trace,
// and the records on disk.
class Ground {
 public:
  // The caller's objects; all of them outlive the Ground.
  struct Means {
    Threads& threads;
    offload::IoService& io;
    const optim::Optimizer& optimizer;
    kernels::F32Products* products = nullptr;    // REQUIRES: not null where the optimizer has products
    comm::Communicator* communicator = nullptr;  // see Resources
    Device* device = nullptr;                    // see Resources
    comm::Communicator* sections = nullptr;      // see Resources
    comm::Nccl* nccl = nullptr;                  // see Resources
  };
  struct Options {
    std::size_t trace_events = 0;    // the most events that the trace keeps; 0: there is no trace
    std::size_t timeline_parts = 0;  // entries of the ledger's timeline; 0: there is none
    Trace::Clock::time_point origin = Trace::Clock::now();  // when that timeline begins
    bool may_replan = false;  // replan() may be called, and may put parts on disk that are not there now
  };
  Ground(const Planned& planned, const Means& means, const Options& options);

  allocator::Ledger& ledger() { return ledger_; }
  Trace* trace() { return trace_ ? &*trace_ : nullptr; }        // null: there is none
  offload::RecordStore* disk_records() { return disk_.get(); }  // null: nothing is on disk

 protected:
  Resources resources() {
    return {means_.threads,      ledger_,       disk_.get(),     trace(),    means_.products,
            means_.communicator, means_.device, means_.sections, means_.nccl};
  }
  // `change` applies a plan to the engine.
  void replan(Planned& planned, std::uint64_t base, const std::function<void(const Plan&)>& change);

 private:
  Means means_;
  // The order matters: members are destroyed in reverse.
  allocator::Ledger ledger_;
  allocator::Charge base_, hidden_, device_base_;
  std::optional<Trace> trace_;
  std::unique_ptr<offload::RecordStore> disk_;
};

// An engine with its Ground. The command line, the C ABI and native training all make their engines in this
// way. Thread rule: the engine's.
template <class Kind>
class Assembly : public Ground {
 public:
  // Takes all memory and disk space of the plan. Throws the errors of RecordStore and of the engine, and then
  // holds nothing.
  Assembly(const Planned& planned, const Means& means, const Options& options)
      : Ground(planned, means, options),
        engine_(planned.profile, planned.plan, means.optimizer, resources()) {}

  Kind& engine() { return engine_; }

  // Makes a new plan, with the same chunks, for a process that holds `base` bytes (see Budget::base), and
  // applies it with the engine's replan(), whose errors it throws. `planned` is what the assembly was made
  // from; it becomes the new plan, and stays as it is after an error. REQUIRES: Options::may_replan.
  void replan(Planned& planned, std::uint64_t base) {
    Ground::replan(planned, base, [this](const Plan& plan) { engine_.replan(plan); });
  }

 private:
  Kind engine_;
};

}  // namespace sluice::engine
