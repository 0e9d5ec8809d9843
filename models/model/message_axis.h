#pragma once
#include <functional>
#include <span>
#include <string>

#include "comm/communicator.h"
#include "core/trace.h"
#include "core/transfers.h"
#include "engine/memory/waits.h"
#include "models/graph/context.h"

namespace sluice::models {

// AxisRanks over a communicator. Thread rule: one thread.
class MessageAxis : public AxisRanks {
 public:
  // `ranks` outlives this. `trace`, if not null, gets waits. `meanwhile`, if not null, is called from time to
  // time during them.
  explicit MessageAxis(comm::Communicator& ranks, Trace* trace = nullptr,
                       std::function<void()> meanwhile = {});
  void all_reduce(const std::string& name, std::span<float> values,
                  const std::function<void()>& beside) override;
  void all_gather(const std::string& name, Array values, std::size_t count) override;
  const engine::Waits& waits() const { return waits_; }

 private:
  void wait_for(const std::string& name, TransferGroup& group);

  comm::Communicator& ranks_;
  engine::Waits waits_;
  const std::function<void()> meanwhile_;
};

}  // namespace sluice::models
