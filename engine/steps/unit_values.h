#pragma once
#include <exception>
#include <functional>
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

// What is needed to stream the values and state of one unit, chunk by chunk, through the staging slots of an
// idle pipeline.
struct ValueStreams {
  const Layout& layout;
  StateStore& states;
  UpdatePipeline& pipeline;
  const Resources& resources;
  // Where each rank has a part of the state: the ranks, and on rank 0 also how each of them keeps its state.
  Ranks* ranks = nullptr;
  const std::vector<StateFormat>* formats = nullptr;
  HostStaging* host = nullptr;  // null where the CPU computes; else values and state are a GPU's
};

// Loads a unit. `values` is the unit's home, which is held; padding becomes zero. With own_alone the values
// of which other ranks have the state stay as they are. Returns the exception that the source threw: it is
// not called again, and the unit's values are then of no use. Errors of the engine's own are thrown.
std::exception_ptr load_values(const ValueStreams& streams, UnitId unit, Array values,
                               const UnitSource& source, bool own_alone);

// Saves a unit. Where state is in parts, all ranks call it, and rank 0's sink gets what all of them have.
// Returns the exception that the sink threw, after which it is not called again. Errors of the
// engine's own are thrown.
std::exception_ptr save_values(const ValueStreams& streams, UnitId unit, ConstArray values,
                               const UnitSink& sink);

// Hands out the parameters of `values`, the unit's home, that are wanted.
std::exception_ptr save_wanted_parameters(const ValueStreams& streams, UnitId unit, ConstArray values,
                                          const UnitSink& sink, const WantedElements& wanted);

// This rank's shard of a unit's parameters: in memory, or read from somewhere else; or neither.
struct OwnParameters {
  ConstArray shard = {};
  bool on_gpu = false;  // where that is
  std::function<void(std::size_t offset, std::span<std::byte> into, Done done)> read;
  bool any() const { return shard.data != nullptr || read != nullptr; }
};

// Hands out the masters and the state that are here and wanted; with them the parameters of the own shard.
// Both return what the sink threw.
std::exception_ptr save_own_chunks(const ValueStreams& streams, UnitId unit, const OwnParameters& parameters,
                                   const UnitSink& sink, const WantedElements& wanted);

// Hands a unit's parameters to sink.values, in f32, without its state. Returns what the sink threw.
std::exception_ptr save_parameters(const ValueStreams& streams, UnitId unit, ConstArray values,
                                   const UnitSink& sink);

// Brings masters up to date with `values`, the unit's home, which a client has edited. A master that no
// longer rounds to its value becomes the value; the others keep what the narrower type cannot hold. Waits for
// its transfers. REQUIRES: states.has_master(unit).
void take_masters(const ValueStreams& streams, UnitId unit, ConstArray values);

}  // namespace sluice::engine
