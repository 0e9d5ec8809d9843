#pragma once
#include <exception>

#include "core/dtype.h"
#include "engine/engine.h"
#include "engine/layout.h"
#include "engine/step/update_pipeline.h"
#include "engine/store/state_store.h"

namespace sluice::engine {

// Streams one unit's values and state in and out, chunk by chunk through the staging slots of an idle
// pipeline.
struct ValueStreams {
  const Layout& layout;
  StateStore& states;
  UpdatePipeline& pipeline;
  const Resources& resources;
};

// values: the unit's home, held. Padding becomes zero. Returns what the source threw, after which it is not
// called again and the unit's values are of no use; errors of Sluice's own are thrown.
std::exception_ptr load_values(const ValueStreams& streams, UnitId unit, Array values,
                               const UnitSource& source);

// Returns what the sink threw, after which it is not called again; errors of Sluice's own are thrown.
std::exception_ptr save_values(const ValueStreams& streams, UnitId unit, ConstArray values,
                               const UnitSink& sink);

// values: the unit's home, which a client has written. A master whose rounding is no longer what stands there
// becomes it; the others keep what the narrower type cannot hold. Waits for its transfers. REQUIRES:
// states.has_master(unit).
void take_masters(const ValueStreams& streams, UnitId unit, ConstArray values);

}  // namespace sluice::engine
