#pragma once
#include <exception>
#include <optional>
#include <vector>

#include "engine/layout/state_format.h"
#include "engine/ranks/state_reads.h"
#include "engine/steps/engine.h"

// Private to this room.
namespace sluice::engine {

struct Core;
struct ValueStreams;

// Loads and saves the values of units, and their masters and state. Thread rule: one thread.
class Values {
 public:
  explicit Values(Core& core);  // the core outlives it

  void require(UnitId unit) const;  // throws a Refusal where the unit has no values
  // These calls return the exception of the caller's function, which leaves the engine whole; they throw
  // others.
  std::exception_ptr load(UnitId unit, const UnitSource& source);
  // alone: rank 0 saves a unit while the others make no call, and serve(); their own such calls do nothing
  // where its state is partitioned.
  std::exception_ptr save(UnitId unit, const UnitSink& sink, bool alone = false);
  std::exception_ptr save_own(UnitId unit, const UnitSink& sink, const WantedElements& wanted);
  // Updates the masters of a held unit from its parameters, which a client has edited.
  void take_masters(UnitId unit);
  void wait_for_edit(UnitId unit);  // collective: until every rank changes the unit's values
  // Answers the next read of this rank's state, if its updates are as far. may_settle: after what is left of
  // them; else only where nothing is left, as while the engine waits for other ranks.
  void serve(bool may_settle);
  void state_is_taken(const std::string& error);  // as Engine::state_is_taken()

 private:
  ValueStreams streams(UnitId unit);
  void take_shard(UnitId unit, bool loaded);
  std::exception_ptr save_parameters_alone(UnitId unit, const UnitSink& sink);
  std::exception_ptr gather_wholes(UnitId unit, bool alone);
  std::optional<UnitId> unit_of(const StateRead& read) const;  // nullopt: this rank has nothing of that kind

  Core& c_;
  std::vector<bool> has_;                      // by unit
  std::vector<StateFormat> formats_of_ranks_;  // by rank; made when first needed
  // How often this rank has asked whether rank 0 has taken the state, and after how many steps.
  std::uint64_t asked_ = 0, asked_after_ = 0;
  bool was_refused_ = false;  // by another rank, which had rank 0 take its state alone
};

}  // namespace sluice::engine
