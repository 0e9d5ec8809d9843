#pragma once
#include <thread>

#include "engine/ranks/state_reads.h"

struct sluice_engine;

namespace sluice::c {

// A thread that answers other ranks' reads of this rank's state while the client computes, or waits for
// something else than the engine, perhaps for the reader. It has its turns as the client's threads do.
class StateServer {
 public:
  StateServer(sluice_engine& engine, engine::StateReads& reads);
  ~StateServer();  // refuses what comes from then on
  StateServer(const StateServer&) = delete;
  StateServer& operator=(const StateServer&) = delete;

 private:
  void run();

  sluice_engine& engine_;
  engine::StateReads& reads_;
  std::thread thread_;  // last, since it uses the rest
};

}  // namespace sluice::c
