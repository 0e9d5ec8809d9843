#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "allocator/ledger.h"
#include "core/threads.h"
#include "core/trace.h"
#include "engine/engine.h"
#include "engine/plan/plan.h"
#include "offload/records.h"
#include "optim/optimizer.h"

namespace sluice::engine {

// A plan, and what it was made of.
struct Planned {
  Profile profile;
  Budget budget;
  PlanRequest request;
  MachineRates rates;
  Plan plan;
  std::vector<offload::DiskFolder> disk;  // the folders that lend budget.disk
  // The part of budget.base through which files of values are read and written: it is charged when it is
  // taken.
  std::uint64_t checkpoint_buffers = 0;
};

// What an engine stands on: the ledger with its budgets and what the process holds, the trace, the records on
// disk. What an engine is made for is said here once.
class Ground {
 public:
  // What there is before; all of it outlives this.
  struct Means {
    Threads& threads;
    offload::IoService& io;
    const optim::Optimizer& optimizer;
    kernels::F32Products* products = nullptr;  // REQUIRES: not null where the optimizer has products
  };
  struct Options {
    std::size_t trace_events = 0;                           // that are kept; 0: there is no trace
    std::size_t timeline_parts = 0;                         // of the ledger's timeline; 0: there is none
    Trace::Clock::time_point origin = Trace::Clock::now();  // of that timeline
    bool may_replan = false;  // another plan may use the disk, where this one does not
  };
  Ground(const Planned& planned, const Means& means, const Options& options);

  allocator::Ledger& ledger() { return ledger_; }
  Trace* trace() { return trace_ ? &*trace_ : nullptr; }        // null: there is none
  offload::RecordStore* disk_records() { return disk_.get(); }  // null: nothing is on disk

 protected:
  Resources resources() { return {means_.threads, ledger_, disk_.get(), trace(), means_.products}; }
  // change: brings the engine to the plan.
  void replan(Planned& planned, std::uint64_t base, const std::function<void(const Plan&)>& change);

 private:
  Means means_;
  // In the order in which they are taken; they end in the opposite one.
  allocator::Ledger ledger_;
  allocator::Charge base_, hidden_;
  std::optional<Trace> trace_;
  std::unique_ptr<offload::RecordStore> disk_;
};

// An engine on its ground: every door makes its engine so. Thread rule: the engine's.
template <class Kind>
class Assembly : public Ground {
 public:
  // Takes all memory and disk space of the plan. Throws as RecordStore and the engine do; nothing is held
  // then.
  Assembly(const Planned& planned, const Means& means, const Options& options)
      : Ground(planned, means, options),
        engine_(planned.profile, planned.plan, means.optimizer, resources()) {}

  Kind& engine() { return engine_; }

  // Makes the plan for a process that holds `base` (as Budget::base) with the same chunks, and changes to it:
  // what the engine's replan() says. `planned` is what this was made for, and is what it is now; after an
  // error it is as it was. REQUIRES: Options::may_replan.
  void replan(Planned& planned, std::uint64_t base) {
    Ground::replan(planned, base, [this](const Plan& plan) { engine_.replan(plan); });
  }

 private:
  Kind engine_;
};

}  // namespace sluice::engine
