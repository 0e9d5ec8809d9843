#pragma once
#include <functional>
#include <map>
#include <tuple>

#include "comm/communicator.h"
#include "core/trace.h"
#include "core/transfers.h"
#include "engine/memory/waits.h"
#include "models/model/neighbours.h"

namespace sluice::models {

// Neighbours that are other ranks, over a communicator.
class MessageNeighbours : public Neighbours {
 public:
  // `sections` has the ranks of the pipeline, in its order, and outlives this. `trace`, if not null, gets
  // messages and waits. `meanwhile`, if not null, is called from time to time during waits.
  explicit MessageNeighbours(comm::Communicator& sections, Trace* trace = nullptr,
                             std::function<void()> meanwhile = {});
  void begin(const engine::Action& message, std::span<std::byte> bytes) override;
  void await(const engine::Action& message) override;
  const engine::Waits& waits() const { return waits_; }

 private:
  comm::Communicator& sections_;
  Trace* const trace_;
  engine::Waits waits_;
  const std::function<void()> meanwhile_;
  using Key = std::tuple<engine::Action::Kind, std::size_t, std::size_t>;  // kind, chunk and item
  std::map<Key, TransferGroup> under_way_;
};

}  // namespace sluice::models
