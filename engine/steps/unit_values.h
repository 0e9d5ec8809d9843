#pragma once
#include <exception>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "core/dtype.h"
#include "engine/layout/layout.h"
#include "engine/memory/state_store.h"
#include "engine/ranks/ranks.h"
#include "engine/steps/engine.h"
#include "engine/updates/update_pipeline.h"

namespace sluice::engine {

class HostStaging;

// The resources for streaming the values and state of one unit, chunk by chunk, through the staging slots of
// an idle pipeline.
struct ValueStreams {
  const Layout& layout;
  StateStore& states;
  UpdatePipeline& pipeline;
  const Resources& resources;
  // Where state is partitioned: the ranks, and on rank 0 also the format of each rank's state.
  Ranks* ranks = nullptr;
  const std::vector<StateFormat>* formats = nullptr;
  HostStaging* host = nullptr;  // null where the CPU computes; else a GPU has values and state
  // On rank 0 where the other ranks make no call, and it reads their state after that many changes.
  std::optional<std::uint64_t> changes = {};
};

// Loads a unit. `values` is the unit's home, which is held; padding becomes zero. own_alone: values whose
// state other ranks have stay as they are. Returns the exception that the source threw: it is not called
// again, and the unit's values are then invalid. Errors of the engine's own are thrown.
std::exception_ptr load_values(const ValueStreams& streams, UnitId unit, Array values,
                               const UnitSource& source, bool own_alone);

// Saves a unit. Where state is partitioned, rank 0's sink gets the parts of all ranks, and this is
// collective, unless it reads them. Returns the exception that the sink threw, after which it is not called
// again, or that of a rank which refuses to be read. Errors of the engine's own are thrown.
std::exception_ptr save_values(const ValueStreams& streams, UnitId unit, ConstArray values,
                               const UnitSink& sink);

// Hands out the state of one chunk of this rank's. The function's memory may be a staging slot's. Returns the
// exception of the function.
std::exception_ptr save_chunk(const ValueStreams& streams, UnitId unit, std::size_t chunk,
                              const std::function<void(std::span<const std::byte>)>& state);

// Hands out the wanted parameters of `values`, the unit's home. Returns the exception of the sink.
std::exception_ptr save_wanted_parameters(const ValueStreams& streams, UnitId unit, ConstArray values,
                                          const UnitSink& sink, const WantedElements& wanted);

// This rank's shard of a unit's parameters: in memory, or to be read; or neither.
struct OwnParameters {
  ConstArray shard = {};
  bool on_gpu = false;  // whether `shard` is in GPU memory
  std::function<void(std::size_t offset, std::span<std::byte> into, Done done)> read;
  bool any() const { return shard.data != nullptr || read != nullptr; }
};

// Hands out this rank's wanted masters and state; with them the parameters of its shard. Returns the
// exception of the sink.
std::exception_ptr save_own_chunks(const ValueStreams& streams, UnitId unit, const OwnParameters& parameters,
                                   const UnitSink& sink, const WantedElements& wanted);

// Hands a unit's parameters to sink.values, in f32, without its state. Returns the exception of the sink.
std::exception_ptr save_parameters(const ValueStreams& streams, UnitId unit, ConstArray values,
                                   const UnitSink& sink);

// Updates masters from `values`, the unit's home, which a client has edited. A master that no longer rounds
// to its value becomes the value; the others keep what the narrower type cannot hold. Waits for its
// transfers. REQUIRES: states.has_master(unit).
void take_masters(const ValueStreams& streams, UnitId unit, ConstArray values);

}  // namespace sluice::engine
