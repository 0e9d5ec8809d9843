#pragma once
#include <memory>

#include "engine/memory/device_work.h"
#include "engine/updates/update_executor.h"

namespace sluice::engine {

// The executor for a GPU, whose memory has all parts of a work. It queues the work on the update stream,
// together with the works before it that deferred to it (ChunkWork::goes_on), and calls `done` before begin()
// returns. Throws the errors of optim::DeviceUpdate(). All arguments outlive it.
std::unique_ptr<UpdateExecutor> make_device_executor(const Layout& layout, const optim::Optimizer& optimizer,
                                                     const StateFormat& format, DeviceWork& gpu,
                                                     Threads& threads);

}  // namespace sluice::engine
