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

// A plan, and what it was made from.
struct Planned {
  Profile profile;
  Budget budget;
  PlanRequest request;
  MachineRates rates;
  Plan plan;
  std::vector<offload::DiskFolder> disk;  // the folders whose space budget.disk counts
  // The part of budget.base for the buffers with which checkpoints are read and written. A buffer is charged
  // when it is taken.
  std::uint64_t checkpoint_buffers = 0;
};

// What an engine needs to exist: the ledger with its budgets and with what the process holds already, the
// trace, and the records on disk.
class Ground {
 public:
  // What the caller has already; all of it outlives the Ground.
  struct Means {
    Threads& threads;
    offload::IoService& io;
    const optim::Optimizer& optimizer;
    kernels::F32Products* products = nullptr;    // REQUIRES: not null where the optimizer has products
    comm::Communicator* communicator = nullptr;  // see Resources
    Device* device = nullptr;                    // see Resources
    comm::Communicator* sections = nullptr;      // see Resources
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
    return {means_.threads,      ledger_,       disk_.get(),    trace(), means_.products,
            means_.communicator, means_.device, means_.sections};
  }
  // `change` applies a plan to the engine.
  void replan(Planned& planned, std::uint64_t base, const std::function<void(const Plan&)>& change);

 private:
  Means means_;
  // The members are destroyed in the opposite order.
  allocator::Ledger ledger_;
  allocator::Charge base_, hidden_, device_base_;
  std::optional<Trace> trace_;
  std::unique_ptr<offload::RecordStore> disk_;
};

// An engine together with its Ground. The command line, the C ABI and native training all make their engines
// so. Thread rule: the engine's.
template <class Kind>
class Assembly : public Ground {
 public:
  // Takes all memory and disk space of the plan. Throws what RecordStore and the engine throw, and then holds
  // nothing.
  Assembly(const Planned& planned, const Means& means, const Options& options)
      : Ground(planned, means, options),
        engine_(planned.profile, planned.plan, means.optimizer, resources()) {}

  Kind& engine() { return engine_; }

  // Makes a new plan, with the same chunks, for a process that holds `base` (see Budget::base), and applies
  // it with the engine's replan(), whose errors are thrown. `planned` is what the assembly was made from; it
  // is changed to the new plan, and stays as it is after an error. REQUIRES: Options::may_replan.
  void replan(Planned& planned, std::uint64_t base) {
    Ground::replan(planned, base, [this](const Plan& plan) { engine_.replan(plan); });
  }

 private:
  Kind engine_;
};

}  // namespace sluice::engine
