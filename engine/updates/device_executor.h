#pragma once
#include <memory>

#include "engine/memory/device_work.h"
#include "engine/updates/update_executor.h"

namespace sluice::engine {

// The executor for a GPU, on whose memory all parts of a work are: it queues the work on the stream for
// updates, together with those before it that go on with it, and calls `done` as soon as it has. Throws what
// optim::DeviceUpdate() throws. Everything that is handed in outlives it.
std::unique_ptr<UpdateExecutor> make_device_executor(const Layout& layout, const optim::Optimizer& optimizer,
                                                     const StateFormat& format, DeviceWork& gpu,
                                                     Threads& threads);

}  // namespace sluice::engine
