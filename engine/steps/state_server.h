#pragma once
#include <mutex>
#include <thread>

#include "engine/ranks/state_reads.h"
#include "engine/steps/engine.h"

namespace sluice::engine {

// A thread that answers other ranks' reads of this rank's state while the client computes, or waits for
// something else than the engine, perhaps for the reader. It has its turns as the client's threads do.
class StateServer {
 public:
  // turns: is held by whoever calls the engine. REQUIRES: engine.state_reads() is not null.
  StateServer(Engine& engine, std::mutex& turns);
  ~StateServer();  // refuses what comes from then on
  StateServer(const StateServer&) = delete;
  StateServer& operator=(const StateServer&) = delete;

 private:
  void run();

  Engine& engine_;
  StateReads& reads_;
  std::mutex& turns_;
  std::thread thread_;  // last, since it uses the rest
};

}  // namespace sluice::engine
